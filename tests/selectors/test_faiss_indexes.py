"""Flat, IVF and HNSW beyond the laws: what they find, what they say it cost, and their state outside of tensors."""

from __future__ import annotations

import sys

import pytest
import torch

from sparseattn import HNSW, IVF, SELECTORS, Exact, Flat, KVCache, Selection, Selector, decode, make_selector
from sparseattn.traces.synthetic import synthetic
from tests.cases import attention, heads

faiss = pytest.importorskip("faiss")
D = 32


def filled(selector: Selector, keys: torch.Tensor, at: torch.Tensor | None = None) -> KVCache:
    cache = KVCache(selector, sink=0, window=0, seal=16)
    cache.append(keys, keys, positions=at)
    cache.seal()
    return cache


def clustered(rows: int, heads: int = 2, group: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """The last query `[1,H,G,D]` and keys `[1,H,N,D]` of the synthetic generator."""
    queries, keys, _ = attention(1, heads, group, rows, D)
    return queries[:, :, :, -1].contiguous(), keys


def rows(selection: Selection) -> torch.Tensor:
    return selection.rows.sort(-1).values


def recall(selection: Selection, query: torch.Tensor, keys: torch.Tensor, count: int) -> float:
    truth = (query @ keys.mT).flatten(1, 2).topk(count).indices
    return float((selection.rows[..., None] == truth[..., None, :]).any(-2).double().mean())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("make", [Flat, lambda: IVF(8, 8), lambda: HNSW(128, 512)], ids=["flat", "ivf", "hnsw"])
def test_exhaustive_search_finds_exacts_rows_best_first(make, dtype: torch.dtype) -> None:
    queries, keys, _ = heads(2, 2, 3, 240, 64, dtype)
    query = queries[:, :, :, -1]
    found, exact = (filled(selector, keys).select(query, 17) for selector in (make(), Exact()))
    assert torch.equal(found.rows, exact.rows)
    assert found.start.shape == (2, 6, 17)


def test_flat_scores_every_key_once_for_a_group_and_keeps_none() -> None:
    query, keys = clustered(300)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        cache = filled(Flat(), keys.to(dtype))
        selection = cache.select(query.to(dtype), 10)
        assert selection.scanned.tolist() == [[300] * 6]
        assert selection.scan_bytes.tolist() == [[300 * D * size] * 2]
    assert [name for name, _ in cache.selector.buffers()] == []
    with pytest.raises(RuntimeError, match="use it in a KVCache"):
        cache.selector.clone().select(query, cache.search.step(), 10)


@pytest.mark.parametrize("probes", [1, 3, 7, 99])
def test_ivf_counts_the_keys_of_the_visited_lists_and_the_centroids(probes: int) -> None:
    query, keys = clustered(500)
    selector = IVF(16, probes)
    selection = filled(selector, keys).select(query, 500)
    counted = torch.zeros(1, 2, 3, dtype=torch.int64)
    for h in range(2):
        index = selector.table.indexes[0][h]
        centroids = torch.from_numpy(index.quantizer.reconstruct_n(0, index.nlist))
        torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(16), msg="spherical")
        home = (keys[0, h] @ centroids.T).argmax(-1)  # [N]
        visited = (query[0, h] @ centroids.T).topk(min(probes, 16)).indices  # [G,probes]
        counted[0, h] = (home == visited[..., None]).sum((1, 2))
    assert torch.equal(selection.attended, counted.flatten(1)), "unlimited, the visited lists are what is chosen"
    assert torch.equal(selection.scanned, counted.flatten(1) + 16)
    assert torch.equal(selection.scan_bytes, (counted + 16).sum(-1) * D * 4)


def test_ivf_takes_as_many_lists_as_the_keys_allow() -> None:
    def lists(selector: IVF, count: int) -> int:
        filled(selector, keys[:, :, :count])
        return selector.table.indexes[0][0].nlist

    _, keys = clustered(2048, heads=1)
    assert lists(IVF(), 2048) == 128, "4*sqrt(2048) = 181"
    assert lists(IVF(), 700) == 43
    assert lists(IVF(100), 2048) == 100
    assert lists(IVF(100), 700) == 43, "16 keys a list"
    assert lists(IVF(100), 3) == 1


def test_hnsw_counts_every_distance() -> None:
    """No link is pruned, so that an unlimited walk reaches each key and scores it once on the lowest level."""
    query, keys = clustered(100)
    one = HNSW(degree=512, build_beam=200)
    selection = filled(one, keys).select(query, 100)
    assert [index.hnsw.max_level for index in one.table.indexes[0]] == [0, 0]
    assert selection.scanned.tolist() == [[100] * 6]
    assert selection.scan_bytes.tolist() == [[3 * (100 * D * 4 + 100 * 2 * 512 * 4)] * 2]
    query, keys = clustered(300)
    two = HNSW(degree=150, build_beam=300)
    selection = filled(two, keys).select(query, 300)
    upper = [faiss.vector_to_array(index.hnsw.levels) > 1 for index in two.table.indexes[0]]
    assert [int(nodes.sum()) for nodes in upper] == [2, 2]
    assert set(selection.scanned.flatten().tolist()) <= {301, 302}, "the entry looks at its one neighbour, and moves"


