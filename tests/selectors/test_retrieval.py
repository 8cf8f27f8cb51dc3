"""RetrievalAttention beyond the laws: the compiled parts by hand, the graph as a graph, recall, growth, bad input."""

from __future__ import annotations

import bisect
import sys
import warnings

import pytest
import torch
from torch import Tensor

import sparseattn.selectors
from sparseattn import SELECTORS, KVCache, RetrievalAttention, Selection, decode, make_selector
from sparseattn.selectors.graphs.faiss_indexes import HNSW
from sparseattn.traces.synthetic import synthetic
from tests.cases import attention, full, heads

np = pytest.importorskip("numpy")
pytest.importorskip("faiss")
pytest.importorskip("numba")

from sparseattn.kernels.graph import build_and_search, roargraph  # noqa: E402

D = 16
KEEP = "ignore:.*keys serve as queries"  # where the warning is not the point


def filled(selector: RetrievalAttention, keys: Tensor, queries: Tensor | None = None, sink: int = 0) -> KVCache:
    """A cache that has sealed all of `keys` `[B,H,N,D]` but the sink; the keys are their own queries by default."""
    cache = KVCache(selector, sink=sink, window=0, seal=1)
    cache.append(keys, keys, keys[:, :, None] if queries is None else queries)
    cache.seal()
    return cache


def more(cache: KVCache, keys: Tensor, step: int, queries: Tensor | None = None) -> None:
    """Seals `keys`, `step` rows at a time."""
    asked = keys[:, :, None] if queries is None else queries
    for part in torch.arange(keys.shape[2]).split(step):
        cache.append(keys[:, :, part], keys[:, :, part], asked[:, :, :, part])
        cache.seal()


