"""Building and growing one head's graph: which keys are offered to which (the compiled parts are in `graph`).

RoarGraph, https://arxiv.org/abs/2408.08933, as RetrievalAttention uses it, https://arxiv.org/abs/2409.10516.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from sparseattn.kernels.graph import build_and_search
from sparseattn.kernels.nearest import nearest

Floats: TypeAlias = Any  # numpy float32
Ids: TypeAlias = Any  # numpy int32

BATCH = 1024  # keys inserted together; later ones are linked to earlier ones
NEAR = 8  # guides whose lists a new key joins


@dataclass(frozen=True)
class GraphRecipe:
    """How lists are made; see `RetrievalAttention`."""

    neighbours: int
    degree: int
    pivots: int
    build_beam: int
    guides: int
    alpha: float = 1.0

    @property
    def projected(self) -> int:
        """Neighbours that the projection may give; the rest of `degree` is for enhancement."""
        return max(1, self.degree * 3 // 4)

    @property
    def refilled(self) -> int:
        """Neighbours that a list pruned at an insertion keeps at least: pruned anew at every seal, it would lose more
        links than it gains; kept full, searches would scan a fifth more."""
        return max(1, self.degree * 5 // 8)


@dataclass
class Graph:
    """One head's index over N keys.

    Args:
        adjacency, parent: `[N,W]` and `[N]` int32, see `build_and_search`.
        bias: `[N]` float32, added to products with the points; it ranks keys by distance.
        entry: the key where every search begins.
        guides: `[S,D]` float32, a sample of the training queries, which places keys that come later; S may be 0. Decode
            queries take what is free.
        lists, scores: `[S,K]` int32 and float32, the guides' best keys and their products, best first; then -1 and
            -infinity.
    """

    adjacency: Ids
    parent: Ids
    bias: Floats
    entry: int
    guides: Floats
    lists: Ids
    scores: Floats


def build(keys: Floats, points: Floats, queries: Floats, recipe: GraphRecipe) -> Graph:
    """Return the graph over `keys` `[N,D]` that `queries` `[Q,D]` guide; distances between keys are those of
    `points`."""
    total, chunks = len(keys), build_and_search.parts()
    neighbours = nearest(torch.from_numpy(queries), torch.from_numpy(keys), recipe.neighbours)
    scores, lists = neighbours[0].numpy(), neighbours[1].numpy()
    order, starts = _by_pivot(lists, recipe.pivots, total)
    adjacency = build_and_search.project(points, lists, order, starts, recipe.projected, recipe.degree, chunks)
    parent: Ids = np.full(total, -1, np.int32)
    everyone: Ids = np.arange(total, dtype=np.int32)
    reverse(points, adjacency, parent, adjacency, everyone, recipe.projected)
    far = np.square(points - points.mean(0)).sum(1)
    degrees = (adjacency >= 0).sum(1)
    entry = int(np.where(degrees >= min(recipe.projected, int(degrees.max())) // 2, far, np.inf).argmin())
    # Connectivity enhancement: what a search from every key finds is offered to it, and it to them.
    bias = bias_of(points)
    before = adjacency.copy()
    reached = build_and_search.search_queries(points, bias, before, points, entry, recipe.build_beam, chunks)[0]
    spans = np.arange(total + 1, dtype=np.int64) * reached.shape[1]
    slack = np.float32(1)
    build_and_search.offer(
        points, adjacency, parent, everyone, spans, reached.reshape(-1), recipe.degree, True, 0, slack, chunks
    )
    fresh = _fresh(adjacency, before)
    reverse(points, adjacency, parent, fresh, everyone, recipe.degree, True)
    parent[entry] = entry
    queue: Ids = np.empty(total, np.int32)
    queue[0] = entry
    build_and_search.attach(adjacency, parent, queue, 1)
    few = np.linspace(0, len(queries) - 1, min(recipe.guides, len(queries)), dtype=np.int64)  # evenly over the prefill
    return Graph(adjacency, parent, bias, entry, queries[few], lists[few], scores[few])


def _fresh(after: Ids, before: Ids) -> Ids:
    """`after` with -1 in place of what `before` has: with the whole list kept, the new ones follow the old."""
    counts = (before >= 0).sum(1)
    return np.where(np.arange(after.shape[1]) >= counts[:, None], after, -1).astype(np.int32)


def grow(graph: Graph, keys: Floats, points: Floats, queries: Floats, first: int, recipe: GraphRecipe) -> None:
    """Links the keys from `first` on into the graph, in place.

    They are placed by the decode `queries` `[Q,D]`, with what those find, and by the guides whose lists they join: few
    decode queries aim at a new key, and lists of queries are what tells which keys belong together. Without guides,
    recall on new keys was 0.83 where a fresh build had 0.93 (the log, 2026-11-20).

    Args:
        graph: its rows from `first` on are unused: -1 in `parent`, and no list.
        keys, points: `[N,D]`, the old and the new keys.
    """
    share = len(queries) / max(len(keys) - first, 1)
    for low in range(first, len(keys), BATCH):
        high = min(low + BATCH, len(keys))
        mine = queries[round((low - first) * share) : round((high - first) * share)]
        _grow(graph, keys[:high], points[:high], mine, low, recipe)


def _grow(graph: Graph, keys: Floats, points: Floats, queries: Floats, first: int, recipe: GraphRecipe) -> None:
    adjacency, parent = graph.adjacency[: len(keys)], graph.parent[: len(keys)]
    old = adjacency[:first]
    new: Ids = np.arange(first, len(keys), dtype=np.int32)
    pairs = [_by_guides(graph, keys, new, recipe)]
    if len(queries):
        beam = max(recipe.neighbours, recipe.build_beam)
        none: Floats = np.empty(0, np.float32)
        reached, score = build_and_search.search_queries(
            keys, none, old, queries, graph.entry, beam, build_and_search.parts()
        )
        lists, scores = best(reached, score, new, queries @ keys[first:].T, recipe.neighbours)
        pairs.append(_pairs(lists, recipe.pivots, first))
        free = np.flatnonzero(graph.lists[:, 0] < 0)[: len(queries)]
        known = lists.shape[1]
        graph.guides[free] = queries[: len(free)]
        graph.lists[free, :known], graph.scores[free, :known] = lists[: len(free)], scores[: len(free)]
    graph.bias[first : len(keys)] = bias_of(points[first:])
    bias = graph.bias[: len(keys)]
    reached, score = build_and_search.search_queries(
        points, bias, old, points[first:], graph.entry, recipe.build_beam, build_and_search.parts()
    )
    candidates = best(reached, score, new, points[first:] @ points[first:].T + bias[first:], recipe.build_beam)[0]
    pairs.append(flat(np.broadcast_to(new[:, None], candidates.shape), candidates))
    nodes, offers = (np.concatenate(part) for part in zip(*pairs, strict=True))
    # Filled up: lists pruned anew at every seal would lose more links than they gain.
    fill, alpha = recipe.refilled, recipe.alpha
    offer(points, adjacency, parent, nodes, offers, recipe.degree, fill=fill, alpha=alpha)
    reverse(points, adjacency, parent, adjacency[first:], new, recipe.degree, fill=fill, alpha=alpha)
    changed = np.union1d(np.append(nodes, reached[:, 0]), adjacency[first:])  # and the nearest old ones: not none
    changed = changed[(changed >= 0) & (changed < first)].astype(np.int32)  # all edges to new keys come from these
    queue: Ids = np.empty(len(changed) + len(new), np.int32)
    queue[: len(changed)] = changed
    build_and_search.attach(adjacency, parent, queue, len(changed))


def _by_guides(graph: Graph, keys: Floats, new: Ids, recipe: GraphRecipe) -> tuple[Ids, Ids]:
    """Pairs (node, neighbour to offer) of the new keys and the keys listed by the guides that want them most.

    Brings the guides' lists up to date.
    """
    if not len(graph.guides):
        return np.empty(0, np.int32), np.empty(0, np.int32)
    products = graph.guides @ keys[new[0] :].T  # [S,n]
    margin = products - graph.scores.min(1, keepdims=True)  # over the worst key listed
    margin[graph.lists[:, 0] < 0] = -np.inf
    wanted = np.flatnonzero((margin > 0).any(1))
    if len(wanted):
        graph.lists[wanted], graph.scores[wanted] = best(
            graph.lists[wanted], graph.scores[wanted], new, products[wanted], graph.lists.shape[1]
        )
    count = min(NEAR, len(margin))
    guide = np.argpartition(-margin, count - 1, axis=0)[:count]  # [t,n]
    lists = graph.lists[guide]  # [t,n,K]
    pivots = lists[..., : recipe.pivots]
    mine, ours = np.broadcast_to(new[:, None], lists.shape), np.broadcast_to(new[:, None], pivots.shape)
    whole, first = flat(mine, lists), flat(pivots, ours)
    return np.concatenate([whole[0], first[0]]), np.concatenate([whole[1], first[1]])


def _pairs(lists: Ids, pivots: int, first: int) -> tuple[Ids, Ids]:
    """Pairs (pivot, key to offer it) from queries' `lists` `[Q,K]`: to a new pivot all, to an old one the new keys."""
    pivot = np.broadcast_to(lists[:, :pivots, None], (len(lists), min(pivots, lists.shape[1]), lists.shape[1]))
    member = np.broadcast_to(lists[:, None], pivot.shape)
    nodes, offers = flat(pivot, member)
    wanted = (nodes >= first) | (offers >= first)
    return nodes[wanted], offers[wanted]