@pytest.mark.parametrize(
    ("selector", "settings"), [(IVF(64, 1), (1, 4, 16, 64)), (HNSW(8, 40, 1), (20, 80, 320))], ids=["ivf", "hnsw"]
)
def test_the_knob_buys_recall_with_work_at_the_next_query(selector: Selector, settings: tuple[int, ...]) -> None:
    query, keys = clustered(2048, heads=4, group=4)
    cache = filled(selector, keys)
    points = []
    for setting in settings:
        assert selector.knob is not None
        setattr(selector, selector.knob, setting)
        selection = cache.select(query, 20)
        points.append((recall(selection, query, keys, 20), float(selection.scanned.double().mean())))
    assert points == sorted(points)
    assert points[0][0] < points[-1][0] - 0.05
    assert f"{selector.knob}={settings[-1]}" in repr(selector)


def test_every_knob_is_an_argument() -> None:
    assert [method.knob for method in (Flat, IVF, HNSW, Exact)] == [None, "probes", "beam", None]


@pytest.mark.parametrize("name", ["ivf", "hnsw"])
def test_the_same_keys_build_the_same_index(name: str) -> None:
    query, keys = clustered(2000)
    one, two = (filled(make_selector(name), keys).select(query, 30) for _ in range(2))
    assert torch.equal(one.rows, two.rows)
    assert torch.equal(one.scanned, two.scanned)


def test_ivfs_seed_is_that_of_its_lists() -> None:
    query, keys = clustered(1000)
    one, two = (filled(IVF(16, 2, seed), keys).select(query, 30) for seed in (0, 1))
    assert not torch.equal(one.scanned, two.scanned)


@pytest.mark.parametrize("make", [Flat, IVF, HNSW, lambda: IVF(4, 1)], ids=["flat", "ivf", "hnsw", "ivf-few"])
def test_keys_sealed_in_decoding_are_found(make) -> None:
    query, keys = clustered(200, heads=1, group=1)
    cache = filled(make(), keys[:, :, :150])
    new = keys[:, :, 150:].clone()
    new[0, 0, 20] = 10 * query[0, 0, 0]  # the best of all
    cache.append(new, new)
    selection = cache.select(query, 5)
    assert int(cache.sealed[0]) == 200
    assert int(selection.rows[0, 0, 0]) == 170


@pytest.mark.parametrize("name", ["ivf", "hnsw"])
def test_clones_and_beams_grow_apart(name: str) -> None:
    queries, keys, values = attention(2, 2, 3, 400, D)
    cache = KVCache(make_selector(name), sink=0, window=0, seal=16)
    cache.append(keys[:, :, :300], values[:, :, :300])
    query = queries[:, :, :, 300]
    cache.select(query, 40)
    twin = cache.clone()
    assert isinstance(twin.selector, (IVF, HNSW))
    before = cache.select(query, 40).rows
    nbytes = twin.selector.table.nbytes
    twin.append(10 * keys[:, :, 300:], values[:, :, 300:])
    twin.seal()
    assert twin.selector.table.nbytes >= nbytes + 2 * 2 * 100 * D * 4
    assert torch.equal(cache.select(query, 40).rows, before)

    cache.reorder(torch.tensor([1, 1, 0]))
    table = cache.selector.table.indexes
    assert len({int(index.this) for beam in table for index in beam}) == 6, "no index serves two beams"
    beams = torch.tensor([1, 1, 0])
    assert torch.equal(cache.select(query[beams], 40).rows, before[beams])
    new = torch.stack([keys[1, :, 300:], -keys[1, :, 300:], keys[0, :, 300:]])
    cache.append(new, new)
    rows = cache.select(query[beams], 40).rows
    for b, first in enumerate((1, 1, 0)):  # each beam as if it had been alone
        alone = KVCache(make_selector(name), sink=0, window=0, seal=16)
        for part in (keys[first : first + 1, :, :300], new[b : b + 1]):
            alone.append(part, part)
            alone.seal()
        assert torch.equal(alone.select(query[first : first + 1], 40).rows[0], rows[b])