def exact(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random multiples of 1/8 up to 4: every dtype holds them, and products of 16 of them have no rounding error."""
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)) / 8


def graphs(selector: RetrievalAttention):
    """Adjacency, parent and entry of every graph, as numpy."""
    for b in range(selector.parent.data.shape[0]):
        for s in range(selector.parent.data.shape[1]):
            yield (
                selector.adjacency.data[b, s].numpy(),
                selector.parent.data[b, s].numpy(),
                int(selector.entry.data[b, s, 0]),
            )


def well_formed(adjacency, parent, entry: int) -> None:
    """Lists are valid, `parent` is a spanning tree of them, and every key is reachable from the entry by them."""
    total = len(adjacency)
    lists = []
    for x, row in enumerate(adjacency.tolist()):
        used = [v for v in row if v >= 0]
        assert row == used + [-1] * (len(row) - len(used)), "-1 only at the end"
        assert len(set(used)) == len(used), "no neighbour twice"
        assert x not in used, "no self loop"
        assert all(v < total for v in used)
        lists.append(used)
    reached, stack = {entry}, [entry]
    while stack:
        fresh = [v for v in lists[stack.pop()] if v not in reached]
        reached.update(fresh)
        stack += fresh
    assert len(reached) == total, f"{total - len(reached)} of {total} keys are out of reach"
    assert parent[entry] == entry
    assert [x for x in range(total) if parent[x] == x] == [entry], "one root"
    assert all(0 <= parent[x] < total for x in range(total))
    assert all(x in lists[parent[x]] for x in range(total) if x != entry), "a tree edge is an edge"
    depth = {entry: 0}
    for x in range(total):
        path = []
        while x not in depth:
            path.append(x)
            depth[x] = -1  # met again before it is resolved: a cycle
            x = int(parent[x])
        assert depth[x] >= 0, "a cycle in the tree"
        for i, y in enumerate(reversed(path)):
            depth[y] = depth[x] + 1 + i


def sound(selector: RetrievalAttention) -> None:
    for one in graphs(selector):
        assert one[0].shape[1] == selector.degree
        well_formed(*one)


def walk(keys: list[list[float]], adjacency, entry: int, query: list[float], beam: int) -> tuple[list[int], int, int]:
    """Best-first search in plain Python: ids best first, distinct keys scored, lists read; of equals the first."""

    def score(v: int) -> float:
        return sum(a * b for a, b in zip(query, keys[v], strict=True))

    seen, read = {entry}, set()
    pool = [(-score(entry), 0, entry)]  # sorted by score, then by arrival
    while fresh := [v for _, _, v in pool if v not in read]:
        read.add(fresh[0])
        for v in adjacency[fresh[0]].tolist():
            if v >= 0 and v not in seen:
                bisect.insort(pool, (-score(v), len(seen), v))
                seen.add(v)
                del pool[beam:]
    return [v for _, _, v in pool], len(seen), len(read)


# -- compiled parts, by hand ------------------------------------------------------------------------------------------


def ids(*rows: list[int]):
    """`[n,W]` int32, filled up with -1."""
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)


def project(points: list[list[float]], lists, pivots: int, degree: int, width: int) -> list[list[int]]:
    points = np.array(points, np.float32)
    order, starts = roargraph._by_pivot(lists, pivots, len(points))
    made = build_and_search.project(points, lists, order, starts, degree, width, 3)
    assert made.shape == (len(points), width)
    return [[v for v in row if v >= 0] for row in made.tolist()]


CROSS = [[0, 0], [1, 0], [0, 1.1], [-1.2, 0], [0, -1.3]]


def test_lists_of_queries_that_share_a_pivot_are_united() -> None:
    """The published code keeps those of the last one."""
    lists = ids([0, 1, 2], [0, 3, 2], [0, 4, 1])
    assert project(CROSS, lists, 1, 4, 6) == [[1, 2, 3, 4], [], [], [], []]
    assert project(CROSS, lists[:2], 1, 4, 6)[0] == [1, 2, 3]


def test_every_pivot_of_a_list_is_linked_to_all_of_it() -> None:
    lists = ids([1, 0, 2], [3])
    assert project(CROSS, lists, 1, 4, 4) == [[], [0], [], [], []], "2 is nearer to 0 than to 1"
    assert project(CROSS, lists, 2, 4, 4) == [[1, 2], [0], [], [], []]
    assert project(CROSS, lists, 9, 4, 4) == [[1, 2], [0], [0], [], []]


def test_a_key_behind_a_nearer_neighbour_is_left_out() -> None:
    line = [[0, 0], [2, 0], [1, 0], [3, 0], [-1.5, 0], [0, 2.5]]
    lists = ids([0, 1, 2, 3, 4, 5])
    assert project(line, lists, 1, 9, 9)[0] == [2, 4, 5], "nearest first; 1 and 3 are behind 2"
    assert project(line, lists, 1, 2, 5)[0] == [2, 4], "the nearest two"
    same = [[0, 0], [1, 0], [1, 0], [0.5, 3**0.5 / 2]]
    assert project(same, ids([0, 3, 2, 1]), 1, 9, 9)[0][:2] == [3, 2], "as near to each other is not nearer"


def test_of_too_many_candidates_the_best_of_every_query_come_first() -> None:
    most = build_and_search.CANDIDATES
    points = np.concatenate([np.zeros((1, 2 * most)), np.eye(2 * most)]).astype(np.float32)  # none hides another
    lists = np.stack([[0, *range(1, most + 1)], [0, *range(most + 1, 2 * most + 1)]]).astype(np.int32)
    order, starts = roargraph._by_pivot(lists, 1, len(points))
    found = build_and_search.project(points, lists, order, starts, 2 * most, 2 * most, 1)[0]
    half = most // 2
    assert sorted(found[found >= 0].tolist()) == [*range(1, half + 1), *range(most + 1, most + half + 1)]


def offered(points, adjacency, parent, offers: list[int], degree: int, keep_all: bool = False) -> list[int]:
    """Key 0's list after the offers."""
    points, adjacency = np.array(points, np.float32), adjacency.copy()
    rest = adjacency[1:].copy()
    pairs = np.array(offers, np.int32)
    nodes = np.zeros(len(pairs), np.int32)
    roargraph.offer(points, adjacency, np.array(parent, np.int32), nodes, pairs, degree, keep_all)
    assert np.array_equal(adjacency[1:], rest), "no other list changes"
    return [v for v in adjacency[0].tolist() if v >= 0]


def test_offers_are_taken_while_there_is_room_and_pruned_then() -> None:
    line = [[0, 0], [1, 0], [2, 0], [3, 0], [-1.5, 0], [0, 4]]
    loose = [-1] * 6
    row = ids([1, 3], [], [], [], [], [0, 1, 2, 3])
    assert offered(line, row, loose, [2, 4], 4) == [1, 3, 2, 4], "4 fit"
    assert offered(line, row, loose, [2, 2, 1, 0], 4) == [1, 3, 2], "neither twice nor itself"
    assert offered(line, row, loose, [2, 4, 5], 4) == [1, 4, 5], "5 do not: 2 and 3 are behind 1"
    assert offered(line, row, loose, [4, 5], 2) == [1, 4]
    assert offered(line, row, loose, [1, 3, 0], 2) == [1, 3], "nothing new"
    assert offered(line, row, loose, [], 2) == [1, 3]


def test_pruning_keeps_the_edges_of_the_tree() -> None:
    line = [[0, 0], [1, 0], [2, 0], [3, 0], [-1.5, 0], [0, 4]]
    row = ids([1, 3, 2], [], [], [], [], [])
    assert offered(line, row, [-1, -1, -1, 0, -1, -1], [4, 5], 3) == [3, 1, 4], "3 stays, though behind 1"
    assert offered(line, row, [-1, 0, 0, 0, -1, -1], [4], 3) == [1, 3, 2], "nothing but the tree's"
    assert offered(line, row, [-1, 2, 2, 2, -1, -1], [4, 5], 3) == [1, 4, 5], "edges of another's tree"


def test_enhancement_keeps_the_whole_list() -> None:
    line = [[0, 0], [1, 0], [2, 0], [3, 0], [-1.5, 0], [0, 4], [0, -5], [-4, 0]]
    row = ids([3, 1, 0, 0], [], [], [], [], [], [], [])
    row[0, 2:] = -1
    assert offered(line, row, [-1] * 8, [2, 6, 7, 4, 5], 4, True) == [3, 1, 4, 5], "2 is behind 1; nearest first"
    assert offered(line, row, [-1] * 8, [2, 6], 4, True) == [3, 1, 2, 6], "no pruning where all fit"
    assert offered(line, row, [-1] * 8, [2, 6], 2, True) == [3, 1]


def test_by_target_sorts_pairs_and_keeps_the_order_of_the_sources() -> None:
    source, target = np.array([5, 3, 9, 3, 1], np.int32), np.array([2, 0, 2, 3, 0], np.int32)
    starts, out = build_and_search.by_target(source, target, 5)
    assert starts.tolist() == [0, 2, 2, 4, 5, 5]
    assert out.tolist() == [3, 1, 5, 9, 3]
    assert [part.tolist() for part in build_and_search.by_target(source[:0], target[:0], 2)] == [[0, 0, 0], []]


def attached(adjacency, known: dict[int, int]) -> tuple[list[list[int]], list[int]]:
    """Lists and parents after `attach` from the keys `known` with their parents."""
    adjacency, total = adjacency.copy(), len(adjacency)
    parent, queue = np.full(total, -1, np.int32), np.empty(total, np.int32)
    for i, (x, above) in enumerate(known.items()):
        parent[x], queue[i] = above, x
    build_and_search.attach(adjacency, parent, queue, len(known))
    return [[v for v in row if v >= 0] for row in adjacency.tolist()], parent.tolist()


def test_attach_follows_edges_breadth_first() -> None:
    lists, parent = attached(ids([1, 2], [3], [3], [0]), {0: 0})
    assert parent == [0, 0, 0, 1]
    assert lists == [[1, 2], [3], [3], [0]]


def test_attach_gives_a_lone_key_an_edge_from_its_own_neighbour() -> None:
    lists, parent = attached(ids([1, 2], [0, -1], [], [1, 0]), {0: 0})
    assert parent == [0, 0, 0, 1], "1 has room"
    assert lists == [[1, 2], [0, 3], [], [1, 0]]
    lists, parent = attached(ids([1, 2], [2, 0], [0], [1]), {0: 0})
    assert parent == [0, 0, 0, 1], "the last edge that the tree does not use makes room"
    assert lists == [[1, 2], [2, 3], [0], [1]]


def test_attach_never_takes_an_edge_of_the_tree() -> None:
    lists, parent = attached(ids([1, 2], [0, 2], [1, 0], [0], [0]), {0: 0})
    assert parent[:3] == [0, 0, 0]
    assert lists[0] == [1, 2], "0 is full of tree edges"
    assert 3 in lists[parent[3]]
    assert 4 in lists[parent[4]]
    well_formed(ids(*lists), np.array(parent), 0)


def test_attach_finds_room_below_when_all_it_may_follow_are_full() -> None:
    """What is handed over need not be a leaf: here 0 alone, whose two edges are the tree's."""
    lists, parent = attached(ids([1, 2], [3, 0], [0, 1], [0, 1], [0]), {0: 0})
    well_formed(ids(*lists), np.array(parent), 0)
    adjacency = ids([1, 2], [], [], [])
    parents, queue = np.array([0, 0, 0, -1], np.int32), np.full(4, 99, np.int32)
    queue[0] = 0
    build_and_search.attach(adjacency, parents, queue, 1)
    well_formed(adjacency, parents, 0)


# -- search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",  # the search is compiled for each
    [
        torch.float32,
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float64)),
    ],
)
def test_a_beam_of_all_keys_finds_the_exact_best_in_order(dtype: torch.dtype) -> None:
    keys, queries = exact((2, 2, 203, D)).to(dtype), exact((2, 2, 3, 203, D), 1).to(dtype)
    cache = filled(RetrievalAttention(beam=200), keys, queries, sink=3)
    assert not cache.selector.stored_keys().is_contiguous()
    query = queries[:, :, :, 7]
    selection = cache.select(query, 40)
    scores = (query.double() @ keys[:, :, 3:].double().mT).flatten(1, 2)  # [B,Hs,N]
    assert torch.equal(scores.gather(2, selection.rows), scores.topk(40).values)
    assert all(len(set(row)) == 40 for row in selection.rows.flatten(0, 1).tolist())
    assert selection.scanned.tolist() == [[200] * 6] * 2
    size = keys.element_size()
    assert selection.scan_bytes.tolist() == [[3 * (200 * D * size + 200 * 32 * 4)] * 2] * 2


