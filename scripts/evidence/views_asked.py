"""Views of `eval` with prompts that have answers: shares answered, by method and budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked
from scripts.evidence.views_traces import spec
from sparseattn.evaluation.intervals import wilson
from sparseattn.reporting.eval_tables import ANSWERED

Record: TypeAlias = "Mapping[str, Any]"

SHORT = ("Exact", "Moments", "SAAP", "Quest", "Window")
LONG = ("Exact", "Moments", "SAAP", "Quest(group='each')", "Quest", "Random", "Window")
NAMES = {"Quest(group='each')": "quest:group=each"}  # else a label in small letters
FULL = "full"


class Asked:
    """The answers of a record, by task, method and budget."""

    def __init__(self, record: Record) -> None:
        self.rows = rows(record)
        self.tasks = list(dict.fromkeys(one["task"] for one in self.rows))
        self.budgets = list(dict.fromkeys(one["budget"] for one in self.rows if one["budget"] is not None))
        self.context = self._mean([one["context"] for one in self.rows if one["method"] == FULL])

    def share(self, task: str, method: str, budget: str | None) -> float:
        """Mean score."""
        return self._mean([one["score"] for one in self._some(task, method, budget)])

    def read(self, task: str, method: str, budget: str | None) -> float:
        """Mean rows beyond sink and window."""
        zones = self.rows[0]["sink"] + self.rows[0]["window"]
        return self._mean([one["rows"] for one in self._some(task, method, budget)]) - zones

    def pair(self, method: str, budget: str | None) -> str:
        """`100, 20`: of each task in per cent."""
        return ", ".join(f"{100 * self.share(task, method, budget):.0f}" for task in self.tasks)

    def prompts(self) -> int:
        """Of a task."""
        return sum(one["task"] == self.tasks[0] and one["method"] == FULL for one in self.rows)

    def _some(self, task: str, method: str, budget: str | None) -> list[dict[str, Any]]:
        found = [one for one in self.rows if (one["task"], one["method"], one["budget"]) == (task, method, budget)]
        if not found:
            raise LookupError(f"the record has no {method} at {budget} for {task}")
        return found

    @staticmethod
    def _mean(values: list[float]) -> float:
        return sum(values) / len(values)


def _share(budget: str, context: float) -> str:
    return (
        f"{100 * int(budget) / context:.1f}" if int(budget) / context < 0.03 else f"{100 * int(budget) / context:.0f}"
    )


def _table(record: Record, methods: tuple[str, ...], corner: str) -> str:
    asked = Asked(record)
    first, *rest = asked.budgets
    head = [corner, f"{int(first):,} rows ({_share(first, asked.context)} %)"]
    head += [f"{int(one):,} ({_share(one, asked.context)} %)" for one in rest]
    lines = []
    for method in methods:
        if any(one["method"] == method and one["budget"] is None for one in asked.rows):
            cells = [asked.pair(method, None), *[""] * len(rest)]
        else:
            cells = [asked.pair(method, budget) for budget in asked.budgets]
        lines.append([ticked(NAMES.get(method, method.lower())), *cells])
    return table(head, lines)


def short(record: Record) -> str:
    """README's table, and above it what limits a budget."""
    asked = Asked(record)
    words = text(
        f"Full attention answers {asked.pair(FULL, None)}. {_stopping(asked)} ([more tables](docs/results/eval.md); "
        "[error and recovered attention on traces](docs/results/traces.md))."
    )
    return parts(words, _table(record, SHORT, ""))


def _stopping(asked: Asked) -> str:
    """What methods of buckets read of the largest budget."""
    largest = asked.budgets[-1]
    saap, moments = (
        " and ".join(f"{round(asked.read(task, method, largest), -1):.0f}" for task in asked.tasks)
        for method in ("SAAP", "Moments")
    )
    return (
        f"Of {int(largest):,} `saap` reads {saap} rows in the mean and `moments` {moments}, as they stop at 32 buckets"
    )


def long(record: Record) -> str:
    """Every method."""
    asked = Asked(record)
    words = text(f"Full attention answers {asked.pair(FULL, None)} and reads {asked.context:,.0f} rows:")
    return parts(words, _table(record, LONG, "budget"))


def stops(record: Record) -> str:
    """What limits budgets and what few prompts say."""
    asked = Asked(record)
    count = asked.prompts()
    low, high = wilson([1.0] * (count - 1) + [0.0])
    return text(
        f"Budgets are upper limits: {_stopping(asked)[0].lower()}{_stopping(asked)[1:]}. {count} prompts are few: "
        f"{count - 1} of {count} is compatible with any true share from {100 * low:.0f} to {100 * high:.0f} % "
        "(Wilson's 95 % interval)."
    )


