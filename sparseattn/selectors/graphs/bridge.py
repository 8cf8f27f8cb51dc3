"""QueryBridge: the keys that earlier queries like this one retrieved. https://arxiv.org/abs/2409.10516"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products, sorted_best
from sparseattn.kernels.listed_scores.dispatch import listed_scores
from sparseattn.kernels.nearest import evenly, load_faiss, nearest, root_of_moment
from sparseattn.selectors.abilities import LearnsFromQueries, ReadsKeys
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_least, check_most, check_share, warn_of_keys_as_queries
from sparseattn.selectors.graphs.search_cost import new_of
from sparseattn.selectors.saved_state import (
    Loaded,
    check_equal,
    check_finite,
    check_lists,
    check_no_order,
    check_scored,
    check_tensors,
)


class QueryBridge(LearnsFromQueries, ReadsKeys, Selector):
    """Finds the guides nearest to the query, unites their lists of keys, and reads the best of those by exact score.

    The first structure of RetrievalAttention, queries linked to their nearest keys, walked in one hop: static shapes,
    no host synchronisation, for a GPU, where a graph walk would wait at every hop. One set of guides per query head.

    Args:
        probes: guides whose lists are united: more find more and scan more.
        neighbours: keys in a guide's list, its exact nearest ones; 65,536 or less, 8 bytes each.
        guides: training queries kept, evenly spaced over the prefill, or the number of centroids; decode queries join
            while there are fewer.
        centroids: k-means centroids of the prefill's queries (faiss, spherical, on the host) serve as guides.
        share: share of the prefill's queries that the cache keeps until then, evenly spaced. 0: the keys serve as
            queries, and a warning says so.

    Guides are compared with the query by the cosine under the keys' second moment: near are those that rank keys alike
    (at 131,072 synthetic keys, with 2,048 guides, 512 keys each and 8 probes this finds 0.83 of the top 100, the plain
    cosine 0.67; log of 2026-11-20). Keys sealed later enter the lists in which they belong; one that enters no list is
    not found. `scanned` counts guides and distinct keys scored.

    Raises:
        ValueError: an argument out of its range.
        ImportError: faiss is missing.
    """

    operators = 26
    knob = "probes"

    def __init__(
        self, probes: int = 16, neighbours: int = 256, guides: int = 2048, centroids: bool = False, share: float = 1.0
    ) -> None:
        check_least(probes=(probes, 1), neighbours=(neighbours, 1), guides=(guides, 1))
        check_most(neighbours=neighbours)
        check_share(share)
        load_faiss()
        self.probes, self.neighbours, self.guides, self.centroids = probes, neighbours, guides, centroids
        self.share = self.queries_share = share
        self.valid = RowBuffer(1)  # [B,N] bool, not padding: for `append`, no step reads it
        self.guide = RowBuffer(2)  # [B,Hs,S,D] float32
        self.direction = RowBuffer(2)  # [B,Hs,S,D] float32, unit length, in the space of comparison
        self.lists = RowBuffer(2, spare=-1)  # [B,Hs,S,K] int32, best first, then -1
        self.scores = RowBuffer(2)  # [B,Hs,S,K] float32, then -inf
        self.root = RowBuffer(2)  # [B,H,D,D] float32, the root of the second moment of the first keys sealed

    def fix(self, rows: int, seal: int) -> None:
        for buffer in (self.guide, self.direction, self.lists, self.scores):
            buffer.fix(self.guides)
        self.root.fix()

    def append(self, rows: Rows) -> None:
        batch, heads, new, size = rows.keys.shape
        first, group = self.valid.rows, 1 if rows.queries is None else rows.queries.shape[2]
        sampled = 0 if rows.queries is None else rows.queries.shape[3]
        valid, keys = rows.positions >= 0, rows.keys.float()
        self.valid.append(valid)
        if first:
            self._join(keys, valid, first)
        else:
            self.root.append(torch.zeros(batch, heads, size, size, device=keys.device))
        made = (
            _made(self.lists.data)[:, 0].sum(-1).cpu() if self.guide.rows else torch.zeros(batch, dtype=torch.int64)
        )  # [B] guides
        more = sampled or (0 if first else new)
        most = int((made + more).clamp(max=self.guides).max())
        self._extend(batch, heads * group, max(most - self.guide.rows, 0), size, keys.device)
        without = 0
        for b, count in enumerate(valid.sum(1).tolist()):
            place = self.valid.data[b].nonzero()[:, 0]
            opening = len(place) == count
            free = int(self.guides - made[b])
            if not count or not free or not (opening or sampled):
                continue
            for h in range(heads):
                known = keys[b, h, :count]
                if not opening:
                    known = torch.cat([self.stored_keys()[b, h][place[:-count]].float(), known])
                for g in range(group):
                    queries = known[:0]
                    if rows.queries is not None and rows.query_positions is not None:
                        queries = rows.queries[b, h, g][rows.query_positions[b] >= 0].float()
                    if opening:
                        without += not len(queries)
                        queries = queries if len(queries) else known
                        self.root.data[b, h] = root_of_moment(known)
                    self._learn(b, h, h * group + g, queries, known, place, int(made[b]), free)
        if without:
            warn_of_keys_as_queries(self, without, batch * heads * group)

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        check_no_order(order)
        batch, heads, new, size = rows.keys.shape
        group, sampled = (1, 0) if rows.queries is None else rows.queries.shape[2:4]
        guides = (batch, heads * group, min(sampled or new, self.guides))
        vectors, lists = (torch.float32, (*guides, size)), (*guides, self.neighbours)
        wanted = {"valid": (torch.bool, (batch, new)), "root": (torch.float32, (batch, heads, size, size))}
        wanted |= {"guide": vectors, "direction": vectors}
        check_tensors(state, {**wanted, "lists": (torch.int32, lists), "scores": (torch.float32, lists)})
        valid = (rows.positions >= 0).cpu()
        check_equal(state, "valid", valid)
        check_finite(state, "guide", "direction", "root")
        check_lists(state, "lists", valid.sum(1))
        check_scored(state, "lists", "scores")

    def _extend(self, batch: int, chosen: int, room: int, size: int, device: torch.device) -> None:
        vectors = torch.zeros(batch, chosen, room, size, device=device)
        lists = torch.full((batch, chosen, room, self.neighbours), -1, dtype=torch.int32, device=device)
        self.guide.append(vectors)
        self.direction.append(vectors)
        self.lists.append(lists)
        self.scores.append(torch.full(lists.shape, -torch.inf, device=device))

    def _learn(
        self, b: int, h: int, s: int, queries: Tensor, keys: Tensor, place: Tensor, made: int, free: int
    ) -> None:
        """Make at most `free` guides of query head s from `queries` `[Q,D]`, behind the `made` ones that it has.

        Their lists are from `keys` `[n,D]`, stored at rows `place` `[n]`.
        """
        if self.centroids and len(queries) > free and not made:
            queries = _centroids(queries, queries @ self.root.data[b, h], free)
        else:
            queries = evenly(queries, free)
        scores, ids = nearest(queries, keys, self.neighbours)
        filled = slice(made, made + len(queries))
        self.guide.data[b, s, filled] = queries
        self.direction.data[b, s, filled] = torch.nn.functional.normalize(queries @ self.root.data[b, h], dim=-1)
        self.lists.data[b, s, filled, : ids.shape[1]] = place[ids.long()].int()
        self.scores.data[b, s, filled, : ids.shape[1]] = scores

    def _join(self, keys: Tensor, valid: Tensor, first: int) -> None:
        """Let new keys `[B,H,n,D]`, stored from row `first` on, into the lists where they beat the worst key."""
        new = torch.arange(first, first + keys.shape[2], dtype=torch.int32, device=keys.device)
        group = self.guide.data.shape[1] // keys.shape[1]
        for b in range(keys.shape[0]):
            for s in range(self.guide.data.shape[1]):
                guides, lists, scores = self.guide.data[b, s], self.lists.data[b, s], self.scores.data[b, s]
                made = _made(lists)  # [S]
                products = guides @ keys[b, s // group].T  # [S,n]
                products = products.masked_fill(~(made[:, None] & valid[b]), -torch.inf)
                top = torch.cat([scores, products], 1).topk(self.neighbours, dim=1)
                ids = torch.cat([lists, new.expand(len(guides), -1)], 1).gather(1, top.indices)
                lists.copy_(torch.where(top.values.isneginf(), -1, ids))
                scores.copy_(top.values)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        batch, heads, group, size = query.shape
        chosen = heads * group
        lists, direction = self.lists.visible, self.direction.visible
        made = _made(lists)
        # direction: [B,A,S,D], A = Hs, or H where keys served as queries
        each = chosen // direction.shape[1]
        turned = (query.float() @ self.root.data).reshape(batch, -1, each, size)  # [B,A,each,D]
        likeness = turned @ direction.mT  # [B,A,each,S]
        likeness = likeness.masked_fill(~made[:, :, None], -torch.inf)
        probes = likeness.topk(min(self.probes, likeness.shape[-1]), dim=-1).indices  # [B,A,each,P]
        ids = lists.gather(2, probes.flatten(2)[..., None].expand(-1, -1, -1, self.neighbours))  # [B,A,each*P,K]
        ids = ids.view(batch, chosen, -1).sort(-1).values  # [B,Hs,P*K]
        scores = listed_scores(query, self.stored_keys(), ids)
        top = scores.topk(min(budget, scores.shape[-1]), dim=-1)
        rows = torch.where(top.values.isneginf(), -1, ids.gather(-1, top.indices))
        if not step.counted:
            return Selection.tokens(rows)
        guides, listed = made.sum(-1).repeat_interleave(each, 1), (ids >= 0).sum(-1)  # [B,Hs]
        scored = (~scores.isneginf()).sum(-1)
        read = guides * size * 4 + listed * 4 + scored * size * self.bytes_of(query)
        read = read.view(batch, heads, group).sum(-1)
        read = read + (read > 0) * size * size * 4  # the root, once per KV head
        return Selection.tokens(rows, guides + scored, read)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        (group, size), every = query.shape[2:], query.shape[:3].numel()
        guides, listed, scored = self._expected(sealed)
        read = group * (4 * guides * size + 4 * listed + scored * size * self.bytes_of(query)) + 4 * size * size
        scoring = (
            products(query, guides, size, 4.0 * group * guides * size),
            Launch("sort", entries=sorted_best(every, guides, self.probes) + sorted_best(every, 0, listed)),
            Launch("walk", bytes=every * scored * size * self.bytes_of(query), entries=every * scored),
        )
        counts, expected = (int(scored), min(budget, int(scored))), "lists share as many keys as random lists would"
        return self.ranked(query, Scan(guides + scored, read), scoring, counts, expected=expected)

    def _expected(self, sealed: int) -> tuple[int, int, float]:
        """Return how many guides there are expected to be, keys in the lists that a query unites, and distinct keys
        among these: as if lists of likely guides had the keys in common that lists at random have."""
        guides = min(self.guides, max(math.ceil(self.share * sealed), 1))
        listed = min(self.probes, guides) * min(self.neighbours, sealed)
        return guides, listed, new_of(sealed, listed)


def _made(lists: Tensor) -> Tensor:
    """Return which guides of lists `[...,S,K]` there are, `[...,S]` bool; the rest is room."""
    return lists[..., 0] >= 0


def _centroids(queries: Tensor, turned: Tensor, count: int) -> Tensor:
    """Return `[count,D]`: sums of the unit queries `[Q,D]` of each k-means cluster, clustered by the direction of
    `turned` `[Q,D]`."""
    faiss = load_faiss()
    points = torch.nn.functional.normalize(turned, dim=-1).cpu().numpy()
    means = faiss.Kmeans(points.shape[1], count, spherical=True, niter=10, seed=0, min_points_per_centroid=1)
    means.train(points)
    member = torch.from_numpy(means.index.search(points, 1)[1][:, 0]).to(queries.device)
    total = torch.zeros(count, queries.shape[1], device=queries.device)
    total.index_add_(0, member, torch.nn.functional.normalize(queries, dim=-1))
    return total[total.any(-1)]