def test_stored_keys_may_lie_anyhow() -> None:
    keys = exact((2, 3, 100, D))
    cache = filled(RetrievalAttention(beam=30), keys)
    query = exact((2, 3, 1, D), 5)
    expected = cache.select(query, 10)
    apart = torch.full((2, 3 * 100 * D + 1), torch.nan)
    apart[:, 1:] = keys.flatten(1)
    views = {
        "tokens first": keys.transpose(1, 2).contiguous().transpose(1, 2),
        "sizes first": keys.mT.contiguous().mT,
        "shifted": apart.as_strided(keys.shape, (3 * 100 * D + 1, 100 * D, D, 1), 1),
        "a window": torch.nn.functional.pad(keys, (0, 0, 5, 9), value=torch.nan)[:, :, 5:-9],
        "some heads": torch.cat([keys * torch.nan, keys, keys * torch.nan], 1)[:, 3:6],
    }
    for name, view in views.items():
        assert torch.equal(view, keys)
        assert not view.is_contiguous()
        cache.selector.stored = view
        found = cache.selector.select(query, cache.search.step(counted=True), 10)
        for part in ("rows", "scanned", "scan_bytes"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), (name, part)


def test_a_strided_query_gets_what_a_contiguous_one_gets() -> None:
    keys, queries = exact((2, 2, 90, D)), exact((2, 2, 3, 90, D), 3)
    cache = filled(RetrievalAttention(beam=20), keys, queries)
    query = queries[:, :, :, 17]
    assert not query.is_contiguous()
    assert torch.equal(cache.select(query, 9).rows, cache.select(query.contiguous(), 9).rows)