def flat(nodes: Ids, offers: Ids) -> tuple[Ids, Ids]:
    """Return the pairs of two arrays of one shape, without those where either is unused (-1) or both are one key."""
    used = (nodes >= 0) & (offers >= 0) & (nodes != offers)
    return nodes[used], offers[used]


def best(known: Ids, score: Floats, new: Ids, products: Floats, count: int) -> tuple[Ids, Floats]:
    """`[Q,count]` ids and scores: the best of what was found and of the new keys, which score `products` `[Q,n]`."""
    ids = np.concatenate([known, np.broadcast_to(new, products.shape)], 1)
    scores = np.concatenate([score, products], 1)
    if 2 * count < scores.shape[1]:
        part = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        ids, scores = np.take_along_axis(ids, part, 1), np.take_along_axis(scores, part, 1)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(ids, top, 1), np.take_along_axis(scores, top, 1)


def _by_pivot(lists: Ids, pivots: int, total: int) -> tuple[Ids, Any]:
    """Return the queries sorted by each of their first `pivots` keys: order and, for every key, where its queries
    begin."""
    first = lists[:, :pivots]
    query: Ids = np.repeat(np.arange(len(lists), dtype=np.int32), first.shape[1])
    starts, order = build_and_search.by_target(query, first.reshape(-1), total)
    return order, starts


