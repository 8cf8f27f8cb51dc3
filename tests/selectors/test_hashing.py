"""Selectors that hash by random directions: what MagicPIG, KDEformer and Reformer promise beyond the laws."""

from __future__ import annotations

import math

import pytest
import torch

from sparseattn import KDEformer, KVCache, MagicPIG, Reformer, Selector, attend
from sparseattn.selectors.hashing.bins import Binned
from sparseattn.selectors.hashing.kdeformer import gray_rank
from tests.cases import heads

BINNED = pytest.mark.parametrize("make", [lambda rows: KDEformer(20, rows), lambda rows: Reformer(16, rows)])


class Apart(MagicPIG):
    """Each head has directions of its own, so that one step of many heads shows means over the draw of directions."""

    shared = False


def filled(selector: Selector, keys: torch.Tensor, values: torch.Tensor | None = None) -> KVCache:
    """All rows sealed at once, no sink and no window."""
    cache = KVCache(selector, sink=0, window=0, seal=1, check=True)
    cache.append(keys, keys if values is None else values)
    cache.seal()
    return cache


def test_codes_of_consecutive_gray_ranks_differ_in_one_bit() -> None:
    rank = gray_rank(torch.arange(1 << 12, dtype=torch.int32))
    code = rank.argsort()
    assert torch.equal(rank.sort().values, torch.arange(1 << 12, dtype=torch.int32)), "every code has a rank"
    changed = code[1:] ^ code[:-1]
    assert bool((changed > 0).all())
    assert bool((changed & (changed - 1) == 0).all())
    last = (1 << 30) - 1
    assert int(gray_rank(torch.tensor(last ^ (last >> 1), dtype=torch.int32))) == last


@BINNED
def test_one_order_of_all_rows_however_they_were_sealed(make) -> None:
    _, keys, values = heads(2, 2, 3, 300, 16)
    once = filled(make(16), keys).selector
    cache = KVCache(make(16), sink=0, window=0, seal=7)
    for first in range(0, 300, 5):
        cache.append(keys[:, :, first : first + 5], values[:, :, first : first + 5])
        cache.seal()
    often = cache.selector
    assert isinstance(once, Binned)
    assert isinstance(often, Binned)
    sealed = often.order.rows
    assert 290 < sealed < 300
    expected = once.hashed(keys[:, :, :sealed]).argsort(dim=2, stable=True)
    assert torch.equal(often.order.data.long(), expected)