@pytest.mark.parametrize("beam", [1, 7, 40])
def test_scanned_is_the_number_of_distinct_keys_that_a_plain_best_first_search_scores(beam: int) -> None:
    keys, queries = exact((2, 2, 300, D)), exact((2, 2, 2, 300, D), 1)
    selector = RetrievalAttention(beam, degree=6)
    selection = filled(selector, keys, queries).select(queries[:, :, :, 9], 5)
    read = torch.zeros(2, 4, dtype=torch.int64)
    for i, (adjacency, _, entry) in enumerate(graphs(selector)):
        b, s = divmod(i, 4)
        found = walk(keys[b, s // 2].tolist(), adjacency, entry, queries[b, s // 2, s % 2, 9].tolist(), max(beam, 5))
        assert selection.rows[b, s].tolist() == found[0][:5]
        assert int(selection.scanned[b, s]) == found[1] < 300
        read[b, s] = found[1] * D * 4 + found[2] * 6 * 4
    assert torch.equal(selection.scan_bytes, read.view(2, 2, 2).sum(-1))


def test_searches_with_a_bias_rank_by_distance() -> None:
    points = exact((200, D)).numpy()
    adjacency = np.stack([np.roll(np.arange(200, dtype=np.int32), -i)[1:] for i in range(200)])  # all linked to all
    found, score = build_and_search.search_queries(points, roargraph.bias_of(points), adjacency, points[:50], 3, 20, 4)
    far = np.square(points[:50, None] - points[None]).sum(-1)
    assert np.array_equal(np.take_along_axis(far, found, 1), np.sort(far, 1)[:, :20])
    assert np.array_equal(score, np.square(points[:50]).sum(1)[:, None] / 2 - np.sort(far, 1)[:, :20] / 2)
    few, score = build_and_search.search_queries(
        points[:3], np.empty(0, np.float32), ids([1], [], []), points[:1], 0, 4, 4
    )
    assert sorted(few[0, :2].tolist()) == [0, 1]
    assert few[0, 2:].tolist() == [-1, -1]
    assert np.isneginf(score[0, 2:]).all()


def test_the_beam_is_a_knob_of_a_built_selector_and_at_least_the_budget() -> None:
    layer = synthetic(2048, sinks=0, size=32).layer(0)
    keys, queries = layer.keys[None], layer.query[None]
    selector = RetrievalAttention()
    cache, query = filled(selector, keys, queries), queries[:, :, :, -1]
    assert selector.knob == "beam"
    scanned = []
    for beam in (1, 50, 200, 800):
        selector.beam = beam
        scanned.append(int(cache.select(query, 50).scanned))
    assert scanned[0] == scanned[1] < scanned[2] < scanned[3]
    assert "beam=800" in repr(selector)


# -- the graph as a graph ---------------------------------------------------------------------------------------------


def shapes() -> dict[str, Tensor]:
    """Keys `[1,1,N,D]` that are awkward for a graph."""
    draw = torch.Generator().manual_seed(4)
    normal = torch.randn(300, D, generator=draw)
    line = torch.arange(300.0)[:, None] * normal[:1]
    far = torch.cat([normal[:150], 0.01 * normal[150:] + 50])  # no key links both clusters
    kinds = {"normal": normal, "equal": normal[:1].expand(300, -1), "line": line, "far": far}
    kinds |= {"pairs": normal[:150].repeat(2, 1), "zero": torch.zeros(300, D), "few values": normal.sign()}
    return {name: rows.clone()[None, None] for name, rows in kinds.items()}


DEGREES = pytest.mark.parametrize("degree", [2, 3, 32])
KINDS = pytest.mark.parametrize("kind", list(shapes()))


@KINDS
@DEGREES
def test_every_key_is_reachable_after_a_build(kind: str, degree: int) -> None:
    keys = shapes()[kind]
    for metric in ("l2", "query"):
        selector = RetrievalAttention(1, 20, degree, build_beam=8, metric=metric)
        cache = filled(selector, keys)
        sound(selector)
        selector.beam = 300
        assert sorted(cache.select(keys[:, :, :1], 300).rows.flatten().tolist()) == list(range(300))


@KINDS
@DEGREES
@pytest.mark.parametrize(
    ("step", "guides"),
    [(1, 10), (150, 0), *(pytest.param(*given, marks=pytest.mark.slow) for given in ((150, 10), (1, 0)))],
)
def test_every_key_is_reachable_after_inserts(kind: str, degree: int, step: int, guides: int) -> None:
    """The last 50 row by row and the last 150 all at once, where no guide is kept too."""
    keys, first = shapes()[kind], 250 if step == 1 else 150
    selector = RetrievalAttention(1, 20, degree, build_beam=8, guides=guides)
    cache = filled(selector, keys[:, :, :first])
    more(cache, keys[:, :, first:], step)
    sound(selector)
    selector.beam = 300
    assert sorted(cache.select(keys[:, :, :1], 300).rows.flatten().tolist()) == list(range(300))


@pytest.mark.filterwarnings(KEEP)
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_a_far_cluster_sealed_later_is_reachable(share: float) -> None:
    """Each new key's nearest are new: no edge from an old key to them is asked for."""
    draw = torch.Generator().manual_seed(0)
    old, new = torch.randn(1, 1, 300, D, generator=draw), 50 + 0.01 * torch.randn(1, 1, 200, D, generator=draw)
    selector = RetrievalAttention(share=share, guides=0)
    cache = filled(selector, old)
    more(cache, new, 200)
    sound(selector)
    assert float((selector.adjacency.data[0, 0, 300:] >= 300).sum(-1).double().mean()) > 2, "linked to each other"
    assert bool((cache.select(new[:, :, :1], 10).rows >= 300).all())


def test_batches_of_inserts_are_linked_to_each_other() -> None:
    """More rows than one batch, in one seal."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 1, 200 + roargraph.BATCH + 100, 8, generator=draw)
    selector = RetrievalAttention(20, 10, 8, build_beam=16, guides=20)
    cache = filled(selector, keys[:, :, :200])
    more(cache, keys[:, :, 200:], 2 * roargraph.BATCH)
    sound(selector)
    adjacency = selector.adjacency.data[0, 0]
    last = 200 + roargraph.BATCH
    assert bool((adjacency[last:] >= last).any()), "within a batch"
    assert bool((adjacency[200:last] >= last).any()), "and from one to the next"


def test_the_guides_lists_stay_exact_and_decode_queries_take_what_is_free() -> None:
    keys, queries = exact((1, 1, 240, D)), exact((1, 1, 1, 240, D), 1)
    selector = RetrievalAttention(neighbours=10, guides=130, build_beam=300)  # searches that place keys find all
    cache = filled(selector, keys[:, :, :100], queries[:, :, :, :100])
    assert selector.guide.rows == 100
    more(cache, keys[:, :, 100:], 20, queries[:, :, :, 100:])
    assert torch.equal(selector.guide.data[0, 0], queries[0, 0, 0, :130])
    best = (queries[0, 0, 0, :130] @ keys[0, 0].T).topk(10).values
    assert torch.equal(selector.scores.data[0, 0], best)
    listed = selector.lists.data[0, 0].long()
    assert torch.equal((queries[0, 0, 0, :130, None] * keys[0, 0][listed]).sum(-1), best)
    few = RetrievalAttention(guides=7)
    filled(few, keys, queries)
    assert torch.equal(few.guide.data[0, 0], queries[0, 0, 0, torch.linspace(0, 239, 7).long()])


def states(selector: RetrievalAttention) -> dict[str, Tensor]:
    return {name: state.data.clone() for name, state in selector.buffers()}


def test_the_same_rows_build_the_same_graph_whatever_the_threads() -> None:
    queries, keys, _ = attention(1, 2, 2, 700, D)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 1, 2):
            torch.set_num_threads(count)
            selector = RetrievalAttention(20, guides=50, metric="query")
            cache = filled(selector, keys[:, :, :500], queries[:, :, :, :500])
            more(cache, keys[:, :, 500:], 50, queries[:, :, :, 500:])
            selection = cache.select(queries[:, :, :, 3], 20)
            found.append(states(selector) | {"rows": selection.rows, "scanned": selection.scanned})
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


# -- recall -----------------------------------------------------------------------------------------------------------

N = 8192


@pytest.fixture(scope="module")
def layer() -> tuple[Tensor, Tensor, Tensor]:
    """Keys `[1,1,N,D]`, their queries `[1,1,1,N,D]` and 128 later ones `[1,1,128,D]`, which no index has seen."""
    made = synthetic(N + 128, sinks=0).layer(0)
    keys, queries = made.keys[None], made.query[None]
    return keys[:, :, :N], queries[:, :, :, :N], queries[:, :, 0, N:].contiguous()


def measure(cache: KVCache, asked: Tensor, keys: Tensor, knob: int, since: int = 0) -> tuple[float, float]:
    """Recall at 100, of the rows from `since` on, and the share of keys scanned."""
    setattr(cache.selector, cache.selector.knob, knob)
    found: Selection = cache.select(asked, 100)
    truth = (asked @ keys.mT).flatten(1, 2).topk(100).indices
    hit = (truth[..., None] == found.rows[..., None, :]).any(-1)
    return float(hit[truth >= since].double().mean()), float(found.scanned.double().mean()) / keys.shape[2]


def test_queries_guide_the_graph_past_hnsw(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """Measured on seeds 0 to 2: HNSW 0.86 to 0.88 at 38 to 39 % scanned; the graph 0.95 at 36 %, with a quarter of the
    queries 0.94 at 36 %, by the queries' metric 0.96 at 32 to 33 %."""
    keys, queries, asked = layer
    rival = KVCache(HNSW(), sink=0, window=0)
    rival.append(keys, keys)
    recall, share = measure(rival, asked, keys, 400)
    assert recall < 0.89
    found = {}
    for name, beam, selector in (
        ("all", 250, RetrievalAttention()),
        ("quarter", 300, RetrievalAttention(share=0.25)),
        ("query", 200, RetrievalAttention(metric="query")),
    ):
        found[name], scanned = measure(filled(selector, keys, queries), asked, keys, beam)
        assert scanned < share, name
    assert found["all"] > recall + 0.06
    assert found["quarter"] > recall + 0.05
    assert found["query"] > recall + 0.07


@pytest.mark.slow
def test_a_grown_graph_is_as_good_as_a_fresh_one(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """1,024 of 8,192 rows in fours and 200 of 3,000 one by one; measured on seeds 0 to 2 with beam 300, batches of 256:
    recall within 0.005, on the new rows 0.03 better, scanned 1.03 times; one by one within 0.003 and 1.03 times."""
    keys, queries, asked = layer
    for total, new, step, beam in ((N, 1024, 256, 300), (3000, 200, 1, 150)):
        first, rows = total - new, slice(total - new, total)
        fresh = filled(RetrievalAttention(), keys[:, :, :total], queries[:, :, :, :total])
        grown = filled(RetrievalAttention(), keys[:, :, :first], queries[:, :, :, :first])
        more(grown, keys[:, :, rows], step, queries[:, :, :, rows])
        sound(grown.selector)
        own = keys[:, :, :total]
        (recall, share), (expected, scanned) = (measure(one, asked, own, beam) for one in (grown, fresh))
        assert recall > expected - 0.02
        assert share < 1.1 * scanned
        late, early = (measure(one, asked, own, beam, first)[0] for one in (grown, fresh))
        assert late > early - 0.03


def test_keys_sealed_in_decoding_are_found() -> None:
    queries, keys, _ = attention(1, 2, 2, 400, D)
    cache = filled(RetrievalAttention(30), keys[:, :, :300], queries[:, :, :, :300])
    new = keys[:, :, 300:].clone()
    new[0, :, 40] = 10 * queries[0, :, 0, 5]  # the best of all for its query
    more(cache, new, 25, queries[:, :, :, 300:])
    assert cache.select(queries[:, :, :, 5], 3).rows[0, ::2, 0].tolist() == [340, 340]


# -- little or nothing to learn from ----------------------------------------------------------------------------------


def test_without_queries_the_keys_serve_and_it_says_so() -> None:
    keys = exact((2, 2, 50, D))
    selector = RetrievalAttention(60, share=0.0)
    cache = KVCache(selector, sink=0, window=0, seal=1)
    cache.append(keys, keys)
    with pytest.warns(UserWarning, match=r"in 4 of 4 heads: the keys serve as queries"):
        cache.seal()
    assert selector.adjacency.data.shape[1] == 2, "one graph per KV head"
    query = exact((2, 2, 3, D), 1)
    scores = (query @ keys.mT).flatten(1, 2)
    assert torch.equal(scores.gather(2, cache.select(query, 50).rows), scores.topk(50).values)
    selector.beam = 5
    found = cache.select(query, 5)
    for i, (adjacency, _, entry) in enumerate(graphs(selector)):
        b, h = divmod(i, 2)
        for g in range(3):
            best, scanned, _ = walk(keys[b, h].tolist(), adjacency, entry, query[b, h, g].tolist(), 5)
            assert found.rows[b, h * 3 + g].tolist() == best, "a group searches its KV head's graph"
            assert int(found.scanned[b, h * 3 + g]) == scanned
    selector.beam = 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.append(keys, keys)
        cache.seal()
    sound(selector)
    assert int(cache.select(query, 100).attended.min()) == 100


def test_a_prompt_too_short_for_a_sampled_query_warns_and_grows() -> None:
    keys = exact((1, 1, 40, D))
    selector = RetrievalAttention(50, share=0.1)
    cache = KVCache(selector, sink=0, window=0, seal=1)
    cache.append(keys[:, :, :5], keys[:, :, :5], keys[:, :, None, :5])
    with pytest.warns(UserWarning, match=r"in 1 of 1 heads: the keys serve as queries"):
        cache.seal()
    more(cache, keys[:, :, 5:], 7)
    sound(selector)
    assert int(cache.select(keys[:, :, :1], 40).attended) == 40


@pytest.mark.parametrize("count", [1, 2, 3, 99])
@pytest.mark.parametrize("guides", [0, 1, 4096])
def test_fewer_keys_than_neighbours(count: int, guides: int) -> None:
    for metric in ("l2", "query"):
        keys = exact((1, 2, count + 3, D), count)
        selector = RetrievalAttention(guides=guides, metric=metric)
        cache = filled(selector, keys[:, :, :count], keys[:, :, None, :count].expand(-1, -1, 2, -1, -1))
        assert cache.select(keys[:, :, :2], 5).attended.tolist() == [[min(count, 5)] * 4]
        more(cache, keys[:, :, count:], 1, keys[:, :, None, count:].expand(-1, -1, 2, -1, -1))
        sound(selector)
        assert cache.select(keys[:, :, :2], 500).attended.tolist() == [[count + 3] * 4]


def test_queries_of_zero_and_equal_keys_are_no_obstacle() -> None:
    keys = exact((1, 1, 120, D))
    for metric in ("l2", "query"):
        for rows, queries in ((keys, torch.zeros(1, 1, 1, 120, D)), (keys[:, :, :1].expand(-1, -1, 120, -1), None)):
            selector = RetrievalAttention(120, 10, 4, metric=metric)
            cache = filled(selector, rows[:, :, :100], None if queries is None else queries[:, :, :, :100])
            more(cache, rows[:, :, 100:], 5, None if queries is None else queries[:, :, :, 100:])
            sound(selector)
            assert int(cache.select(keys[:, :, 3:4], 120).attended) == 120


def test_sequences_without_a_sealed_row_have_no_graph() -> None:
    keys = exact((2, 1, 60, D))
    at = torch.arange(60).repeat(2, 1)
    at[1, 3:] = -1
    cache = KVCache(RetrievalAttention(), sink=0, window=4, seal=1)
    cache.append(keys, keys, keys[:, :, None], at)
    selection = cache.select(keys[:, :, :1], 10)
    assert selection.attended.tolist() == [[10], [0]]
    assert selection.scanned.tolist() == [[56], [0]]
    assert selection.scan_bytes[1].tolist() == [0]
    before = KVCache(RetrievalAttention(), sink=0, window=4)
    before.append(keys[:, :, :4], keys[:, :, :4], keys[:, :, None, :4])
    assert before.select(keys[:, :, :1], 10).start.shape == (2, 1, 0)


def test_padding_is_linked_to_nothing() -> None:
    keys, queries = exact((2, 1, 100, D)), exact((2, 1, 1, 100, D), 1)
    at = torch.arange(100).repeat(2, 1)
    at[1, 30:60] = at[1, 75:] = -1
    at[1, 60:75] -= 30
    cache = KVCache(RetrievalAttention(200, 10, 4, guides=20), sink=0, window=0, seal=1)
    for part in (slice(0, 60), slice(60, 80), slice(80, 100)):
        cache.append(keys[:, :, part], keys[:, :, part], queries[:, :, :, part], at[:, part])
        cache.seal()
    cache.append(keys[:, :, :1], keys[:, :, :1], queries[:, :, :, :1])
    found = cache.select(queries[:, :, :, 3], 200)
    real = torch.tensor([*range(30), *range(60, 75), 100])
    assert found.rows[0, 0].sort().values.tolist() == list(range(101))
    assert sorted(row for row in found.rows[1, 0].tolist() if row >= 0) == real.tolist()
    assert found.scanned.tolist() == [[101], [len(real)]]
    adjacency, parent, entry = list(graphs(cache.selector))[1]
    number = np.full(102, -1, np.int32)  # the last for -1
    number[real] = np.arange(len(real))
    assert bool((number[adjacency[real]] >= 0)[adjacency[real] >= 0].all())
    well_formed(number[adjacency[real]], number[parent[real]], int(number[entry]))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_products_beyond_float32_do_no_harm() -> None:
    """Infinite products, and NaN where infinities meet; faiss then names no key."""
    keys = torch.randn(1, 1, 150, D, generator=torch.Generator().manual_seed(0)) * 1e22
    cache = filled(RetrievalAttention(150, guides=20), keys[:, :, :100])
    more(cache, keys[:, :, 100:], 10)
    sound(cache.selector)
    assert int(cache.select(keys[:, :, :1], 10).attended) == 10


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_is_refused_at_the_caches_door(bad: float) -> None:
    keys = exact((1, 1, 30, D))
    broken = keys.clone()
    broken[0, 0, 17, 2] = bad
    selector = RetrievalAttention()
    cache = KVCache(selector, sink=0, window=0, seal=1)
    for one, asked, name in ((broken, keys, "keys"), (keys, broken, "queries")):
        with pytest.raises(ValueError, match=rf"{name} must be finite, got .* at \[b,h,...,d\] = \[0, 0, .*17, 2\]"):
            cache.append(one, keys, asked[:, :, None])
        assert cache.batch == 0
        assert not any(state.rows for _, state in selector.buffers())
    cache.append(keys, keys, keys[:, :, None])
    cache.seal()
    with pytest.raises(ValueError, match="keys must be finite"):
        cache.append(broken, keys, keys[:, :, None])
    assert selector.parent.rows == cache.lengths.item() == 30


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"beam": 0}, "beam is 1 or more, got 0"),
        ({"neighbours": 0}, "neighbours is 1 or more, got 0"),
        ({"neighbours": 999_999_999}, "neighbours is 65,536 or less .* got 999,999,999"),
        ({"degree": 65_537}, "degree is 65,536 or less .* got 65,537"),
        ({"pivots": 65_537}, "pivots is 65,536 or less"),
        ({"build_beam": 65_537}, "build_beam is 65,536 or less"),
        ({"pivots": 0}, "pivots is 1 or more, got 0"),
        ({"build_beam": -1}, "build_beam is 1 or more, got -1"),
        ({"degree": 1}, "degree is 2 or more, got 1"),
        ({"guides": -1}, "guides is 0 or more, got -1"),
        ({"share": -0.1}, "share is the share of the queries used, 0 to 1, got -0.1"),
        ({"share": 1.5}, "share is .* 0 to 1, got 1.5"),
        ({"share": float("nan")}, "share is .* got nan"),
        ({"metric": "cosine"}, "metric is one of l2, query, got 'cosine'"),
    ],
    ids=str,
)
def test_bad_arguments_get_a_sentence(given: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RetrievalAttention(**given)


def test_names_and_labels() -> None:
    assert SELECTORS["retrieval"] is RetrievalAttention
    made = make_selector("retrieval:beam=64,metric=query,share=0.25")
    assert repr(made) == (
        "retrieval:beam=64,neighbours=100,degree=32,pivots=4,build_beam=64,share=0.25,metric=query,guides=2048"
    )
    assert made.queries_share == 0.25


def test_without_faiss_or_numba_the_constructor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "faiss", None)
        with pytest.raises(ImportError, match=r"pip install 'sparseattn\[faiss\]'"):
            RetrievalAttention()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        for name in ("build_and_search", "roargraph"):
            patch.delitem(sys.modules, f"sparseattn.kernels.graph.{name}")
            patch.delattr(sparseattn.kernels.graph, name)
        with pytest.raises(ImportError, match=r"by numba.*pip install 'sparseattn\[numba,faiss\]'"):
            RetrievalAttention()
    RetrievalAttention()