@pytest.mark.parametrize("make", [Flat, lambda: IVF(4, 4), HNSW], ids=["flat", "ivf", "hnsw"])
def test_padding_is_never_chosen(make) -> None:
    """Every real key has a negative product with the query, a padding row (zeros) would win."""
    torch.manual_seed(0)
    keys = torch.rand(3, 1, 64, D) + 0.1
    query = -torch.ones(3, 1, 2, D)
    at = torch.arange(64).expand(3, -1).clone()
    at[1, :40] = at[2] = -1
    cache = filled(make(), keys, at)
    selection = cache.select(query, 50)
    assert selection.start.shape == (3, 2, 50)
    assert selection.attended.tolist() == [[50, 50], [24, 24], [0, 0]]
    assert int(selection.rows[1].max()) < 24
    assert selection.scanned[2].tolist() == [0, 0]
    assert selection.scan_bytes[2].tolist() == [0]
    cache.append(keys[:, :, :20], keys[:, :, :20])  # the third sequence's first keys
    late = cache.select(query, 50)
    assert late.attended.tolist() == [[50, 50], [44, 44], [20, 20]]
    assert sorted(late.rows[2, 0][late.rows[2, 0] >= 0].tolist()) == list(range(64, 84))


def test_nothing_is_printed_for_few_keys(capfd: pytest.CaptureFixture[str]) -> None:
    for count in (1, 2, 17, 100):
        queries, keys, _ = heads(1, 1, 2, count, D)
        for selector in (Flat(), IVF(), IVF(64, 1), HNSW(), HNSW(2, 1, 1)):
            selection = filled(selector, keys).select(queries[:, :, :, -1], 10)
            assert int(selection.attended.min()) >= 1, selector
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("make", [Flat, IVF, HNSW])
def test_without_faiss_the_constructor_says_what_to_install(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'sparseattn\[faiss\]'"):
        make()


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("ivf:lists=-1", "lists is 0 or more, got -1"),
        ("ivf:probes=0", "probes is 1 or more, got 0"),
        ("hnsw:degree=1", "degree is 2 or more, got 1"),
        ("hnsw:degree=999999999", "degree is 65,536 or less .* got 999,999,999"),
        ("hnsw:build_beam=65537", "build_beam is 65,536 or less"),
        ("hnsw:build_beam=0", "build_beam is 1 or more, got 0"),
        ("hnsw:beam=0", "beam is 1 or more, got 0"),
        ("flat:lists=3", "it takes none"),
    ],
)
def test_bad_arguments_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_selector(spec)


def test_names_and_labels() -> None:
    assert [SELECTORS[name] for name in ("flat", "ivf", "hnsw")] == [Flat, IVF, HNSW]
    assert repr(Flat()) == "flat"
    assert repr(make_selector("ivf:lists=512,probes=150")) == "ivf:lists=512,probes=150,seed=0"
    assert repr(HNSW()) == "hnsw:degree=32,build_beam=200,beam=128,metric=ip"


def test_faiss_and_torch_take_turns_with_all_threads() -> None:
    """Each brings an OpenMP runtime of its own; building with one thread leaves faiss its number for searches."""
    threads = faiss.omp_get_max_threads()
    queries, keys, values = attention(1, 2, 3, 3000, D)
    expected = None
    for selector in (Flat(), Exact()):
        cache = KVCache(selector, sink=0, window=8, seal=16)
        cache.append(keys, values)
        outs = []
        for t in range(5):
            torch.randn(400, 400) @ torch.randn(400, 400)
            outs.append(decode(queries[:, :, :, -1 - t], cache, 64))
        expected = expected or outs
        torch.testing.assert_close(outs, expected, rtol=1e-5, atol=1e-6)
    filled(HNSW(), keys[:, :, :500])
    assert faiss.omp_get_max_threads() == threads


def test_hnsw_by_distance_finds_what_inner_products_do_not() -> None:
    """One more dimension makes distances rank as inner products do; links then need not be pruned by products."""
    layer = synthetic(4096 + 64, size=32, sinks=0, seed=3).layer(0)
    recalls = []
    for metric in ("ip", "l2"):
        cache = KVCache(HNSW(16, 100, 200, metric), sink=0, window=0, seal=1)
        cache.append(layer.keys[None, :, :4000], layer.values[None, :, :4000])
        cache.seal()
        for row in range(4000, 4096):  # keys sealed later rank by the norm of the first ones
            one = slice(row, row + 1)
            cache.append(layer.keys[None, :, one], layer.values[None, :, one])
        cache.seal()
        hits = []
        for query in layer.query[:, :, 4096:].unbind(2):
            best = (query[0] @ layer.keys[0, :4096].T).topk(100).indices
            found = cache.selector.select(query[None], cache.search.step(), 100).rows
            hits.append(torch.isin(best, found).float().mean())
        recalls.append(float(torch.stack(hits).mean()))
    assert recalls[1] > max(recalls[0] + 0.05, 0.9), recalls
    with pytest.raises(ValueError, match="metric is ip or l2"):
        HNSW(metric="cosine")