@BINNED
def test_with_bins_of_the_budgets_size_a_query_reads_the_bin_it_falls_into(make) -> None:
    _, keys, _ = heads(1, 2, 1, 256, 16)
    selector = make(0)
    cache = filled(selector, keys)
    hashes = selector.hashed(keys)
    order = hashes.argsort(dim=2, stable=True)
    alone = (hashes[..., None] == hashes[:, :, None]).sum(-1) == 1  # keys that share their hash with none
    for t in range(256):
        rows = cache.select(keys[:, :, None, t], 32).rows
        for h in range(2):
            last = order[0, h][hashes[0, h, order[0, h]] == hashes[0, h, t]][-1]
            home = t if bool(alone[0, h, t]) else int(last)
            at = int((order[0, h] == home).nonzero())
            own = set(order[0, h, at // 32 * 32 : at // 32 * 32 + 32].tolist())
            if isinstance(selector, Reformer) or bool(alone[0, h, t]):
                assert set(rows[0, h].tolist()) == own
    assert isinstance(selector, Reformer) or bool(alone.any())


def test_a_larger_budget_adds_neighbours_on_both_sides_or_before() -> None:
    _, keys, _ = heads(1, 1, 1, 256, 16)
    for selector in (KDEformer(20, 16), Reformer(16, 16)):
        cache = filled(selector, keys)
        place = torch.empty(256, dtype=torch.int64)
        place[selector.order.data[0, 0].long()] = torch.arange(256)
        for t in range(0, 256, 7):
            query = keys[:, :, None, t]
            own, more = (place[cache.select(query, budget).rows[0, 0]].sort().values for budget in (16, 48))
            first = int(own[0])
            assert first % 16 == 0, "a whole bin"
            assert torch.equal(own, torch.arange(first, first + 16))
            if isinstance(selector, KDEformer):
                begin = min(max(first - 16, 0), 256 - 48)
            else:
                begin = first - 32
            assert torch.equal(more, torch.arange(begin, begin + 48).remainder(256).sort().values)


@pytest.mark.parametrize("seal", [1, 40])
def test_reformer_decodes_as_its_authors_do(seal: int) -> None:
    """Rows rank by position, those of the query's bucket before all others: google/trax, efficient_attention.py:2073,
    `kv_priorities = arange + seqlen * is_valid_target`, of which the largest are read."""
    queries, keys, values = heads(2, 2, 3, 200, 16)
    selector = Reformer(16)
    cache = KVCache(selector, sink=0, window=0, seal=seal, check=True)
    positions = torch.arange(200).expand(2, -1) - torch.tensor([[0], [30]])  # sequence 1 has 30 rows of padding
    cache.append(keys, values, positions=positions.clamp(min=-1))
    cache.seal()
    stored = cache.stored.sealed_keys.shape[2]
    for t in (5, 77, 199):
        query = queries[:, :, :, t].contiguous()
        found = cache.select(query, 25).mask(stored)
        real = cache.search.step().valid
        same = selector.hashed(cache.stored.sealed_keys)[:, :, None] == selector.hashed(query)[..., None]  # [B,H,G,N]
        rank = (torch.arange(stored) + stored * same).masked_fill(~real[:, None, None], -1)
        expected = torch.zeros_like(same).scatter_(3, rank.topk(25).indices, True)
        assert torch.equal(found, expected.flatten(1, 2))
        assert 0 < int((same & expected).sum()) < int(expected.sum()), "rows of the bucket, and others"


def test_directions_are_those_of_seed_layer_and_head() -> None:
    _, keys, _ = heads(1, 4, 1, 40, 16)
    before = torch.get_rng_state()

    def directions(selector: Selector, kv: int = 4) -> torch.Tensor:
        return filled(selector, keys[:, :kv]).selector.directions

    first = directions(KDEformer(30, seed=3))
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert torch.equal(first, directions(KDEformer(30, seed=3).clone()))
    assert torch.equal(first[:2], directions(KDEformer(30, seed=3), 2)), "heads do not depend on each other"
    others = [first[1:2], directions(KDEformer(30, seed=4), 1), directions(KDEformer(30, seed=3).for_layer(1), 1)]
    assert not any(torch.equal(first[:1], other) for other in others)
    used = KDEformer(30, seed=3)
    filled(used, keys)
    assert torch.equal(directions(used.for_layer(1), 1), others[2]), "a layer's own, whatever it was made from"

    everywhere = directions(MagicPIG(4, 10, seed=3))
    assert everywhere.shape == (16, 40)
    later = directions(MagicPIG(4, 10, seed=3).for_layer(1), 2)
    assert later.data_ptr() == everywhere.data_ptr(), "one set for heads and layers, held once"
    assert not torch.equal(everywhere, directions(MagicPIG(4, 10, seed=4)))


def two_or_more(angle: float, bits: int, tables: int) -> float:
    """That two vectors collide in two tables or more, as the tail of a binomial distribution."""
    one = (1 - angle / math.pi) ** bits
    return sum(math.comb(tables, n) * one**n * (1 - one) ** (tables - n) for n in range(2, tables + 1))


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (3, 8), (6, 40)])
def test_magicpig_draws_a_row_as_often_as_it_says(bits: int, tables: int) -> None:
    """The same keys in 2,000 heads, each with directions of its own: a row's frequency within 5 standard deviations."""
    many, angles = 2000, torch.tensor([0.2, 0.6, 1.0, 1.4])
    plane = torch.stack([angles.cos(), angles.sin(), 0 * angles, 0 * angles], -1) * torch.arange(1, 5)[:, None]
    keys = torch.cat([plane, -plane]).expand(1, many, -1, -1)  # their mean is zero
    query = torch.tensor([2.0, 0, 0, 0]).expand(1, many, 1, -1)
    selection = filled(Apart(bits, tables, floor=0.0), keys).select(query, None)
    frequency = selection.mask(8)[0].float().mean(0)
    assert selection.bias is not None
    for row, angle in enumerate([*angles.tolist(), *(math.pi - angles).tolist()]):
        expected = two_or_more(angle, bits, tables)
        assert abs(float(frequency[row]) - expected) < 5 * math.sqrt(expected * (1 - expected) / many) + 1e-9
        said = selection.bias[selection.rows == row]
        torch.testing.assert_close(said, torch.full_like(said, -math.log(expected)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("budget", [None, 6], ids=["all", "capped"])
def test_magicpigs_sums_are_those_of_full_attention_in_the_mean(budget: int | None) -> None:
    """Numerator and denominator of the softmax over the same keys in 4,000 heads: within 5 standard errors."""
    many, rows, size = 4000, 48, 8
    queries, keys, values = heads(1, 1, 1, rows, size)
    keys, values = (x.expand(-1, many, -1, -1) for x in (keys + 0.7, values))
    query = queries[:, :, :, -1].expand(-1, many, -1, -1)
    cache = filled(Apart(3, 6, floor=0.0), keys, values)
    selection = cache.select(query, budget)
    drawn = selection.attended.float().mean()
    assert drawn < 6 if budget else 6 < drawn < rows / 2
    out, lse = attend(query, cache.keys, cache.values, selection, cache.bounds)
    denominator = lse.flatten().exp()  # [many]
    estimates = torch.cat([denominator[:, None], out[0, :, 0] * denominator[:, None]], -1)
    weights = (query[0, 0] @ keys[0, 0].mT / size**0.5).exp()[0]
    exact = torch.cat([weights.sum()[None], weights @ values[0, 0]])
    error = estimates.std(0) / many**0.5
    assert bool((error < 0.1 * weights.sum()).all()), "tight enough to say something"
    assert bool(((estimates.mean(0) - exact).abs() < 5 * error).all())


@pytest.mark.parametrize("make", [lambda: MagicPIG(4, 20), lambda: KDEformer(20, 16), lambda: Reformer(16, 16)])
def test_what_is_read_to_choose_is_counted(make) -> None:
    """Signatures of every real row; or two searches and the places read. And directions, once for those who share."""
    queries, keys, values = heads(2, 4, 2, 300, 16)
    positions = torch.arange(300).repeat(2, 1)
    positions[1] -= 100
    cache = KVCache(make(), sink=0, window=0, seal=1)
    cache.append(keys, values, positions=positions.clamp(min=-1))
    cache.seal()
    selection = cache.select(queries[:, :, :, -1], 64)
    for b, real in enumerate((300, 200)):
        if isinstance(cache.selector, MagicPIG):
            scanned, read = real, 2 * 20 * real + 4 * 16 * 80 // 4
        else:
            scanned = 2 * math.ceil(math.log2(real + 1))
            read = 4 * 2 * (scanned + 64) + 4 * 16 * cache.selector.count
        assert selection.scanned[b].tolist() == [scanned] * 8
        assert selection.scan_bytes[b].tolist() == [read] * 4


def test_magicpigs_floor_bounds_a_weight() -> None:
    queries, keys, _ = heads(1, 2, 2, 400, 16)
    query = queries[:, :, :, -1]
    biases = []
    for floor in (0.0, 0.01):
        selection = filled(MagicPIG(6, 8, floor=floor), keys).select(query, None)
        assert selection.bias is not None
        biases.append(selection.bias[selection.rows >= 0])
    assert float(biases[0].max()) > math.log(100) > float(biases[1].max())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MagicPIG(bits=16), "bits is 15 or less"),
        (lambda: MagicPIG(tables=1), "tables is 2 or more, got 1"),
        (lambda: MagicPIG(floor=1.0), "floor is a probability below 1"),
        (lambda: KDEformer(31), "bits is 30 or less"),
        (lambda: KDEformer(rows=-1), "rows is 0 or more, got -1"),
        (lambda: Reformer(7), "buckets is an even number"),
    ],
)
def test_arguments_out_of_range(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
