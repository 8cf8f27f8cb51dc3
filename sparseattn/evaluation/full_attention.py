"""What full attention gives at the steps of a replay: computed once for all methods and budgets compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from sparseattn.evaluation.measure_table import LOOKUP
from sparseattn.traces.trace import Trace

RECALLS = (1, 10, 100)
LIMIT = 1 << 29  # bytes kept of one trace


@dataclass(frozen=True, eq=False)
class Indexed:
    """What full attention gives to the rows that a method chooses from.

    Args:
        mass: `[1,H,G]`, the sum of their weights.
        sought: `[1,H,G,n]` bool, the lookups among them.
        lookups: `[1,H,G]`, how many.
        best: `[1,H,G,k]`, their best rows of `RECALLS`, best first.
    """

    mass: Tensor
    sought: Tensor
    lookups: Tensor
    best: Tensor


@dataclass(frozen=True, eq=False)
class FullAttention:
    """Full attention of one decode step of one sequence, over all rows in stored order.

    Args:
        logits, weights: `[1,H,G,N]`.
        total: `[1,H,G]`, log-sum-exp of the logits.
        output: `[1,H,G,D]`.
    """

    logits: Tensor
    weights: Tensor
    total: Tensor
    output: Tensor
    _indexed: dict[tuple[int, int], Indexed] = field(default_factory=dict)

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> FullAttention:
        """query: `[1,H,G,D]`; keys, values: `[1,H,N,D]`; scale: factor of the logits."""
        logits = query @ keys.mT * scale
        weights = logits.softmax(-1)
        return cls(logits, weights, logits.logsumexp(-1), weights @ values)

    def indexed(self, rows: slice) -> Indexed:
        """Return what it gives to rows `start` to `stop`; the last such is kept."""
        key = rows.start, rows.stop
        if key not in self._indexed:
            self._indexed.clear()
            weights = self.weights[..., rows]
            sought = weights >= LOOKUP
            best = self.logits[..., rows].topk(min(max(RECALLS), weights.shape[-1]), dim=-1).indices
            self._indexed[key] = Indexed(weights.sum(-1), sought, sought.sum(-1), best)
        return self._indexed[key]

    @property
    def nbytes(self) -> int:
        """Bytes held, with those of one `indexed`."""
        indexed = self.logits.numel() + self.total.numel() * (16 + 8 * max(RECALLS))
        return 2 * self.logits.nbytes + self.total.nbytes + self.output.nbytes + indexed


class FullAttentions:
    """The steps of one trace at a time, found by whoever replays it next: `LIMIT` bytes of them, the first to come.

    Give it what `FullAttention.of` says of rows in the order in which they came: these are the same for every method.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.held = limit, 0
        self._trace: Trace | None = None
        self._kept: dict[object, FullAttention] = {}

    def at(self, trace: Trace, step: object, compute: Callable[[], FullAttention]) -> FullAttention:
        """Return full attention at a step of a trace; `step` names layer, KV heads, token and device."""
        if trace is not self._trace:
            self.clear()
            self._trace = trace
        if (found := self._kept.get(step)) is None:
            found = compute()
            if self.held + found.nbytes <= self.limit:
                self.held += found.nbytes
                self._kept[step] = found
        return found

    def clear(self) -> None:
        """Let go of all that is kept."""
        self._trace, self.held, self._kept = None, 0, {}
