"""ParisKV beyond the laws: the turn, the codes, the collisions, what it costs."""

from __future__ import annotations

import math

import pytest
import torch

from sparseattn import KVCache, ParisKV, Selector, evaluate, make_selector
from sparseattn.selectors.tokens import pariskv
from sparseattn.selectors.tokens.pariskv import turned
from sparseattn.traces.synthetic import synthetic
from tests.cases import heads


def filled(selector: Selector, keys: torch.Tensor) -> KVCache:
    cache = KVCache(selector, sink=0, window=0, seal=32)
    cache.append(keys, keys)
    cache.seal()
    return cache


@pytest.mark.parametrize(("size", "filled_up"), [(64, 64), (80, 128), (5, 8)])
def test_the_turn_keeps_products_and_spreads_a_channel_over_all(size: int, filled_up: int) -> None:
    x, y = torch.randn(2, 50, size, generator=torch.Generator().manual_seed(1))
    a, b = turned(x, 7), turned(y, 7)
    assert a.shape == (50, filled_up)
    torch.testing.assert_close((a * b).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-4)
    one = turned(torch.eye(size)[:1], 7)
    torch.testing.assert_close(one.abs(), torch.full_like(one, filled_up**-0.5))
    assert not torch.equal(turned(x, 8), a)


def test_magnitudes_are_the_best_for_directions_of_eight_channels() -> None:
    """Lloyd's condition, on directions drawn evenly: a level is the mean of its cell, an edge lies between two."""
    edges, levels = pariskv._magnitudes(torch.device("cpu"))
    torch.testing.assert_close(edges, (levels[1:] + levels[:-1]) / 2)
    drawn = torch.randn(100_000, 8, generator=torch.Generator().manual_seed(0))
    size = torch.nn.functional.normalize(drawn, dim=1).abs().flatten()
    cell = torch.bucketize(size, edges)
    mean = torch.stack([size[cell == one].mean() for one in range(8)])
    torch.testing.assert_close(mean, levels, rtol=2e-3, atol=2e-4)


def test_a_code_has_the_keys_own_product_with_itself() -> None:
    _, keys, _ = heads(1, 2, 1, 64, 32)
    paris = ParisKV(seed=3)
    filled(paris, keys)
    for row in range(0, 64, 9):
        asked = turned(keys[:, :, row : row + 1], 3)
        found = paris.estimated(asked, torch.full((1, 2, 1), row))
        torch.testing.assert_close(found[..., 0, 0], keys[:, :, row].square().sum(-1), rtol=1e-2, atol=0)
    assert paris.estimated(asked, torch.full((1, 2, 1), -1)).isneginf().all()


def test_points_are_the_tiers_of_patterns_that_rows_fall_in() -> None:
    queries, keys, _ = heads(1, 1, 1, 96, 16)
    paris, asked = ParisKV(collide=0.5), turned(queries[:, :, :, -1], 0)
    cache = filled(paris, keys)
    cut, query = turned(keys, 0)[0, 0].unflatten(1, (2, 8)), asked[0, 0, 0].unflatten(0, (2, 8))
    points = torch.zeros(96)
    for s in range(2):
        names = [tuple(row.tolist()) for row in torch.where(cut[:, s] >= 0, 1.0, -1.0)]
        products = {name: float(torch.tensor(name) @ query[s]) for name in set(names)}
        before = 0
        for name in sorted(products, key=lambda one: -products[one]):
            rows = [row for row, own in enumerate(names) if own == name]
            points[rows] += sum(before < math.ceil(96 * 0.5 * tier) for tier in (0.05, 0.15, 0.3, 0.5, 0.75, 1.0))
            before += len(rows)
    assert paris.points(asked, cache.search.step().valid)[0, 0, 0].tolist() == points.tolist()


