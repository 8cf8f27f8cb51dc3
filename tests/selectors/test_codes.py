"""Fier, SelfIndex and PQ beyond the laws: the levels and centroids of their papers, scores, what they cost."""

from __future__ import annotations

import pytest
import torch

from sparseattn import PQ, Exact, Fier, KVCache, LowBit, Selector, SelfIndex, evaluate, make_selector
from sparseattn.kernels import codebooks
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.traces.synthetic import synthetic
from tests.cases import attention, heads


def filled(selector: Selector, keys: torch.Tensor, at: torch.Tensor | None = None) -> KVCache:
    cache = KVCache(selector, sink=0, window=0, seal=32)
    cache.append(keys, keys, positions=at)
    cache.seal()
    return cache


def scores(cache: KVCache, query: torch.Tensor) -> torch.Tensor:
    selector = cache.selector
    return codebooks.logits(selector.tables(query), selector.codes.data, cache.search.step().valid)


def test_fier_rounds_every_channel_of_a_group_to_its_least_or_largest_number() -> None:
    _, keys, _ = heads(2, 2, 1, 96, 80, torch.float32)
    fier = Fier()
    filled(fier, keys)
    read = QuantizedKeys(fier.codes.data, fier.low.data, fier.step.data, 1).decoded().unflatten(2, (3, 32))
    grouped = keys.unflatten(2, (3, 32))
    low, high = grouped.amin(3, keepdim=True), grouped.amax(3, keepdim=True)
    expected = torch.where(grouped - low > high - grouped, high, low)
    near = (grouped - (low + high) / 2).abs() < 0.02 * (high - low)  # levels are of 16 bits, so the middle moves a bit
    assert bool((((read - expected).abs() < 0.02 * (high - low)) | near).all())
    assert float(near.float().mean()) < 0.1
    other = LowBit(1, 32)
    filled(other, keys)
    assert bool((fier.step.data > other.step.data).all()), "its levels are the ends, not the means of both sides"


def test_fier_reads_as_many_bytes_as_quest_and_lowbit_of_one_bit_as_many() -> None:
    query, keys, _ = attention(1, 2, 3, 320, 64)
    found = {
        spec: filled(make_selector(spec), keys.bfloat16()).select(query[:, :, :, -1].bfloat16(), 32)
        for spec in ("fier", "quest", "lowbit:bits=1,rows=32")
    }
    assert {tuple(one.scan_bytes.flatten().tolist()) for one in found.values()} == {(320 * 16, 320 * 16)}
    assert found["fier"].scanned.tolist() == [[320, 320]]
    assert found["fier"].span == 1
    assert Fier().unit == 32


