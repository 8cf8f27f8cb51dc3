"""Views of agreement: how far a method's predictions are from full attention's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import parts, percent, table, text, ticked
from scripts.evidence.views_traces import spec
from sparseattn.cli.intervals import student

Record: TypeAlias = "Mapping[str, Any]"

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
        self.methods = list(dict.fromkeys((one["method"], one["budget"]) for one in self.rows if one["method"] != FULL))

    def of(self, method: str, budget: str | None, name: str | None = None) -> list[dict[str, Any]]:
        """Its windows, of one text or of all."""
        asked = (method, budget)
        return [one for one in self.rows if (one["method"], one["budget"]) == asked and name in (None, one["text"])]

    def windows(self) -> int:
        """Of each text, the fewest."""
        return min(len(self.of(FULL, None, name)) for name in self.texts)


def _mean(windows: Sequence[Mapping[str, Any]], name: str) -> float:
    if not windows:
        raise LookupError("the record has no such window")
    return float(sum(one[name] for one in windows) / len(windows))


def _kl(windows: Sequence[Mapping[str, Any]]) -> str:
    """Nats a token, and its interval over windows."""
    values = [one["kl"] for one in windows]
    around = student(values)
    level = f"{_mean(windows, 'kl'):.3f}"
    return level if around is None else f"{level} ({max(around[0], 0.0):.3f}-{around[1]:.3f})"


def full(record: Record) -> str:
    """Every length: divergence with its interval, and the share of equal likeliest tokens, by text."""
    return parts(*(part for length in Agreed(record).lengths for part in _length(Agreed(record, length))))


def _length(found: Agreed) -> list[str]:
    one = found.rows[0]
    words = text(
        f"`{one['model']}`, {found.length:,} tokens, {found.windows()} windows of each text, the last "
        f"{one['scored_tokens']} tokens of each, sink {one['sink']}, window {one['window']}, every layer that attends "
        "to the whole context sparse. KL divergence in nats a token (in brackets the 95 % interval over windows), and "
        "the share of equal likeliest tokens:"
    )
    head = ["method, budget", "rows", "bytes"]
    for name in found.texts:
        head += [f"{name} ({found.kinds[name]}): KL", "same"]
    lines = []
    for method, budget in found.methods:
        mine = found.of(method, budget)
        label = ticked(spec(method)) + (f", {int(budget):,}" if budget else "")
        cells = [f"{_mean(mine, 'rows'):,.0f}", percent(_mean(mine, "bytes_share"))]
        for name in found.texts:
            windows = found.of(method, budget, name)
            cells += [_kl(windows), percent(_mean(windows, "same_top"))]
        lines.append([label, *cells])
    return [words, table(head, lines)]


def short(record: Record) -> str:
    """Divergence over all texts, a row a method and a column a budget."""
    found = Agreed(record, Agreed(record).lengths[-1])
    budgets = list(dict.fromkeys(budget for _, budget in found.methods if budget is not None))
    one = found.rows[0]
    words = text(
        "The table gives the KL divergence in nats a token from full attention's predictions, and the share of equal "
        f"likeliest tokens: `{one['model']}`, {found.length:,} tokens, the last {one['scored_tokens']} of "
        f"{found.windows()} windows each of {len(found.texts)} texts ({', '.join(found.kinds.values())}), every layer "
        f"sparse, sink {one['sink']}, window {one['window']}."
    )
    lines = []
    for method in dict.fromkeys(method for method, _ in found.methods):
        free = [budget for name, budget in found.methods if name == method] == [None]
        mine = [found.of(method, None)] if free else [found.of(method, budget) for budget in budgets]
        cells = [
            f"{_mean(windows, 'kl'):.3f}, {percent(_mean(windows, 'same_top'))}" if windows else "" for windows in mine
        ]
        lines.append([ticked(spec(method)), *cells, *[""] * (len(budgets) - len(cells))])
    return parts(words, table(["", *(f"{int(budget):,} rows" for budget in budgets)], lines))


def perplexity(record: Record) -> str:
    """What the divergence costs in prediction: difference of the negative log-likelihood, by text."""
    found = Agreed(record, Agreed(record).lengths[-1])
    lines = []
    for method, budget in found.methods:
        label = ticked(spec(method)) + (f", {int(budget):,}" if budget else "")
        cells = [f"{_mean(found.of(method, budget, name), 'nll_difference'):+.3f}" for name in found.texts]
        lines.append([label, *cells])
    levels = ", ".join(f"{name} {_mean(found.of(FULL, None, name), 'nll'):.3f}" for name in found.texts)
    words = text(
        f"Nats a token lost against full attention at {found.length:,} tokens (which has {levels}; perplexity is their "
        "exponential):"
    )
    return parts(words, table(["method, budget", *found.texts], lines))