@pytest.mark.parametrize("group", ["sum", "softmax", "each"])
def test_candidates_have_the_most_points_and_the_best_codes_of_them_are_read(group: str) -> None:
    queries, keys, _ = heads(1, 2, 3, 400, 32)
    paris, query = ParisKV(0.3, 0.1, group=group), queries[:, :, :, -1]
    cache = filled(paris, keys)
    found = cache.select(query, 12)
    asked = turned(query.mean(2, keepdim=True) if group == "sum" else query, 0) / 32**0.5
    points = paris.points(asked, cache.search.step().valid)
    points = points.flatten(1, 2) if group == "each" else points.sum(2)  # [1,L,400]
    every = torch.arange(400).expand(1, points.shape[1], -1)
    logits = paris.estimated(asked, every)
    ranks = logits.softmax(-1).sum(2)
    for at in range(points.shape[1]):
        rows = sorted(range(400), key=lambda row: (points[0, at, row], row))[-40:]
        chances = ranks[0, at] if group != "softmax" else (logits[0, at][:, rows].softmax(-1)).sum(0)
        best = sorted(rows, key=lambda row: -float(chances[row if group != "softmax" else rows.index(row)]))[:12]
        assert sorted(found.rows[0, at].tolist()) == sorted(best)


def test_shares_follow_the_number_of_rows_and_cover_the_budget() -> None:
    paris = ParisKV()
    counts = torch.tensor([1, 4_999, 5_000, 10_000, 29_999, 30_000, 1 << 20])
    collide, candidates = paris._shares(counts)
    assert collide.tolist() == [0.5, 0.5, 0.3, 0.25, 0.25, 0.2, 0.2]
    assert candidates.tolist() == [0.5, 0.5, 0.25, 0.2, 0.2, 0.1, 0.1]
    for rows in (300, 7_000, 31_000):
        most = max(math.ceil(share * of) for share, of in paris._lengths(rows))
        assert most >= max(math.ceil(float(paris._shares(torch.tensor(n))[1]) * n) for n in range(1, rows + 1, 97))
    queries, keys, _ = heads(1, 1, 2, 200, 16)
    few = filled(ParisKV(candidates=0.01), keys).select(queries[:, :, :, -1], 60)
    assert few.attended.tolist() == [[60]]


def test_a_query_groups_mean_searches_for_all() -> None:
    queries, keys, _ = heads(1, 2, 4, 500, 32)
    query = queries[:, :, :, -1]
    found = filled(ParisKV(), keys).select(query, 30)
    alone = filled(ParisKV(group="each"), keys).select(query.mean(2, keepdim=True) * 5, 30)  # a length changes nothing
    assert torch.equal(found.rows.sort(-1).values, alone.rows.sort(-1).values)


@pytest.mark.parametrize(("spec", "lists"), [("pariskv:candidates=0.1", 1), ("pariskv:candidates=0.1,group=each", 3)])
def test_a_step_reads_names_counts_and_the_codes_of_candidates(spec: str, lists: int) -> None:
    queries, keys, _ = heads(1, 2, 3, 320, 64)
    found = filled(make_selector(spec), keys.bfloat16()).select(queries[:, :, :, -1].bfloat16(), 16)
    names, counts, codes = 320 * 8, 8 * 256 * 4, lists * 32 * (32 + 2 * 8)
    assert found.scan_bytes.tolist() == [[names + counts + codes] * 2]
    assert found.scanned.tolist() == [[320 + 32] * 2 * lists]


def test_more_candidates_find_more() -> None:
    trace = synthetic(1024, heads=2, group=2, size=64)
    few, many = (
        evaluate(trace, make_selector(f"pariskv:collide=0.2,candidates={share}"), 32, last=8).mean("recovered")
        for share in (0.04, 0.5)
    )
    assert few < many


def test_shares_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="candidates is a share of the rows, above 0 to 1, or None, got 0"):
        ParisKV(candidates=0)
    with pytest.raises(ValueError, match=r"or None, got 1\.5"):
        ParisKV(collide=1.5)