def test_rows_on_another_device_are_refused_with_the_remedy() -> None:
    keys = torch.zeros(1, 1, 4, D, device="meta")
    cache = KVCache(RetrievalAttention(), sink=0, window=0, seal=1)
    with pytest.raises(ValueError, match=r"retrieval:.* on meta: .*KVCache\(..., sealed_device=.cpu.\)"):
        cache.append(keys, keys, keys[:, :, None])
    assert cache.batch == 0
    assert not any(state.rows for _, state in cache.selector.buffers())


# -- the paper's setting ----------------------------------------------------------------------------------------------


def test_the_papers_setting_decodes() -> None:
    queries, keys, values = attention(1, 1, 2, 1500, 32)
    cache = KVCache(**RetrievalAttention.paper(beam=150))
    assert (cache.sink, cache.window, cache.sealed_device) == (128, 512, torch.device("cpu"))
    assert repr(cache.selector).startswith("retrieval:beam=150,")
    cache.append(keys[:, :, :1490], values[:, :, :1490], queries[:, :, :, :1490])
    cache.seal()
    for t in range(1490, 1500):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        query = queries[:, :, :, t]
        expected = full(query, keys[:, :, : t + 1], values[:, :, : t + 1])
        assert cache.select(query, 100).attended.tolist() == [[100, 100]]
        few, most = (decode(query, cache, budget=budget) for budget in (100, 2000))
        assert cache.select(query, 2000).attended.tolist() == [[850, 850]], "every row"
        torch.testing.assert_close(most.double(), expected, rtol=1e-5, atol=1e-5)
        assert float((few - expected).norm() / expected.norm()) < 0.2


