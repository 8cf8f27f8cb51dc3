"""Building one head's graph as RobustVamana does; keys and queries are points of one space (`robustvamana`).

OOD-DiskANN, https://arxiv.org/abs/2211.12850, on Vamana, DiskANN's graph. Lists, searches and insertions are
`build_and_search`'s.
"""

from __future__ import annotations

import numpy as np

from sparseattn.kernels.graph import build_and_search
from sparseattn.kernels.graph.roargraph import (
    BATCH,
    Floats,
    Graph,
    GraphRecipe,
    Ids,
    best,
    bias_of,
    flat,
    offer,
    reverse,
)


def build(points: Floats, queries: Floats, recipe: GraphRecipe) -> Graph:
    """Return the graph over `points` `[N,E]`, stitched through `queries` `[Q,E]`, all of length 1."""
    total, nodes = len(points), np.concatenate([points, queries])
    adjacency: Ids = np.full((len(nodes), recipe.degree), -1, np.int32)
    entry = int(np.square(points - points.mean(0)).sum(1).argmin())
    for alpha in (1.0, recipe.alpha):  # the first pass without long edges, as in Vamana
        for low, high in ((0, total), (total, len(nodes))):
            for first in range(low, high, BATCH):
                new: Ids = np.arange(first, min(first + BATCH, high), dtype=np.int32)
                _insert(nodes, total, adjacency, new, entry, alpha, recipe)
    stitched = build_and_search.stitch(adjacency, total, build_and_search.parts())
    parent: Ids = np.full(total, -1, np.int32)
    parent[entry] = entry
    queue: Ids = np.empty(total, np.int32)
    queue[0] = entry
    build_and_search.attach(stitched, parent, queue, 1)
    none: Floats = np.empty((0, 1), np.float32)
    return Graph(stitched, parent, bias_of(points), entry, none, none.astype(np.int32), none)


def _insert(nodes: Floats, total: int, adjacency: Ids, new: Ids, entry: int, alpha: float, recipe: GraphRecipe) -> None:
    """Links `new` `[n]`, all of them keys (ids below `total`) or all queries, to what a search for each finds, and what
    they are linked to, to them.

    Keys of a batch see each other when they come, and are pruned. A query's list is the nearest keys found: they are
    nearer to each other than to it, so pruning would leave it one.
    """
    free: Ids = np.full(len(nodes), -1, np.int32)  # no tree yet: every edge may be pruned
    unbiased: Floats = np.empty(0, np.float32)
    mine, comes = nodes[new], bool((adjacency[new] < 0).all())
    reached, score = build_and_search.search_queries(
        nodes, unbiased, adjacency, mine, entry, recipe.build_beam, build_and_search.parts()
    )
    if new[0] >= total:
        for node, ids in zip(new, reached, strict=True):
            keys = ids[(ids >= 0) & (ids < total)][: recipe.degree]
            adjacency[node, : len(keys)] = keys
            adjacency[node, len(keys) :] = -1
    else:
        if comes:
            reached = best(reached, score, new, mine @ mine.T, recipe.build_beam)[0]
        pairs = flat(np.broadcast_to(new[:, None], reached.shape), reached)
        offer(nodes, adjacency, free, *pairs, recipe.degree, alpha=alpha)
    lists = np.where(adjacency[new] < total, adjacency[new], -1)
    reverse(nodes, adjacency, free, lists, new, recipe.degree, alpha=alpha)
