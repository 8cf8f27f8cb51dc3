"""InfLLM: a block is known by the keys that the queries behind them looked at most. https://arxiv.org/abs/2402.04617"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan, products
from sparseattn.kernels.group_vote.dispatch import GROUPS, vote
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.abilities import ComparesHeads, LearnsFromQueries
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_least, check_query_heads, known_rope


class InfLLM(ComparesHeads, LearnsFromQueries, Selector):
    """Reads the blocks whose representative keys have the largest products with the query.

    A row's score is the mean product of its key with the queries of its own token and those that follow it. Of each
    block the rows with the highest scores represent it, chosen for each query head. A block's score is the sum of the
    query's products with them, so the mean of their keys is all that is kept.

    Args:
        page: rows of a block, a power of two; 128 as in the paper.
        representatives: keys that stand for a block, 4 in the paper.
        local: queries that score a row, its own among them, 4,096 in the paper.
        group: "layer" (default): all heads of a layer, or those of its role, read the same blocks, by the sum of
            their scores, as in the released code; else how a query group votes, see `vote`: "sum", "softmax", "max",
            "each".
        distance: rows that every block lies behind the query where it is scored, 4,096 in the paper; it needs the
            layer's RoPE. None (default): blocks are scored where they lie.

    Facts are from the paper's code, https://github.com/thunlp/InfLLM. Departures from the paper: attention goes over
    keys at their own positions and not all at one distance, as the cache's rows are read as they are; hence `distance`
    is not the default. A row is scored by the queries that are known when it is sealed: near the window fewer than
    `local`, and those of rows in the window are not asked for. Its own query is among them; the paper's begin with the
    next. The paper's formula for a row's score, a mean of products, is used;
    its code sums attention weights over the local window instead. Rows that wait for a full block are read densely,
    and no block is kept on the host for later: which rows lie where is the cache's matter.

    `scan_bytes`: the mean representative key of every block and query head.
    """

    queries_share = 1.0

    def __init__(
        self,
        page: int = 128,
        representatives: int = 4,
        local: int = 4096,
        group: str = "layer",
        distance: int | None = None,
    ) -> None:
        if page < 1 or page & (page - 1):
            raise ValueError(f"a page is a power of two rows, got {page}")
        check_least(representatives=(representatives, 1), local=(local, 1), distance=(distance or 0, 0))
        if representatives > page:
            raise ValueError(f"a block of {page} rows has at most that many representatives, got {representatives}")
        if group not in ("layer", *GROUPS):
            raise ValueError(f"group is one of layer, {', '.join(GROUPS)}, got {group!r}")
        self.page, self.representatives, self.local = page, representatives, local
        self.group, self.distance = group, distance
        self.span = page
        self.means = RowBuffer(3)  # [B,H,G,P,D], of the keys' dtype

    def has(self, ability: type) -> bool:
        return self.group == "layer" if ability is ComparesHeads else super().has(ability)

    def fix(self, rows: int, seal: int) -> None:
        self.means.fix(rows // self.page)

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        if self.distance is not None:
            self._rope().check_size(size)

    def append(self, rows: Rows) -> None:
        assert rows.queries is not None  # a share of 1: those of every row
        keys, queries = rows.keys, rows.queries
        batch, heads, group, _, size = queries.shape
        count = (rows.positions >= 0).sum(1)  # padding is behind
        at = torch.arange(keys.shape[2], device=keys.device)
        placed = self._unturned(keys, rows.positions)
        means = keys.new_zeros(batch, heads, group, keys.shape[2] // self.page, size)
        for b in range(batch):
            last = (at + self.local).clamp(max=int(count[b]))
            for h in range(heads):
                for g in range(group):
                    # In float64: a sum over a prompt, less what comes before a row.
                    sums = torch.nn.functional.pad(queries[b, h, g].double().cumsum(0), (0, 0, 1, 0))
                    followed = sums[last.clamp(max=len(sums) - 1)] - sums[at.clamp(max=len(sums) - 1)]
                    scores = (keys[b, h] * followed).sum(-1) / (last - at).clamp(min=1)
                    best = scores.unflatten(0, (-1, self.page)).topk(self.representatives, -1).indices  # [P,r]
                    chosen = placed[b, h].unflatten(0, (-1, self.page)).take_along_dim(best[..., None], 1)
                    means[b, h, g] = chosen.float().mean(1).to(keys.dtype)
        self.means.append(means)

    def _unturned(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys `[B,H,n,D]` as blocks keep them: with a `distance` before RoPE."""
        if self.distance is None:
            return keys
        return self._rope().unrotate(keys, positions.to(keys.device)[:, None])

    def _rope(self) -> Rope:
        instead = "score keys as they are, distance=None"
        return known_rope(self, self.layer_context, "puts blocks at one distance", instead)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        check_query_heads(query, self.means.visible.shape[2])
        if self.distance is not None:
            at = step.positions.to(query.device)[:, None, None]
            query = self._rope().rotate(self._rope().unrotate(query, at), torch.full_like(at, self.distance))
        scores = (self.means.visible.float() @ query.float()[..., None])[..., 0]  # [B,H,G,P]; 16 bits would make ties
        scores = scores.masked_fill(~step.valid[:, None, None, :: self.page], -torch.inf)
        if self.group == "layer":
            voted = scores.sum((1, 2))[:, None].expand(-1, query.shape[1], -1)
        else:
            voted = vote(scores, self.group)
        start, length = best_pages(voted, budget // self.page, self.page)
        return Selection(start, length, self.page, whole=True)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        blocks, group = sealed // self.page, query.shape[2]
        scan = Scan(blocks if self.group == "each" else blocks * group, blocks * self._block_bytes(query))
        launch = products(query, blocks, query.shape[3], scan.read)
        pages, vote = (blocks, min(budget, sealed) // self.page), "sum" if self.group == "layer" else self.group
        return self.ranked(query, scan, [launch], pages, group=vote, page=self.page)

    def _block_bytes(self, query: Tensor) -> int:
        """Of the representative keys of a block that a KV head reads for a query `[B,H,G,D]`."""
        return query.shape[2] * query.shape[3] * self.bytes_of(query)