@pytest.mark.parametrize(("subspaces", "centroids", "size"), [(6, 256, 2), (6, 16, 4), (5, 16, 3)])
def test_tables_give_the_products_with_the_keys_that_codes_stand_for(subspaces: int, centroids: int, size: int) -> None:
    draw = torch.Generator().manual_seed(subspaces)
    books = torch.randn(2, 3, subspaces, centroids, size, generator=draw)
    keys = torch.randn(2, 3, 50, subspaces * size, generator=draw)
    query = torch.randn(2, 3, 4, subspaces * size, generator=draw)
    names = codebooks.nearest(keys, books)
    cut = keys.unflatten(3, (subspaces, 1, size)).double()
    assert torch.equal(names.long(), (cut - books[:, :, None].double()).square().sum(-1).argmin(-1))
    named = names.long().transpose(2, 3)[..., None].expand(-1, -1, -1, -1, size)
    stands_for = books.gather(3, named).transpose(2, 3).flatten(3)  # [B,H,n,D]
    real = torch.rand(2, 50, generator=draw) < 0.8
    codes = codebooks.paired(names) if centroids == 16 else names
    assert codes.shape[3] == -(-subspaces * (centroids.bit_length() - 1) // 8)
    expected = (query @ stands_for.mT).masked_fill(~real[:, None, None], -torch.inf)
    torch.testing.assert_close(codebooks.logits(codebooks.tables(query, books), codes, real), expected)


@pytest.mark.parametrize("size", [32, 20])
def test_a_pattern_of_signs_stands_for_the_mean_of_the_prompts_keys_that_have_it(size: int) -> None:
    _, keys, _ = heads(1, 2, 1, 64, size, torch.bfloat16)
    keys[..., :4] = keys[..., :1]  # two patterns alone in the first four channels
    index = SelfIndex()
    filled(index, keys)
    wide = keys[0].float()
    centre = wide.median(1).values[:, None]
    up = (wide >= centre).unflatten(2, (-1, 4))
    for h in range(2):
        for s in range(size // 4):
            part, middle = wide[h, :, 4 * s : 4 * s + 4], centre[h, 0, 4 * s : 4 * s + 4]
            for p in range(16):
                signs = torch.tensor([bool(p >> bit & 1) for bit in range(4)])
                has = (up[h, :, s] == signs).all(1)
                away = (part - middle).abs().mean(0)
                mean = part[has].mean(0) if bool(has.any()) else middle + torch.where(signs, away, -away)
                torch.testing.assert_close(index.centroids.data[0, h, s, p].float(), mean, rtol=0.01, atol=1e-3)
    assert index.codes.data.shape == (1, 2, 64, -(-size // 8))


@pytest.mark.parametrize("make", [SelfIndex, PQ], ids=["selfindex", "pq"])
def test_codebooks_are_the_prompts_and_padding_has_no_part_in_them(make) -> None:
    queries, keys, _ = attention(2, 2, 3, 400, 32)
    one, both = make(), make()
    alone = filled(one, keys[:1, :, :300])
    padded = keys.clone()
    padded[0, :, 300:] = 1e3
    at = torch.arange(400).expand(2, -1).clone()
    at[0, 300:] = -1
    padded_cache = filled(both, padded, at)
    assert torch.equal(one.centroids.data, both.centroids.data[:1])
    mine = padded_cache.search.step().valid[0]
    asked = queries[:, :, :, -1]
    assert torch.equal(scores(alone, asked[:1]), scores(padded_cache, asked)[:1][..., mine])
    before = one.centroids.data.clone()
    alone.append(keys[:1, :, 300:], keys[:1, :, 300:])
    alone.seal()
    assert torch.equal(one.centroids.data, before)
    assert one.codes.rows == 400


def test_a_pq_of_fewer_keys_than_centroids_chooses_as_exact_does() -> None:
    query, keys, _ = heads(2, 2, 3, 256, 64, torch.bfloat16)
    query = query[:, :, :, -1]
    found, exact = (filled(one, keys).select(query, 20) for one in (PQ(), Exact("softmax")))
    assert torch.equal(found.rows.sort(-1).values, exact.rows.sort(-1).values)


def test_more_bits_recover_more_and_centroids_of_keys_more_than_those_of_signs() -> None:
    trace = synthetic(1024, heads=2, group=2, size=64)
    found = {
        name: evaluate(trace, selector, 64, last=8).mean("recovered")
        for name, selector in {
            "signs": SelfIndex(),
            "one": PQ(),
            "two": PQ(16),
            "four-bit": PQ(16, 4),
            "exact": Exact("softmax"),
        }.items()
    }
    assert found["signs"] < found["one"] < found["two"] <= found["exact"]
    assert found["signs"] < found["four-bit"] < found["two"]


def test_pq_learns_the_same_from_the_same_keys_whatever_the_threads() -> None:
    _, keys, _ = attention(1, 2, 1, 900, 32)
    books, threads = [], torch.get_num_threads()
    try:
        for count, selector in ((1, PQ(sample=500)), (2, PQ(sample=500)), (2, PQ(sample=500, seed=1))):
            torch.set_num_threads(count)
            filled(selector, keys)
            books.append(selector.centroids.data)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(books[0], books[1])
    assert not torch.equal(books[0], books[2])


@pytest.mark.parametrize(("selector", "row", "books"), [("selfindex", 8, 16), ("pq", 8, 256), ("pq:bits=4", 8, 16)])
def test_bytes_are_the_codes_of_every_row_and_the_codebooks_once(selector: str, row: int, books: int) -> None:
    query, keys, _ = attention(1, 2, 3, 320, 64)
    for dtype in (torch.float32, torch.bfloat16):
        found = filled(make_selector(selector), keys.to(dtype)).select(query[:, :, :, -1].to(dtype), 16)
        assert found.scan_bytes.tolist() == [[320 * row + books * 64 * 2] * 2]
        assert found.scanned.tolist() == [[320, 320]]


def test_what_pq_refuses() -> None:
    with pytest.raises(ValueError, match="bits is one of 4, 6, 8, got 3"):
        PQ(bits=3)
    with pytest.raises(ValueError, match="subspaces is 0 or more, got -1"):
        PQ(-1)
    _, keys, _ = heads(1, 1, 1, 64, 32, torch.float32)
    with pytest.raises(ValueError, match="a divisor of the head size, here of 32, got 5"):
        filled(PQ(5), keys)