def findings(record: Record) -> str:
    """What the table says."""
    asked = Asked(record)
    near = [
        f"`{method.lower()}` {asked.share('passkey', method, '16'):.0%}".replace("%", " %")
        for method in ("Exact", "Moments", "SAAP")
    ]
    quest = {task: 100 * asked.share(task, "Quest", budget) for task, budget in (("passkey", "256"), ("kv", "1024"))}
    return bullets(
        f"**On passkeys {near[0]}, {near[1]} and {near[2]} answer at {_share('16', asked.context)} % of the rows, "
        f"`quest` {quest['passkey']:.0f} % at {_share('256', asked.context)} %, and a window answers nothing but what "
        "lies in it**. On this model of bytes a page holds two or three words.",
        "**Key-value retrieval is where pages fail** (RetrievalAttention's Table 2). Every page holds a record like "
        f"the one asked for, and its bounds fit them all. Quest needs a quarter of the context for {quest['kv']:.0f} "
        "%. Rows chosen one by one hold at 16 rows. Buckets need 256, as those that hold the right key hold others "
        "like it. SAAP's classifier saw no such prompts in training; `moments`, which knows this prompt's keys, "
        "passes it.",
    )


def facts(record: Record) -> str:
    """What a budget buys, for the page on choosing."""
    asked = Asked(record)

    def answered(task: str, method: str, budget: str) -> str:
        return f"{100 * asked.share(task, method, budget):.0f} %"

    count = asked.prompts()
    return bullets(
        f"**Single facts**: Quest answers {answered('passkey', 'Quest', '256')} of {count} passkeys at 256 rows of "
        f"4,096, and {answered('passkey', 'Quest', '64')} at 64. `exact` answers {answered('passkey', 'Exact', '16')} "
        f"at 16 rows, `moments` {answered('passkey', 'Moments', '16')}.",
        f"**Facts among look-alikes**: Quest answers {answered('kv', 'Quest', '1024')} of {count} key-value questions "
        f"at 1,024 rows, a quarter of the context. `moments` answers {answered('kv', 'Moments', '256')} at 256, "
        f"`exact` {answered('kv', 'Exact', '16')} at 16.",
    )


def grid(*records: Record) -> str:
    """A record of any model: a row a method and budget, a column a task and length; full attention first."""
    return parts(*(part for record in records for part in _grid(record)))


def _grid(record: Record) -> list[str]:
    found = rows(record)
    one = found[0]
    tasks = list(dict.fromkeys(each["task"] for each in found))
    columns = sorted({(each["task"], each["length"]) for each in found}, key=lambda one: (tasks.index(one[0]), one[1]))
    asked = list(dict.fromkeys((each["method"], each["budget"]) for each in found))
    mine = {row: [each for each in found if (each["method"], each["budget"]) == row] for row in asked}
    fewest = min(sum((each["task"], each["length"]) == column for each in mine[FULL, None]) for column in columns)
    words = text(
        f"`{one['model']}`, {fewest} {'prompt' if fewest == 1 else 'prompts'} of each, protocol {one['protocol']}, "
        f"sink {one['sink']}, window {one['window']}, {one['dense_layers']} dense layers; share answered:"
    )

    def answered(row: tuple[str, str | None], column: tuple[str, int]) -> float | None:
        held = [each["score"] for each in mine[row] if (each["task"], each["length"]) == column]
        return sum(held) / len(held) if held else None

    full = {column: answered((FULL, None), column) or 0.0 for column in columns}
    void = [f"{column[0]} at {column[1]:,} ({percent(full[column])})" for column in columns if full[column] < ANSWERED]
    columns = [column for column in columns if full[column] >= ANSWERED]
    said = [words] if columns else []
    if void:
        few = f"`{one['model']}` with full attention answers too few of {', '.join(void)}: nothing is learned there."
        said.append(text(few))
    if not columns:
        return said
    lines = []
    for method, budget in asked:
        scores = [answered((method, budget), column) for column in columns]
        label = "full attention" if method == FULL else ticked(spec(method))
        cells = ["" if score is None else percent(score) for score in scores]
        lines.append([label + (f", {int(budget):,}" if budget else ""), *cells])
    said.append(table(["method, budget", *(f"{task}, {length:,}" for task, length in columns)], lines))
    return said
