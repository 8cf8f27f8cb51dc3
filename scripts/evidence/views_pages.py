"""Views of page scores at equal rows: what each finds, at how many bytes of index, and how far it is from the mass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked
from scripts.evidence.views_traces import Measured, setting, spec

Record: TypeAlias = "Mapping[str, Any]"

ORACLE = "PageMass"
MEASURES = ("offset", "deviation", "rank")


def _budgets(found: Measured) -> list[int]:
    return sorted({one["budget"] for one in found.rows})


def _row_bytes(loose: Record) -> dict[str, float]:
    """Selector as one types it -> bytes of an entry for each row and KV head."""
    return {one["selector"]: one["row_bytes"] for one in loose["lines"]}


def recovered(record: Record, loose: Record) -> str:
    """A row a score, the best at the middle budget first: bytes, recovered share and error at each budget."""
    found, each = Measured(record), _row_bytes(loose)
    budgets = _budgets(found)
    middle = budgets[len(budgets) // 2]
    order = sorted(found.labels(), key=lambda label: -found.must(label, middle)["mean.recovered"])
    lines = []
    for label in order:
        at = [found.must(label, budget) for budget in budgets]
        name = spec(label)
        held = f"{each[name]:.1f}" if name in each else ""
        shares = [percent(one["mean.recovered"], 1) for one in at]
        lines.append([ticked(name), held, *shares, *(percent(one["mean.relative_error"], 1) for one in at)])
    one = found.rows[0]
    head = ["selector", "index, bytes a row"]
    head += [f"recovered, {budget:,} rows" for budget in budgets] + [f"error, {budget:,} rows" for budget in budgets]
    words = text(f"`{one['trace.model']}`, the text {one['trace']}: {setting(one)}.")
    return parts(words, table(head, lines))


def findings(record: Record, loose: Record) -> str:
    """The best score at no more bytes than Quest's bounds, and how much of the way to the true mass it goes."""
    found, each = Measured(record), _row_bytes(loose)
    quest = next(one["selector"] for one in loose["lines"] if spec(one["label"]).partition(":")[0] == "quest")
    items = []
    for budget in _budgets(found):
        at = {spec(label): found.must(label, budget)["mean.recovered"] for label in found.labels()}
        able = {name: value for name, value in at.items() if each.get(name, float("inf")) <= each[quest]}
        best = max(able, key=lambda name: able[name])
        oracle = at[spec(ORACLE)]
        base = max(value for name, value in at.items() if name in ("quest", "quest:group=softmax"))
        way = (able[best] - base) / (oracle - base) if oracle > base else 0.0
        items.append(
            f"{budget:,} rows: of the scores at no more bytes than Quest's bounds, {ticked(best)} finds most, "
            f"{percent(able[best], 1)} at {each[best]:.1f} bytes a row, where Quest finds {percent(base, 1)} at "
            f"{each[quest]:.1f}. The true mass of pages finds {percent(oracle, 1)}: {percent(way)} of the way."
        )
    return bullets(*items)


def loose(record: Record) -> str:
    """How far scores are from the mass, by layer."""
    lines = record["lines"]
    layers = list(dict.fromkeys(one["layer"] for one in lines))
    rows = []
    for name in dict.fromkeys(one["selector"] for one in lines):
        mine = {one["layer"]: one for one in lines if one["selector"] == name}
        every = [_mean([value for at in layers for value in mine[at][measure]]) for measure in MEASURES]
        ranks = [f"{_mean(mine[at]['rank']):.2f}" for at in layers]
        rows.append([ticked(name), *(f"{value:.2f}" for value in every), *ranks])
    one = lines[0]
    words = text(
        f"The trace {one['trace']} of {one['tokens']:,} tokens, the last {record['last']} of which ask; means over "
        "tokens and query heads. Offset: score less the logarithm of the page's mass. Deviation: of that, over the "
        "pages of a token. Rank: rank correlation with the mass, of all layers and of each."
    )
    return parts(words, table(["score", "offset", "deviation", "rank", *(f"layer {at}" for at in layers)], rows))


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known)