def test_groups_and_batches_have_graphs_of_their_own() -> None:
    queries, keys, _ = heads(2, 2, 3, 150, D)
    selector = RetrievalAttention(20, 10, 4)
    cache = filled(selector, keys, queries)
    assert selector.adjacency.data.shape == (2, 6, 150, 4)
    query = queries[:, :, :, -1]
    found = cache.select(query, 10)
    for b in range(2):
        for h in range(2):
            for g in range(3):
                place = (slice(b, b + 1), slice(h, h + 1))
                alone = filled(RetrievalAttention(20, 10, 4), keys[place], queries[place][:, :, g : g + 1])
                own = alone.select(query[place][:, :, g : g + 1], 10)
                assert torch.equal(own.rows[0, 0], found.rows[b, h * 3 + g])
                assert torch.equal(own.scanned[0, 0], found.scanned[b, h * 3 + g])


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(RetrievalAttention(), sink=4, window=8)
    with pytest.raises(ValueError, match="sealed_device"):
        cache.to("meta")
    keys, queries = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 3, 100, 16)
    cache.append(keys, keys, queries)
    with pytest.raises(ValueError, match="3 query heads per KV head, got a query of 2"):
        cache.select(queries[:, :, :2, 0], 10)
    with pytest.raises(ValueError, match="query must be finite"):
        cache.select(queries[:, :, :, 0] * torch.nan, 10)


