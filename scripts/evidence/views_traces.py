"""Views of `bench`: what methods find on traces, by budget, by layer and by head."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked

Record: TypeAlias = "Mapping[str, Any]"

BUDGETS = (256, 1024)  # that tables show
SHORT = (
    *("Exact", "LowBit", "TwoStage", "Quest", "Quest(page=8, int8=True)", "SAAP", "KMeans", "Moments"),
    *("RetrievalAttention", "Random", "Window"),
)
MISSED = "less than half of their attention on indexed rows recovered"


def spec(label: str) -> str:
    """`Quest(page=8, int8=True)` as one types it: `quest:page=8,int8=True`; a part of it stands in brackets."""
    return _spec(ast.parse(label, mode="eval").body)


def _spec(one: ast.expr) -> str:
    called = one.func if isinstance(one, ast.Call) else one
    name = ast.unparse(called)
    short = {"RetrievalAttention": "retrieval", "QueryBridge": "bridge"}.get(name, name.lower())
    given = [f"{part.arg}={_given(part.value)}" for part in one.keywords] if isinstance(one, ast.Call) else []
    return f"{short}:{','.join(given)}" if given else short


def _given(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.Name) and value.id[0].isupper():  # a part as by default
        return _spec(value)
    return f"[{_spec(value)}]" if isinstance(value, ast.Call) else ast.unparse(value)


class Measured:
    """The means of a record, by trace, label and budget."""

    def __init__(self, record: Record) -> None:
        self.rows = rows(record)
        self.traces = list(dict.fromkeys(one["trace"] for one in self.rows))

    def labels(self) -> list[str]:
        return list(dict.fromkeys(one["label"] for one in self.rows))

    def at(self, label: str, budget: int | None, trace: str | None = None) -> dict[str, Any] | None:
        """What was measured, or None. A method that does not look at the budget has one line for all."""
        mine = [one for one in self.rows if one["label"] == label and trace in (None, one["trace"])]
        if len({one["budget"] for one in mine}) == 1:
            return mine[0]
        return next((one for one in mine if one["budget"] == budget), None)

    def must(self, label: str, budget: int | None, trace: str | None = None) -> dict[str, Any]:
        """The same; LookupError where there is none."""
        found = self.at(label, budget, trace)
        if found is None:
            raise LookupError(f"the record has no {label} at budget {budget}")
        return found

    def every(self, label: str) -> bool:
        """Whether the method looks at the budget."""
        return len({one["budget"] for one in self.rows if one["label"] == label}) > 1


def setting(one: Mapping[str, Any]) -> str:
    """What a measurement was made of: tokens, sink, window and layers."""
    layers = ", ".join(map(str, one["layers"]))
    return (
        f"{one['tokens']:,} tokens, of which the last {one['last']} were decoded, with sink {one['sink']} and window "
        f"{one['window']}; means over the heads of layers {layers}"
    )


def full(record: Record) -> str:
    """Every method at the budgets of the tables, on one trace."""
    found = Measured(record)
    one = found.rows[0]
    lines = []
    for label in found.labels():
        for budget in BUDGETS if found.every(label) else BUDGETS[:1]:
            at = found.at(label, budget)
            if at is None:
                continue
            name = ticked(spec(label)) + (f", {budget}" if found.every(label) else "")
            cells = [f"{at['mean.attended']:,.0f}", percent(at["mean.bytes_share"]), f"{at['mean.recall@1']:.2f}"]
            cells += [f"{at[f'mean.{measure}']:.2f}" for measure in ("mass", "recovered")]
            lines.append([name, *cells, percent(at["mean.relative_error"], 1)])
    head = [f"`{one['trace']}`: selector, budget", "rows", "bytes", "best row found", "mass", "recovered", "error"]
    return parts(text(f"`{one['trace']}`: {setting(one)}."), table(head, lines))


def short(*records: Record) -> str:
    """What is recovered and how far the output is off at both budgets, a column a trace."""
    found = [Measured(record) for record in records]
    labels = [label for label in SHORT if all(label in one.labels() for one in found)]
    head = ["recovered (error)"]
    for budget in BUDGETS:
        head += [f"`{one.traces[0]}`, {budget:,} rows" for one in found]
    lines = []
    for label in labels:
        cells = []
        for budget in BUDGETS if found[0].every(label) else BUDGETS[:1]:
            for one in found:
                at = one.must(label, budget)
                cells.append(f"{percent(at['mean.recovered'])} ({percent(at['mean.relative_error'])})")
        lines.append([ticked(spec(label)), *cells, *[""] * (len(head) - 1 - len(cells))])
    return table(head, lines)


def lead(*records: Record) -> str:
    """At the smaller budget, on every trace: what is recovered, the error, and the bytes read on the last trace."""
    found, budget = [Measured(record) for record in records], BUDGETS[0]
    labels = [label for label in SHORT if label in found[0].labels() and label != "Random"]  # `window` is the floor
    lines = []
    for label in labels:
        cells, read = [], []
        for one in found:
            if label not in one.labels():
                cells.append("")
                continue
            at = one.must(label, budget)
            cells.append(f"{percent(at['mean.recovered'])} ({percent(at['mean.relative_error'])})")
            read.append(f"{100 * at['mean.bytes_share']:.0f}")
        lines.append([ticked(spec(label)), *cells, f"{', '.join(read)} %"])
    return table([f"{budget} rows", *(f"`{one.traces[0]}`" for one in found), "bytes read, by trace"], lines)


def printed(record: Record) -> str:
    """A few lines of what `make demo` prints, on its first trace."""
    found = Measured(record)
    trace = found.traces[0]
    one = found.must("Exact", BUDGETS[0], trace)
    shown = [("Exact", BUDGETS[0]), ("Quest", BUDGETS[0]), ("Quest", BUDGETS[1]), ("Window", None)]
    lines = ["selector  budget  rows  bytes %       error %    recovered"]
    for label, budget in shown:
        at = found.must(label, budget, trace)
        given = at["budget"] if found.every(label) else "-"
        error = f"{100 * at['mean.relative_error']:.1f} ({100 * at['worst.relative_error']:.1f})"
        share = f"{at['mean.recovered']:.2f} ({at['worst.recovered']:.2f})"
        lines.append(
            f"{label:9} {given:>6} {at['mean.attended']:5,.0f} {100 * at['mean.bytes_share']:8.1f} "
            f"{error:>14} {share:>12}"
        )
    words = text(
        f"`make demo` took {record['seconds']:.0f} s on {record['machine']['cores']} cores "
        f"({record['machine']['processor']}), with the packages there; in that time it fetched and converted SmolLM2 "
        f"and made three traces. Some lines of what it prints (`{trace}`: {one['tokens']:,} tokens; mean over layers "
        "and heads, the worst head in brackets):"
    )
    return parts(words, "```text\n" + "\n".join(lines) + "\n```")


def layers(record: Record) -> str:
    """What methods recover by layer, at equal rows and at equal bytes."""
    return parts(*(part for one in record["by_layer"] for part in (_condition(one), _layers(one))))


def _condition(one: Mapping[str, Any]) -> str:
    at = (
        f"{round(one.get('attended', one['at'])):,} rows"
        if one["equal"] == "rows"
        else f"{percent(one['at'])} of the cache's bytes"
    )
    return f"`{one['trace']}` at {at}, share recovered of the attention on indexed rows, by layer:"


def _layers(one: Mapping[str, Any]) -> str:
    head = ["layer", *(ticked(spec(method["label"])) for method in one["methods"])]
    lines = [
        [
            str(layer),
            *("" if method["recovered"][i] is None else f"{method['recovered'][i]:.2f}" for method in one["methods"]),
        ]
        for i, layer in enumerate(one["layers"])
    ]
    lines.append(["bytes", *(percent(method["mean"]["bytes_share"]) for method in one["methods"])])
    lines.append(["heads missed", *(f"{method['missed']} of {one['heads']}" for method in one["methods"])])
    return table(head, lines)


def heads(*records: Record) -> str:
    """Which method wins where, and whether methods fail at the same heads: a line a trace and condition."""
    return bullets(*(_heads(one) for record in records for one in record["by_layer"]))


def _heads(one: Mapping[str, Any]) -> str:
    at = (
        f"{round(one.get('attended', one['at'])):,} rows"
        if one["equal"] == "rows"
        else f"{percent(one['at'])} of the bytes"
    )
    rivals = [method for method in one["methods"] if not method["scans_all"]]
    best = max(rivals, key=lambda method: method["mean"]["recovered"])
    i = one["methods"].index(best)
    wins = sorted(rivals, key=lambda method: -(method["wins"] or 0))
    won = ", ".join(f"{ticked(spec(method['label']))} at {method['wins']}" for method in wins if method["wins"])
    words = (
        f"**`{one['trace']}` at {at}**: of the methods that do not score every key {ticked(spec(best['label']))} "
        f"recovers most, {percent(best['mean']['recovered'])}. Of {one['heads']} heads the best is {won}."
    )
    others = [
        f"{ticked(spec(method['label']))} {one['missed_by_both'][i][j]}"
        for j, method in enumerate(one["methods"])
        if method in rivals and j != i and method["missed"] < one["heads"]
    ]
    if best["missed"] and others:
        words += f" It misses {best['missed']} ({MISSED}); of these miss too: {', '.join(others)}."
    return words + _alike(one, rivals)


def _alike(one: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """How alike methods order the heads."""
    ranks = one["spearman"]["recovered"]
    places = [one["methods"].index(method) for method in rivals]
    pairs = [ranks[a][b] for a in places for b in places if a < b and ranks[a][b] is not None]
    if not pairs:
        return ""
    return (
        f" Any two methods order the heads by what they recover with a rank correlation between {min(pairs):.2f} and "
        f"{max(pairs):.2f}."
    )


def changing(record: Record) -> str:
    """How the rows that matter change: each token's own best rows against the first token's."""
    found = Measured(record)
    lines = []
    for trace in found.traces:
        own, kept = (found.must(label, None, trace) for label in ("Exact", _refreshed(found)))
        lines.append(
            f"`{trace}`: {percent(own['mean.mass'])} of the attention is on each token's own top rows, "
            f"{percent(kept['mean.mass'])} on the first token's"
        )
    return text("; ".join(lines) + ".")


def _refreshed(found: Measured) -> str:
    for label in found.labels():
        if "refresh" in label:
            return label
    raise LookupError("the record has no method that keeps its choice")