def reverse(
    points: Floats,
    adjacency: Ids,
    parent: Ids,
    lists: Ids,
    sources: Ids,
    degree: int,
    keep_all: bool = False,
    fill: int = 0,
    alpha: float = 1.0,
) -> None:
    """Offers every key the `sources` `[n]` that list it in `lists` `[n,W]`."""
    used = lists >= 0
    source = np.broadcast_to(sources[:, None], lists.shape)[used]
    offer(points, adjacency, parent, lists[used], source, degree, keep_all, fill, alpha)


def offer(
    points: Floats,
    adjacency: Ids,
    parent: Ids,
    nodes: Ids,
    offers: Ids,
    degree: int,
    keep_all: bool = False,
    fill: int = 0,
    alpha: float = 1.0,
) -> None:
    """Offers `nodes[i]` the neighbour `offers[i]`, for all i at once; see `build_and_search.offer`."""
    if len(nodes) < len(adjacency):  # a few keys come: nothing here takes time in proportion to the others
        offered, nodes = np.unique(nodes, return_inverse=True)
        starts, offers = build_and_search.by_target(offers, nodes, len(offered))
    else:
        starts, offers = build_and_search.by_target(offers, nodes, len(adjacency))
        offered = np.flatnonzero(np.diff(starts))
        starts = np.append(starts[offered], starts[-1])
    chunks, wide = min(build_and_search.parts(), 1 + len(offered) // 256), np.float32(alpha)
    build_and_search.offer(
        points, adjacency, parent, offered.astype(np.int32), starts, offers, degree, keep_all, fill, wide, chunks
    )


def bias_of(points: Floats) -> Floats:
    """`[N]`: added to inner products, it ranks keys by distance."""
    return np.asarray(-np.square(points).sum(1) / 2, dtype=np.float32)
