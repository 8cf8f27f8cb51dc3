"""Laws of every row codec: how near it reads back, its bytes, and what a cache with it owes its rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from sparseattn import KMeans, KVCache, Selection, Selector, attend, decode, make_selector
from sparseattn.cache.all_rows import all_bounds, everything
from tests.cases import attention, drawn
from tests.codecs.cases import CODEC_CASES, CodecCase, context, new_rows, read_all, stored

B, H, G, D = 2, 2, 3, 32
ROWS = 208  # the last seal is four rows ago
EVERY = [pytest.param(case, id=case.spec) for case in CODEC_CASES]
# In the fast run of laws about caches each codec once, with its defaults or next to them.
FAST = (
    "kivi:bits=2,group=16", "rotatekv", "kvquant", "gear:group=32", "think", "lowrank:rank=8", "bfp", "zipcache",
    "ivfadc",
)  # fmt: skip
CACHED = [
    pytest.param(case, id=case.spec, marks=[] if case.spec in FAST else [pytest.mark.slow]) for case in CODEC_CASES
]
ORDERS = "kmeans"  # stores rows in an order of its own, and joins its pieces at later seals
SELECTORS = ("quest:page=16", pytest.param("lowbit", marks=pytest.mark.slow), ORDERS)


def chooser(spec: str) -> Selector:
    if spec != ORDERS:
        return make_selector(spec).for_layer(context(D))
    selector = drawn(KMeans, probes=4)
    selector.bind(context(D))
    return selector


def filled(case: CodecCase, selector: str, rows: int = ROWS, first: int = 150, **settings) -> KVCache:
    """A cache whose prompt of `first` rows is sealed, then one row after the other."""
    queries, keys, values = attention(B, H, G, rows, D)
    cache = KVCache(chooser(selector), sink=4, window=8, seal=64, rows=case.spec, **settings)
    cache.append(keys[:, :, :first], values[:, :, :first], queries[:, :, :, :first])
    cache.seal()
    for t in range(first, rows):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        decode(queries[:, :, :, t], cache, 40)
    return cache


@pytest.mark.parametrize("case", EVERY)
def test_rows_are_read_back_within_the_bound(case: CodecCase) -> None:
    codec = case.make()
    rows = new_rows(codec)
    kept = stored(codec, rows)
    for mine, theirs, most in zip(read_all(kept), (rows.keys, rows.values), case.bound(codec, rows, kept), strict=True):
        off = (mine.double() - theirs.double()).square().sum(-1)  # [B,H,n]
        assert bool((off <= most + 1e-9).all()), (off / most).amax()


@pytest.mark.parametrize("size", [32, 64, 80])
@pytest.mark.parametrize("case", EVERY)
def test_the_formula_gives_the_bytes_that_are_held(case: CodecCase, size: int) -> None:
    codec = case.make()
    seals = [new_rows(codec, rows=rows, size=size, seed=rows) for rows in (192, 64, 64)]
    kept = stored(codec, *seals)
    assert kept.nbytes == 4 * codec.nbytes(size, [192, 64, 64])
    assert codec.nbytes(size, [4096]) < 4096 * 4 * size, "and is less than the rows in 16 bits"
    every = Selection.pages(torch.arange(20).expand(2, 2, -1), 16)
    read = codec.bytes_read(kept, every)
    assert bool((read == codec.nbytes(size, [192, 64, 64])).all()), "a step that names all rows reads all"
    assert bool((codec.bytes_read(kept, Selection.pages(torch.zeros(2, 2, 1, dtype=torch.long), 16)) < read).all())


@pytest.mark.parametrize("case", EVERY)
def test_a_row_is_read_alone_as_among_others(case: CodecCase) -> None:
    """Per KV head or per query head, in any order; a later seal does not change it."""
    codec = case.make()
    first, second = new_rows(codec), new_rows(codec, seed=1)
    kept = stored(codec, first)
    keys, values = read_all(kept)
    kept.store(second, 64)
    row = torch.randint(64, (2, 6, 9), generator=torch.Generator().manual_seed(0))  # of 3 query heads a KV head
    for mine, whole in zip(codec.read(kept, row), (keys, values), strict=True):
        theirs = whole.repeat_interleave(3, 1).gather(2, row[..., None].expand(-1, -1, -1, 32))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_step_attends_to_the_rows_read_back(case: CodecCase, selector: str) -> None:
    """Through later seals, and rows that a selector orders anew; a copy and beams go on alike."""
    cache = filled(case, selector)
    assert int(cache.sealed[0]) > 150
    assert cache.nbytes["kv"] == cache.stored.nbytes["kv"]
    queries, _, _ = attention(B, H, G, ROWS, D)
    query = queries[:, :, :, -1]
    out = decode(query, cache, 40)
    assert cache.search.latest is not None
    right, _ = attend(query, *everything(cache)[:2], cache.search.latest, all_bounds(cache), impl="reference")
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    twin = cache.clone()
    twin.reorder(torch.tensor([1, 1, 0]))
    torch.testing.assert_close(decode(query[[1, 1, 0]], twin, 40), out[[1, 1, 0]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(decode(query, cache, 40), out)


@pytest.mark.parametrize("case", CACHED)
def test_what_is_kept_of_a_padded_batch_is_that_of_each_sequence(case: CodecCase) -> None:
    """Of sequences of other lengths, at the first step, with a budget for all rows; padding lies far from the keys."""
    queries, keys, values = attention(B, H, G, 300, D)
    keys[..., ::4] += 8
    lengths = (300, 204)
    at = torch.full((B, 300), -1)
    for b, length in enumerate(lengths):
        at[b, 300 - length :] = torch.arange(length)
    settings = {"sink": 4, "window": 8, "seal": 64, "rows": case.spec}
    both = KVCache(chooser("quest:page=16"), **settings)
    both.append(keys, values, queries, at)
    out = decode(queries[:, :, :, -1], both, None)
    for b, length in enumerate(lengths):
        own = KVCache(chooser("quest:page=16"), **settings)
        mine = slice(300 - length, 300)
        one = slice(b, b + 1)
        own.append(keys[one, :, mine], values[one, :, mine], queries[one, :, :, mine])
        torch.testing.assert_close(decode(queries[one, :, :, -1], own, None), out[one], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", CACHED)
def test_a_prompt_in_pieces_is_kept_as_one(case: CodecCase) -> None:
    queries, keys, values = attention(B, H, G, 200, D)
    found = []
    for edges in ((0, 200), (0, 3, 90, 200)):
        cache = KVCache(chooser("quest:page=16"), sink=4, window=8, seal=64, rows=case.spec)
        for a, b in itertools.pairwise(edges):
            cache.append(keys[:, :, a:b], values[:, :, a:b], queries[:, :, :, a:b])
        found.append(decode(queries[:, :, :, -1], cache, 48))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("case", CACHED)
def test_an_index_file_serves_a_cache_with_a_codec(case: CodecCase, tmp_path: Path) -> None:
    made = filled(case, ORDERS, 160, indexes=tmp_path)
    assert list(tmp_path.iterdir())
    again = filled(case, ORDERS, 160, indexes=tmp_path)
    query = attention(B, H, G, 160, D)[0][:, :, :, -1]
    torch.testing.assert_close(decode(query, again, 40), decode(query, made, 40), rtol=0, atol=0)
    assert again.nbytes["kv"] == made.nbytes["kv"]


@pytest.mark.parametrize("case", EVERY)
def test_texts_of_codecs(case: CodecCase) -> None:
    codec = case.make()
    for text in (str(codec), repr(codec)):
        assert repr(type(codec)(**codec.arguments())) == repr(CodecCase(text, case.bound).make()) == repr(codec)
