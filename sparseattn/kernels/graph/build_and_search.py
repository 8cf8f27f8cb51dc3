"""A proximity graph over keys, guided by queries, in compiled code: build, grow, search.

The recipe is RoarGraph's (https://arxiv.org/abs/2408.08933), which RetrievalAttention names as its index: the exact
nearest keys of training queries link keys that the same query retrieves, occlusion pruning keeps the lists short,
reverse edges and a search from every key make the rest reachable. Written for one head; ids are rows of `points`.

Letters: N keys, D head size, W width of the adjacency, Q training queries, n new keys. An adjacency is `[N,W]` int32,
each row its neighbours, then -1. `parent` `[N]` int32 is a spanning tree of the graph, rooted at the entry (whose
parent is itself; -1: not attached yet): its edges are never pruned, so every key stays reachable.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import BITS as BITS
from sparseattn.kernels.numba_rows import fetch, widen
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME as ONE_AT_A_TIME
from sparseattn.kernels.numba_threads import parts as parts

CANDIDATES = 1024  # of one pivot, the best of all its queries; more changed nothing (the log, 2026-11-20)


@njit(fastmath=True, inline="always")
def _dot(query, row):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for d in range(query.shape[0]):
        total += query[d] * widen(row[d])
    return total


@njit(fastmath=True, inline="always")
def _distance(points, a, b):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for d in range(points.shape[1]):
        step = points[a, d] - points[b, d]
        total += step * step
    return total


@njit(fastmath=True)
def _search(points, base, bias, adjacency, query, entry, beam, seen, ids, scores, done):  # type: ignore[no-untyped-def]
    """Best-first search from `entry`: fills ids, scores `[beam]`, best first.

    Key i is `points[base + i]` and scores `query . key + bias[i]` (no bias where it is empty). Returns how many were
    found, how many distinct keys were scored and how many neighbour lists were read.
    """
    seen[:] = 0
    seen[entry >> 6] |= np.uint64(1) << np.uint64(entry & 63)
    ids[0], done[0] = entry, False
    scores[0] = _dot(query, points[base + entry])
    if bias.shape[0]:
        scores[0] += bias[entry]
    size, scanned, expanded, at = 1, 1, 0, 0
    while at < size:
        if done[at]:
            at += 1
            continue
        done[at] = True
        expanded += 1
        node, lowest = ids[at], size
        for j in range(adjacency.shape[1]):  # far apart in memory: asked for together, they come together
            v = adjacency[node, j]
            if v < 0:
                break
            if not seen[v >> 6] & (np.uint64(1) << np.uint64(v & 63)):
                fetch(points, (base + v) * points.shape[1], points.shape[1])
        for j in range(adjacency.shape[1]):
            v = adjacency[node, j]
            if v < 0:
                break
            bit = np.uint64(1) << np.uint64(v & 63)
            if seen[v >> 6] & bit:
                continue
            seen[v >> 6] |= bit
            score = _dot(query, points[base + v])
            if bias.shape[0]:
                score += bias[v]
            scanned += 1
            if size == beam and score <= scores[size - 1]:
                continue
            low, high = 0, size
            while low < high:
                middle = (low + high) >> 1
                if scores[middle] >= score:
                    low = middle + 1
                else:
                    high = middle
            if low == beam:  # a score that is no number ranks nowhere
                continue
            size = min(size + 1, beam)
            for t in range(size - 1, low, -1):
                scores[t], ids[t], done[t] = scores[t - 1], ids[t - 1], done[t - 1]
            scores[low], ids[low], done[low] = score, v, False
            lowest = min(lowest, low)
        at = min(lowest, at + 1)
    return size, scanned, expanded


@entry(parallel=True, cache=True)
def search_heads(points, base, adjacency, which, queries, entry, rows, beam, count):  # type: ignore[no-untyped-def]
    """One query per head, heads in parallel: the keys with the highest inner products that a beam search finds.

    Args:
        points: `[R,D]` the stored keys of all heads as one list of rows: float32, or the bits of 16-bit floats (see
            `widen`).
        base: `[S]` int64, where each head's keys begin in it.
        adjacency: `[A,M,W]` int32, M >= rows.
        which: `[S]` int64, the graph of each head.
        queries: `[S,D]` float32.
        entry: `[A]` int32; -1 for a graph without keys.
        rows: N, keys of a head.
        beam: keys kept during the search, at least `count`.
        count: keys to return.

    Returns:
        ids `[S,count]` int32, best first, then -1; scanned `[S]` int64, distinct keys scored; expanded `[S]` int64,
        neighbour lists read.
    """
    heads = queries.shape[0]
    nearest = np.full((heads, count), -1, np.int32)
    scanned, expanded = np.zeros(heads, np.int64), np.zeros(heads, np.int64)
    for s in prange(heads):
        a = which[s]
        if entry[a] >= 0:
            seen = np.empty((rows + 63) >> 6, np.uint64)
            ids, scores, done = np.empty(beam, np.int32), np.empty(beam, np.float32), np.empty(beam, np.bool_)
            none = np.empty(0, np.float32)
            size, scanned[s], expanded[s] = _search(
                points, base[s], none, adjacency[a], queries[s], entry[a], beam, seen, ids, scores, done
            )
            for i in range(min(size, count)):
                nearest[s, i] = ids[i]
    return nearest, scanned, expanded


@entry(parallel=True, cache=True)
def search_queries(points, bias, adjacency, queries, entry, beam, chunks):  # type: ignore[no-untyped-def]
    """Many queries of one head, in parallel: ids `[Q,beam]` int32, best first, then -1, and their scores."""
    total = queries.shape[0]
    nearest, score = np.full((total, beam), -1, np.int32), np.full((total, beam), -np.inf, np.float32)
    step = (total + chunks - 1) // chunks
    for c in prange(chunks):
        seen = np.empty((adjacency.shape[0] + 63) >> 6, np.uint64)
        done = np.empty(beam, np.bool_)
        for i in range(c * step, min(total, (c + 1) * step)):
            _search(points, 0, bias, adjacency, queries[i], entry, beam, seen, nearest[i], score[i], done)
    return nearest, score


@njit(fastmath=True)
def _prune(points, node, candidates, count, out, keep, width, fill, alpha):  # type: ignore[no-untyped-def]
    """Occlusion pruning: takes a candidate, nearest first, unless one already taken is nearer to it than `node` is.

    With `alpha` (float32) above 1 it takes more: nearer means that `alpha` times the squared distance is less.
    `candidates[:count]` are distinct and not `node`; `out[:keep]` is taken already. Writes `out[:width]`; the
    nearest of the others take places until `fill` are taken.
    """
    distance = np.empty(count, np.float32)
    for i in range(count):
        distance[i] = _distance(points, node, candidates[i])
    size = keep
    order, left = np.argsort(distance, kind="mergesort"), np.empty(count, np.int32)
    others = 0
    for i in order:
        if size == width:
            break
        v, occluded = candidates[i], False
        for t in range(size):
            if out[t] == v or alpha * _distance(points, out[t], v) < distance[i]:
                occluded = True
                break
        if not occluded:
            out[size] = v
            size += 1
        else:
            left[others] = v
            others += 1
    for i in range(others):
        if size >= fill:
            break
        v, taken = left[i], False
        for t in range(keep):
            taken |= out[t] == v
        if not taken:
            out[size] = v
            size += 1
    out[size:] = -1


@entry(parallel=True, cache=True)
def project(points, lists, order, starts, degree, width, chunks):  # type: ignore[no-untyped-def]
    """Links every pivot to the keys that its queries retrieve: `[N,W]` with up to `degree` neighbours.

    Args:
        points: `[N,D]` float32, where distances are measured.
        lists: `[Q,K]` int32, the nearest keys of each query, best first; -1 past the last.
        order, starts: key x is a pivot (among the first keys of the list) of queries `order[starts[x]:starts[x + 1]]`;
            their lists are united.
    """
    total, kept = points.shape[0], lists.shape[1]
    adjacency = np.full((total, width), -1, np.int32)
    step = (total + chunks - 1) // chunks
    for c in prange(chunks):
        mark, candidates = np.full(total, -1, np.int32), np.empty(CANDIDATES, np.int32)
        for x in range(c * step, min(total, (c + 1) * step)):
            count = 0
            mark[x] = x
            for rank in range(kept):  # the best of every query first, where there are too many
                for i in range(starts[x], starts[x + 1]):
                    v = lists[order[i], rank]
                    if v >= 0 and mark[v] != x and count < CANDIDATES:
                        mark[v] = x
                        candidates[count] = v
                        count += 1
            if count:
                _prune(points, x, candidates, count, adjacency[x, :degree], 0, degree, 0, np.float32(1))
    return adjacency


@entry(parallel=True, cache=True)
def offer(points, adjacency, parent, nodes, starts, offers, degree, keep_all, fill, alpha, chunks):  # type: ignore[no-untyped-def]
    """Offers `nodes[i]` the neighbours `offers[starts[i]:starts[i + 1]]`; changes its list in place.

    While there is room up to `degree`, all are taken. Else the list and the offers are pruned together; edges of the
    tree stay, and with `keep_all` the whole list does. `fill` places at least are taken again. `alpha`: see `_prune`.
    """
    total, width = nodes.shape[0], adjacency.shape[1]
    step = (total + chunks - 1) // chunks
    for c in prange(chunks):
        mark = np.full(adjacency.shape[0], -1, np.int32)
        for i in range(c * step, min(total, (c + 1) * step)):
            x = nodes[i]
            candidates = np.empty(width + starts[i + 1] - starts[i], np.int32)
            count, keep, size = 0, 0, 0
            row = np.full(width, -1, np.int32)
            mark[x] = x
            for j in range(width):
                v = adjacency[x, j]
                if v < 0:
                    break
                mark[v] = x
                if keep_all or parent[v] == x:
                    row[keep] = v
                    keep += 1
                else:
                    candidates[count] = v
                    count += 1
            size = keep + count
            for k in range(starts[i], starts[i + 1]):
                v = offers[k]
                if v >= 0 and mark[v] != x:
                    mark[v] = x
                    candidates[count] = v
                    count += 1
            if keep + count == size:
                continue
            if keep + count <= degree:
                for k in range(count):
                    row[keep + k] = candidates[k]
            elif keep < degree:
                _prune(points, x, candidates, count, row[:degree], keep, degree, fill, alpha)
            for j in range(width):
                adjacency[x, j] = row[j]


@entry(parallel=True, cache=True)
def stitch(adjacency, total, chunks):  # type: ignore[no-untyped-def]
    """Return the lists of keys without queries in them: each query gives its place, and free ones, to keys of its own
    list.

    Args:
        adjacency: `[N+Q,W]` int32, the first `total` rows of it keys, the others queries.

    Returns:
        `[total,W]` int32, full where the queries of a list know enough keys.
    """
    width = adjacency.shape[1]
    stitched = np.full((total, width), -1, np.int32)
    step = (total + chunks - 1) // chunks
    for c in prange(chunks):
        mark = np.full(total, -1, np.int32)
        for x in range(c * step, min(total, (c + 1) * step)):
            size, queries = 0, 0
            mark[x] = x
            for j in range(width):
                v = adjacency[x, j]
                if 0 <= v < total:
                    stitched[x, size] = v
                    mark[v] = x
                    size += 1
                queries += v >= total
            for j in range(width):
                q = adjacency[x, j]
                if q < total:
                    continue
                room = (width - size) // queries
                queries -= 1
                for k in range(width):
                    v = adjacency[q, k]
                    if room > 0 and 0 <= v < total and mark[v] != x:
                        stitched[x, size] = v
                        mark[v] = x
                        size += 1
                        room -= 1
    return stitched


@entry(cache=True)
def by_target(source, target, total):  # type: ignore[no-untyped-def]
    """Pairs sorted by target, in order of the sources: starts `[total + 1]` and the sources."""
    starts = np.zeros(total + 1, np.int64)
    for v in target:
        if v >= 0:
            starts[v + 1] += 1
    for x in range(total):
        starts[x + 1] += starts[x]
    at, out = starts[:-1].copy(), np.empty(starts[total], np.int32)
    for i in range(target.shape[0]):
        v = target[i]
        if v >= 0:
            out[at[v]] = source[i]
            at[v] += 1
    return starts, out


@entry(cache=True)
def attach(adjacency, parent, queue, filled):  # type: ignore[no-untyped-def]
    """Extend the tree over every key; where no edge leads to one, an edge that the tree does not use makes room.

    `queue` `[N]` int32 holds `filled` attached keys, 1 or more, whose edges are to be followed.
    """
    total, width = adjacency.shape
    read, loose = 0, 0
    while True:
        while read < filled:
            x = queue[read]
            read += 1
            for j in range(width):
                v = adjacency[x, j]
                if v < 0:
                    break
                if parent[v] < 0:
                    parent[v] = x
                    queue[filled] = v
                    filled += 1
        while loose < total and parent[loose] >= 0:
            loose += 1
        if loose == total:
            return
        host, place = -1, -1
        for j in range(width):  # near it, if one of its own neighbours has room
            v = adjacency[loose, j]
            if v < 0:
                break
            if parent[v] >= 0:
                place = _room(adjacency, parent, v)
                if place >= 0:
                    host = v
                    break
        if host < 0:  # else below the newest: a list that is all tree edges leads down, and a leaf has room
            host = queue[filled - 1]
            place = _room(adjacency, parent, host)
            while place < 0:
                host = adjacency[host, width - 1]
                place = _room(adjacency, parent, host)
        adjacency[host, place] = loose
        parent[loose] = host
        queue[filled] = loose
        filled += 1


@njit
def _room(adjacency, parent, x):  # type: ignore[no-untyped-def]
    """Return the place in x's list for one more neighbour: a free one, else the last that the tree does not use, else
    -1."""
    width = adjacency.shape[1]
    for j in range(width):
        if adjacency[x, j] < 0:
            return j
    for j in range(width - 1, -1, -1):
        if parent[adjacency[x, j]] != x:
            return j
    return -1
