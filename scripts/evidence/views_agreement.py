"""Views of agreement: how far a method's predictions are from full attention's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import parts, percent, table, text, ticked
from scripts.evidence.views_traces import spec
from sparseattn.evaluation.intervals import student

Record: TypeAlias = "Mapping[str, Any]"

Asked: TypeAlias = "tuple[str, str | None, str | None]"  # method, budget and sparse layers

FULL = "full"


class Agreed:
    """The windows of a record at one length."""

    def __init__(self, record: Record, length: int | None = None) -> None:
        every = rows(record)
        self.lengths = sorted({one["length"] for one in every})
        self.length = length or self.lengths[0]
        self.rows = [one for one in every if one["length"] == self.length]
        self.texts = list(dict.fromkeys(one["text"] for one in self.rows))
        self.kinds = {one["text"]: one["kind"] for one in self.rows}
        self.asked = list(dict.fromkeys(_asked(one) for one in self.rows if one["method"] != FULL))

    def of(self, asked: Asked, name: str | None = None) -> list[dict[str, Any]]:
        """Windows of a method, of one text or of all."""
        return [one for one in self.rows if _asked(one) == asked and name in (None, one["text"])]

    def full(self, name: str) -> list[dict[str, Any]]:
        """Windows of full attention."""
        return [one for one in self.rows if one["method"] == FULL and one["text"] == name]

    def windows(self) -> int:
        """Of each text, the fewest."""
        return min(len(self.full(name)) for name in self.texts)


def _asked(one: Mapping[str, Any]) -> Asked:
    return one["method"], one["budget"], one.get("layers")


def _label(asked: Asked) -> str:
    """`quest`, 256, layers 2-29."""
    method, budget, layers = asked
    return ticked(spec(method)) + (f", {int(budget):,}" if budget else "") + (f", layers {layers}" if layers else "")


def mean(windows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of a measure over windows; LookupError without any."""
    if not windows:
        raise LookupError("the record has no such window")
    return float(sum(one[name] for one in windows) / len(windows))


def _kl(windows: Sequence[Mapping[str, Any]]) -> str:
    """Nats a token, and its interval over windows."""
    values = [one["kl"] for one in windows]
    around = student(values)
    level = f"{mean(windows, 'kl'):.3f}"
    return level if around is None else f"{level} ({max(around[0], 0.0):.3f}-{around[1]:.3f})"


def full(record: Record) -> str:
    """Every length: divergence with its interval, and the share of equal likeliest tokens, by text."""
    return parts(*(part for length in Agreed(record).lengths for part in _length(Agreed(record, length))))


def _length(found: Agreed) -> list[str]:
    one = found.rows[0]
    words = text(
        f"`{one['model']}`, {found.length:,} tokens, {found.windows()} windows of each text, the last "
        f"{one['scored_tokens']} tokens of each, sink {one['sink']}, window {one['window']}, every layer that attends "
        "to the whole context sparse where no layers are named. KL divergence in nats a token (in brackets the 95 % "
        "interval over windows), and the share of equal likeliest tokens:"
    )
    head = ["method, budget", "rows", "bytes of a sparse layer"]
    for name in found.texts:
        head += [f"{name} ({found.kinds[name]}): KL", "same"]
    lines = []
    for asked in found.asked:
        mine = found.of(asked)
        cells = [f"{mean(mine, 'rows'):,.0f}", percent(mean(mine, "bytes_share"))]
        for name in found.texts:
            windows = found.of(asked, name)
            cells += [_kl(windows), percent(mean(windows, "same_top"))]
        lines.append([_label(asked), *cells])
    return [words, table(head, lines)]


def short(record: Record) -> str:
    """Divergence over all texts, a row a method and a column a budget."""
    found = Agreed(record, Agreed(record).lengths[-1])
    budgets = list(dict.fromkeys(budget for _, budget, _ in found.asked if budget is not None))
    one = found.rows[0]
    words = text(
        "The table gives the KL divergence in nats a token from full attention's predictions, and the share of equal "
        f"likeliest tokens: `{one['model']}`, {found.length:,} tokens, the last {one['scored_tokens']} of "
        f"{found.windows()} windows each of {len(found.texts)} texts ({', '.join(found.kinds.values())}), every layer "
        f"sparse, sink {one['sink']}, window {one['window']}."
    )
    lines = []
    for method in dict.fromkeys(method for method, _, _ in found.asked):
        free = {budget for name, budget, _ in found.asked if name == method} == {None}
        mine = [found.of((method, budget, None)) for budget in ([None] if free else budgets)]
        cells = [
            f"{mean(windows, 'kl'):.3f}, {percent(mean(windows, 'same_top'))}" if windows else "" for windows in mine
        ]
        lines.append([ticked(spec(method)), *cells, *[""] * (len(budgets) - len(cells))])
    return parts(words, table(["", *(f"{int(budget):,} rows" for budget in budgets)], lines))


def perplexity(record: Record) -> str:
    """What the divergence costs in prediction: difference of the negative log-likelihood, by text."""
    found = Agreed(record, Agreed(record).lengths[-1])
    lines = []
    for asked in found.asked:
        cells = [f"{mean(found.of(asked, name), 'nll_difference'):+.3f}" for name in found.texts]
        lines.append([_label(asked), *cells])
    levels = ", ".join(f"{name} {mean(found.full(name), 'nll'):.3f}" for name in found.texts)
    words = text(
        f"Nats a token lost against full attention at {found.length:,} tokens (which has {levels}; perplexity is their "
        "exponential):"
    )
    return parts(words, table(["method, budget", *found.texts], lines))
