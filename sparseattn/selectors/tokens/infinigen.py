"""InfiniGen: important keys told a layer ahead, by a few skewed channels. https://arxiv.org/abs/2406.19707"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan, products
from sparseattn.kernels.group_vote.dispatch import vote
from sparseattn.kernels.topk.dispatch import best
from sparseattn.selectors.abilities import ComparesHeads, LearnsFromQueries, LooksAhead
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_group, check_share, warn_of_keys_as_queries
from sparseattn.selectors.parameters.channel_calibration import CHUNK, outer


class InfiniGen(ComparesHeads, LooksAhead, LearnsFromQueries, Selector):
    """Reads the rows whose keys promise the largest logits to a query that is foreseen, by part of its channels.

    The query is what this layer's projection makes of the input of the attention layer before
    (`StepContext.lookahead`), so that rows can be fetched while that layer computes. Queries and keys are turned by an
    orthogonal matrix under which few channels hold most of their products: the right singular vectors of the prompt's
    queries. The channels with the largest magnitudes of queries and keys are kept. Of each query head the rows are
    counted whose speculated logits are less than `alpha` below the largest; the mean of these counts over the heads, at
    most the budget, is how many rows every head reads.

    Args:
        ratio: share of the channels that are kept, above 0 to 1, rounded down to whole channels, 1 or more; 0.2 in the
            released code's runs.
        alpha: how far below the largest a logit may be, in natural logarithms; 4 for OPT in the released code, 5 for
            Llama-2. `math.inf`: the budget alone decides.
        group: how a query group votes, see `vote`: "each" (default), every query head takes its own rows, "softmax",
            "sum" and "max".
        share: share of the prompt's queries that the turn is learned from, evenly spaced; without any the keys serve,
            and a warning says so.

    Facts are from the paper's code, https://github.com/snu-comparch/InfiniGen. Departures: the turn is learned from
    each prompt's own queries, by KV head, where the paper's models have one query head for each and the code learns
    from one text beforehand; channels are ranked by the sum of both magnitudes, of which the code has two other
    versions, queries alone and the union of both; the largest logit is that of the rows that can be chosen, without
    sink and window; the budget stands for the cap of 20 % of the context; the pool of limited size on the host, with
    its eviction, is left out. Layers 0 and 1 read everything in the code, and layer 0 has no layer before: keep them
    dense.

    `scan_bytes`: the kept channels of every row, and the turn to them. The projection of the query is not counted.

    Raises:
        ValueError: an argument out of its range; in `select`, nobody has foreseen the query.
    """

    learns_once = True
    operators = 20

    def __init__(self, ratio: float = 0.2, alpha: float = 4.0, group: str = "each", share: float = 0.25) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio is a share of the channels, above 0 to 1, got {ratio}")
        if not alpha >= 0:
            raise ValueError(f"alpha is 0 or more, got {alpha}")
        check_share(share)
        self.ratio, self.alpha, self.group, self.share = ratio, alpha, check_group(group), share
        self.queries_share = share
        self.part = RowBuffer(2)  # [B,H,N,r] keys in the kept channels, of the keys' dtype
        self.turn = RowBuffer(2)  # [B,H,D,r] float32, to the kept channels
        self.known = RowBuffer(1)  # [B,1] bool, a sequence has a turn

    def append(self, rows: Rows) -> None:
        batch, heads, _, size = rows.keys.shape
        real = rows.positions >= 0
        if not self.known.rows:
            self.known.append(torch.zeros_like(real[:, :1]))
            self.turn.append(rows.keys.new_zeros(batch, heads, size, self._kept(size), dtype=torch.float32))
        fresh = real.any(1) & ~self.known.data[:, 0]
        for b in fresh.nonzero()[:, 0].tolist():
            keys = rows.keys[b][:, real[b]]
            queries = keys[:, :0]
            if rows.queries is not None and rows.query_positions is not None:
                taken = (rows.query_positions[b] >= 0).to(keys.device)
                queries = rows.queries[b][:, :, taken].flatten(1, 2)  # [H,G*m,D]
            if not queries.shape[1]:
                warn_of_keys_as_queries(self, heads, heads)
                queries = keys
            self.turn.data[b] = _turn(queries, keys, self.turn.data.shape[3])
        self.known.data[:, 0] |= fresh
        self.part.append((rows.keys.float() @ self.turn.data).to(rows.keys.dtype))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if step.lookahead is None:
            raise ValueError(
                f"{self} goes by a query foreseen from the input of the layer before, and none was given for layer "
                f"{self.layer}: record it with `sparseattn capture --ahead` (the first attention layer has none: leave "
                f"it out, or dense), or tell it with cache.search.foresee before each step; a SparseCache cannot"
            )
        turned = step.lookahead.float() @ self.turn.data
        logits = turned @ self.part.data.float().mT / self.temperature(query.shape[3])  # [B,H,G,N]
        logits = logits.masked_fill(~step.valid[:, None, None], -torch.inf)
        promising = (logits > logits.amax(-1, keepdim=True) - self.alpha).sum(-1)  # [B,H,G]
        count = promising.double().mean((1, 2)).long().clamp(min=1)  # one number for all heads
        ids = best(vote(logits, self.group), budget)
        return Selection.tokens(
            ids.masked_fill(torch.arange(ids.shape[2], device=ids.device) >= count[:, None, None], -1)
        )

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        kept = self._kept(query.shape[3])
        scan = Scan(sealed, sealed * kept * self.bytes_of(query) + 4 * query.shape[3] * kept)
        launch = products(query, sealed, kept, scan.read)
        expected = "" if math.isinf(self.alpha) else "the whole budget is read"
        return self.ranked(query, scan, [launch], (sealed, min(budget, sealed)), group=self.group, expected=expected)

    def _kept(self, size: int) -> int:
        """r, of keys of `size` channels."""
        return max(int(self.ratio * size), 1)


def _turn(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """`[H,D,count]`: the right singular vectors of `queries` `[H,m,D]` along which these and `keys` `[H,n,D]` are
    largest in the sum of magnitudes, each mean taken by itself."""
    vectors = torch.linalg.eigh(outer(queries))[1].float()  # [H,D,D], what the SVD gives, without Q's left side
    size = _magnitude(queries, vectors) + _magnitude(keys, vectors)  # [H,D]
    best_channels = size.topk(count, -1).indices
    return vectors.gather(2, best_channels[:, None].expand(-1, vectors.shape[1], -1))


def _magnitude(rows: Tensor, vectors: Tensor) -> Tensor:
    """`[H,D]`: the mean of `|x @ vectors|` over `rows` `[H,n,D]`."""
    total = torch.stack([(part.float() @ vectors).abs().sum(1) for part in rows.split(CHUNK, 1)])
    return total.sum(0) / rows.shape[1]
