"""Methods that drop rows for good: each row has a worth, and a step keeps the best that its budget allows.

H2O (https://arxiv.org/abs/2306.14048) is the first of them. What rows are worth is all that such a method says.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best
from sparseattn.selectors.abilities import Evicts, FollowsMoves, LearnsFromQueries, Observes
from sparseattn.selectors.base import Rows, Selector, StepContext, best

ROUNDING = 1e-5  # of a sum of float32 weights that is 1: with logits of 35, 5e-6 were seen


class Evicting(Evicts, FollowsMoves, LearnsFromQueries, Selector):
    """Reads every row that it holds, and holds no more than the budget: `select` drops the rows of the least worth.

    What is dropped is never named again, though a later budget be larger. A subclass says what newly sealed rows are
    worth (`first`) and may rank rows by more than that (`preferred`).

    `scanned` are the rows held before the choice; `scan_bytes`, their worth of 4 bytes each.

    Attributes:
        worth: `[B,H,N]` float32 of every sealed row, or `[B,1,N]` where all KV heads hold the same rows; -inf for a row
            dropped and for padding.
    """

    operators = 24

    def __init__(self) -> None:
        self.worth = RowBuffer(2, spare=-torch.inf)
        self.kv = 0  # H

    @abstractmethod
    def first(self, rows: Rows) -> Tensor:
        """Return what newly sealed rows are worth, `[B,H,n]` or `[B,1,n]`; anything for padding."""

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        """Return by what rows are kept at this step, as `worth`, -inf where that is; and bytes read of each key."""
        return worth, 0

    def fix(self, rows: int, seal: int) -> None:
        self.worth.fix(rows)

    def append(self, rows: Rows) -> None:
        self.kv = rows.keys.shape[1]
        self.worth.append(self.first(rows).masked_fill((rows.positions < 0)[:, None], -torch.inf))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        heads, worth = query.shape[1], self.worth.visible
        rank, key_bytes = self.preferred(worth, query, budget)
        scanned = read = None
        if step.counted:
            scanned = (worth > -torch.inf).sum(-1).expand(-1, heads)  # [B,H]
            read = scanned * (worth.element_size() + key_bytes)
        kept = Selection.tokens(best(rank, budget))
        worth.masked_fill_(~kept.mask(worth.shape[2]), -torch.inf)
        start, length = (x.expand(-1, heads, -1).contiguous() for x in (kept.start, kept.length))
        return Selection(start, length, 1, scanned, read, whole=True)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Count the scan of a step behind the first, which finds what that one left."""
        rows, heads = min(budget, sealed), query.shape[:2].numel()
        ranking = Launch("sort", 4.0 * heads * sealed, entries=sorted_best(heads, sealed, rows))
        launches = (ranking, Launch("operator", count=self.operators))
        expected = "the first step has already dropped everything beyond the budget"
        return Scan(rows, 4 * rows, launches, query.shape[1], rows, rows, expected=expected)

    def held(self) -> Tensor:
        return (self.worth.data > -torch.inf).expand(-1, self.kv, -1)

    def keep(self, ids: Tensor) -> None:
        self.worth.keep(ids[:, : self.worth.full.shape[1]])


class Observing(Observes, Evicting):
    """An evicting method whose rows are worth what attention gives them.

    What a row gets before it is sealed is noted where it is known (`waiting`): from the prompt's queries, and from its
    own query where the token of the step is the only row that is not sealed, as in the papers' settings (sink 0,
    window 1, seal 1). Its weight is then what the rows read have left.

    Attributes:
        waiting: `[B,H,W]` or `[B,1,W]` float32, what rows not yet sealed have got; the last place is the step's own.
        waiting_at: `[B,W]` int64, their positions; -1: none.
        shown: `[B,1]` int64, real rows sealed so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.waiting_at, self.shown = RowBuffer(2), RowBuffer(1), RowBuffer(1)

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        for buffer in (self.waiting, self.waiting_at, self.shown):
            buffer.fix()

    @abstractmethod
    def of_prompt(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what the prompt's queries gave, at the first seal: worth of the rows sealed `[B,H,n]` and of those not
        sealed `[B,H,u]` (or of one head), and the positions `[B,u]` of these. None: such a method does not ask."""

    @abstractmethod
    def unknown(self, positions: Tensor) -> Tensor:
        """Return what rows at these positions are worth while nothing is known of them: float32, the newer the more, so
        that what is dropped of several does not depend on where they lie."""

    def first(self, rows: Rows) -> Tensor:
        at, real = rows.positions, rows.positions >= 0
        if self.shown.rows:
            same = (at[:, :, None] == self.waiting_at.data[:, None]) & real[..., None]  # [B,n,W]
            noted = torch.where(same[:, None], self.waiting.data[:, :, None], -torch.inf).amax(-1)  # [B,H,n]
            self.shown.data.add_(real.sum(-1, keepdim=True))
            return torch.where(noted.isneginf(), self.unknown(at)[:, None], noted)
        chosen = self.of_prompt(rows)
        if chosen is None:
            worth = self.unknown(at)[:, None].expand(-1, self.kv, -1)
            chosen = worth, worth[:, :, :0], at[:, :0]
        worth, rest, rest_at = chosen
        self.waiting.append(torch.nn.functional.pad(rest, (0, 1)))
        self.waiting_at.append(torch.nn.functional.pad(rest_at, (0, 1), value=-1))
        self.shown.append(real.sum(-1, keepdim=True))
        return worth

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if self.shown.rows:
            positions = step.positions
            alone = self.shown.data[:, 0] == positions  # every row before the token's is sealed
            self.waiting_at.data[:, -1] = torch.where(alone, positions, -1)
            self.waiting.data[:, :, -1] = self.unknown(positions)[:, None]  # until `observe` says it
        return super().select(query, step, budget)


def left(got: Tensor) -> Tensor:
    """`[..]`: what rows of weights `[..,S]` leave of a query head's; 0 where that is within rounding."""
    return torch.nn.functional.threshold(1 - got.sum(-1), ROUNDING, 0.0)


def last_of(rows: Rows, count: int) -> tuple[Tensor, Tensor]:
    """Return the prompt's last `count` queries `[B,H,G,count,D]` and their positions `[B,count]`, at the first seal."""
    assert rows.last_queries is not None
    assert rows.last_positions is not None
    return rows.last_queries[:, :, :, -count:], rows.last_positions[:, -count:]


def every_row(rows: Rows) -> list[tuple[Tensor, Tensor]]:
    """Keys and positions of the rows sealed and of those not sealed, at the first seal."""
    assert rows.unsealed is not None
    assert rows.unsealed_positions is not None
    return [(rows.keys, rows.positions), (rows.unsealed, rows.unsealed_positions)]
