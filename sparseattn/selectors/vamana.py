"""Building one head's graph as RobustVamana does; keys and queries are points of one space (`robustvamana`).

OOD-DiskANN, https://arxiv.org/abs/2211.12850, on Vamana, DiskANN's graph. Lists, searches and insertions are `graph`'s.
"""

from __future__ import annotations

import numpy as np

from sparseattn.selectors import graph
from sparseattn.selectors.roar import BATCH, Floats, Graph, Ids, Recipe, best, bias_of, flat, offer, reverse


def build(points: Floats, queries: Floats, recipe: Recipe) -> Graph:
    """The graph over `points` `[N,E]`, stitched through `queries` `[Q,E]`, all of length 1."""
    total, nodes = len(points), np.concatenate([points, queries])
    adjacency: Ids = np.full((len(nodes), recipe.degree), -1, np.int32)
    entry = int(np.square(points - points.mean(0)).sum(1).argmin())
    for alpha in (1.0, recipe.alpha):  # the first pass without long edges, as in Vamana
        for low in range(0, len(nodes), BATCH):
            new: Ids = np.arange(low, min(low + BATCH, len(nodes)), dtype=np.int32)
            _insert(nodes, adjacency, new, entry, alpha, recipe)
    stitched = graph.stitch(adjacency, total, graph.parts())
    parent: Ids = np.full(total, -1, np.int32)
    parent[entry] = entry
    queue: Ids = np.empty(total, np.int32)
    queue[0] = entry
    graph.attach(stitched, parent, queue, 1)
    none: Floats = np.empty((0, 1), np.float32)
    return Graph(stitched, parent, bias_of(points), entry, none, none.astype(np.int32), none)


def _insert(nodes: Floats, adjacency: Ids, new: Ids, entry: int, alpha: float, recipe: Recipe) -> None:
    """Offers the nodes `new` `[n]` what a search for each finds, and each other; then themselves to their neighbours.

    In the second pass they are in the graph already, and keep of their lists and of what is found what pruning leaves.
    """
    free: Ids = np.full(len(nodes), -1, np.int32)  # no tree yet: every edge may be pruned
    unbiased: Floats = np.empty(0, np.float32)
    mine = nodes[new]
    found, score = graph.search_queries(nodes, unbiased, adjacency, mine, entry, recipe.build_beam, graph.parts())
    near = found
    if (adjacency[new] < 0).all():
        near = best(found, score, new, mine @ mine.T, recipe.build_beam)[0]
    pairs = flat(np.broadcast_to(new[:, None], near.shape), near)
    offer(nodes, adjacency, free, *pairs, recipe.degree, alpha=alpha)
    reverse(nodes, adjacency, free, adjacency[new], new, recipe.degree, alpha=alpha)
