"""FastGen: each KV head holds what the cheapest of four policies says that recovers enough of the prompt's attention.

https://arxiv.org/abs/2310.01801
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.attention_received import QueryBlock, received, weights
from sparseattn.selectors.eviction.base import every_row
from sparseattn.selectors.eviction.summed_base import Summed, prompt_queries
from sparseattn.selectors.newest import newest

FIRST, FREQUENT, LOCAL, FULL = range(4)  # the policies, each of which holds what the one before it does, and more
ALWAYS = 1e30  # worth of rows that are held in any case, or up to twice that
LEAST = 32  # rows of a prompt that is profiled


class FastGen(Summed):
    """Holds, for each KV head, the rows of the first policy that recovers enough of the prompt's attention.

    The policies, in their order: the first tokens; these and the rows with the largest sums of attention weights; these
    and the newest rows; all rows. What one recovers is the share of a query's weights that lies on the rows it holds,
    in the mean over the prompt's queries and the query group. From then on a head holds as many rows as its policy had
    at the prompt's end: a new row takes the place of that with the least sum.

    Args:
        recovery: share of the attention to recover, 0 to 1; 0.9 is the default of the code that this was compared with.
        special: first tokens that every policy holds; 4 in that code.
        frequent: share of the prompt for the rows with the largest sums; 0.3 in the paper.
        local: share of the prompt for the newest rows; 0.3 in the paper.

    A budget is a limit: a head whose policy holds more keeps the best of it. Its newest rows come first, then the first
    tokens, the earliest before the others, then the largest sums. With none, memory follows the heads, as in
    the paper.

    Departures. The paper's policies also hold special tokens and punctuation wherever they stand; a selector knows no
    kinds of tokens, and special ones are most often the first. Its own code is not public. The profile is that of
    cold-compress (AnswerDotAI, `KVCacheHybrid`), but for rows' sums, which that code divides by how many queries see a
    row; the paper has sums. The step's own token comes on top of what a head holds. With a sink, its rows are profiled
    and count too, and come on top of what is held: compare with `FastGen.paper()`. A prompt of fewer than 32 tokens is
    not profiled, and all rows are held.

    Raises:
        ValueError: a share outside 0 to 1, or a number of tokens below 0.
    """

    operators = 60

    def __init__(self, recovery: float = 0.9, special: int = 4, frequent: float = 0.3, local: float = 0.3) -> None:
        super().__init__(0.0)
        for name, share in (("recovery", recovery), ("frequent", frequent), ("local", local)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is a share, 0 to 1, got {share}")
        check_least(special=(special, 0))
        self.recovery, self.special, self.frequent, self.local = recovery, special, frequent, local
        self.most = RowBuffer(1)  # [B,1,H] int64, rows that a head holds
        self.last = RowBuffer(1)  # [B,1,H] int64, of which the newest

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink; the token of the step is the window's one
        row."""
        return {"selector": cls(), "sink": 0, "window": 1, "seal": 1}

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        for buffer in (self.most, self.last):
            buffer.fix()

    def of_prompt(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor] | None:
        sealed, rest, rest_at = super().of_prompt(rows) or (None, None, None)
        assert sealed is not None
        assert rest is not None
        assert rest_at is not None
        at = torch.cat([rows.positions, rest_at], 1)
        sums = torch.cat([sealed, rest], 2)
        kept_rows, most, last = (torch.stack(part) for part in zip(*self._profiles(rows, at, sums), strict=True))
        self.most.append(most[:, None])
        self.last.append(last[:, None])
        after = at - self._begin(at)[:, None]  # [B,n] rows behind the first
        early = ALWAYS * (2 - (after + 1) / max(self.special, 1))  # of special rows: below ALWAYS * 2, the first most
        worth = torch.where((after < self.special)[:, None], early[:, None], sums).masked_fill(~kept_rows, -torch.inf)
        return worth[:, :, : sealed.shape[2]], rest, rest_at

    def _begin(self, at: Tensor) -> Tensor:
        """`[B]` int64: the first position of rows `at` `[B,n]`."""
        return at.masked_fill(at < 0, torch.iinfo(at.dtype).max).amin(1)

    def _profiles(self, rows: Rows, at: Tensor, sums: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each sequence, which rows its heads hold `[H,n]`, how many, and how many of the newest, `[H]`."""
        return [self._profile(rows, b, at[b], sums[b]) for b in range(len(at))]

    def _profile(self, rows: Rows, b: int, at: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, query_places = (part[b : b + 1] for part in prompt_queries(rows))
        stored = [(keys[b : b + 1], places[b : b + 1]) for keys, places in every_row(rows)]
        real, group = at >= 0, queries.shape[2]
        count, asks = int(real.sum()), max(int((query_places >= 0).sum()), 1) * group
        window = max(1, int(self.local * count))
        first = real & (at < int(self._begin(at[None])) + self.special)  # [n]
        recent = real & (at > int(at.max()) - window)
        frequent = _largest(sums, real & ~first, math.ceil(self.frequent * count)) | first  # [H,n]
        beyond = _largest(sums, real & ~first & ~recent, math.ceil(self.frequent * count)) | first
        shares = [sums.masked_fill(~which, 0.0).sum(1) / asks for which in (first.expand_as(frequent), frequent)]
        shares.append(self._with_local(queries, query_places, stored, at, beyond, window) / asks)
        enough = torch.stack([*shares, torch.ones_like(shares[0])]) >= self.recovery  # [4,H]
        policy = enough.int().argmax(0) if count >= LEAST else torch.full_like(shares[0], FULL, dtype=torch.int64)
        local = recent | beyond
        every = torch.stack([first.expand_as(local), frequent, local, real.expand_as(local)])
        chosen = every.gather(0, policy[None, :, None].expand(1, *local.shape))[0]
        most = torch.where(policy == FULL, torch.iinfo(torch.int64).max, chosen.sum(1))
        return chosen, most, torch.where(policy == LOCAL, window, 0)

    def _with_local(
        self,
        queries: Tensor,
        query_places: Tensor,
        stored: list[tuple[Tensor, Tensor]],
        at: Tensor,
        chosen: Tensor,
        window: int,
    ) -> Tensor:
        """`[H]`: the weights on rows `chosen` `[H,n]` and on each query's newest `window`, summed over queries."""
        order = at.argsort()
        order = order[at[order] >= 0]

        def on_held(logits: Tensor, block: QueryBlock) -> Tensor:
            local = block.place > block.asked[:, None] - window  # [m,n]
            mine = chosen[block.head, order[: len(block.place)]]
            return weights(logits, block).masked_fill(~(local | mine), 0.0)

        return torch.cat(received(queries, query_places, stored, self.layer_context.scale, on_held), 2).sum((0, 2))

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        most, last = self.most.data[:, 0, :, None], self.last.data[:, 0, :, None]  # [B,H,1]
        rank = worth.masked_fill(newest(worth > -torch.inf, last.clamp(max=budget)), ALWAYS * 2)
        place = rank.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return rank.masked_fill(place >= most, -torch.inf), 0


def _largest(sums: Tensor, among: Tensor, count: int) -> Tensor:
    """`[H,n]` bool: the `count` rows of the largest `sums` `[H,n]` of those `among` `[n]`, or all of these."""
    count = min(count, int(among.sum()))
    best = sums.masked_fill(~among, -torch.inf).topk(count, 1).indices
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