@pytest.mark.slow
def test_a_third_of_the_keys_inserted_is_as_good_as_built() -> None:
    """4,096 rows in seals of 1,024 behind 8,192: the issue's bar, at equal beam, where it is hardest to meet."""
    first, last = 8192, 12288
    layer = synthetic(last + 128, size=64, sinks=0).layer(0)
    keys, training = layer.keys[None, :, :last], layer.query[None, :, :, :last]
    measured = []
    for seals in (range(0), range(first, last, 1024)):
        cache = KVCache(RetrievalAttention(beam=300), sink=0, window=0, seal=1024)
        start = first if seals else last
        cache.append(keys[:, :, :start], keys[:, :, :start], training[:, :, :, :start])
        cache.seal()
        for low in seals:
            rows = slice(low, low + 1024)
            cache.append(keys[:, :, rows], keys[:, :, rows], training[:, :, :, rows])
            cache.seal()
        hits, scanned = [], 0
        new = [0, 0]
        for query in layer.query[0, 0, last:]:
            best = (keys[0, 0] @ query).topk(100).indices
            found = cache.selector.select(query[None, None, None], cache.search.step(counted=True), 100)
            hit = torch.isin(best, found.rows[0, 0])
            hits.append(float(hit.float().mean()))
            scanned += int(found.scanned)
            new = [new[0] + int((hit & (best >= first)).sum()), new[1] + int((best >= first).sum())]
        measured.append((sum(hits) / len(hits), scanned, new[0] / new[1]))
    fresh, grown = measured
    assert grown[0] > fresh[0] - 0.01, measured
    assert grown[1] < 1.1 * fresh[1], measured
    assert grown[2] > fresh[2] - 0.02, measured
