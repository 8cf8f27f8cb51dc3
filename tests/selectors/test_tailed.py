"""Estimated tails beyond the laws: what stands in for rows not read, what it costs, and RetroInfer's clusters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import (
    SAAP,
    KVCache,
    LowBit,
    Quest,
    RetroInfer,
    Selection,
    SparQ,
    Tailed,
    TwoStage,
    decode,
    evaluate,
)
from sparseattn.evaluation.step_measures import compare
from sparseattn.selectors.base import Rows
from sparseattn.selectors.clusters.retroinfer import clustered
from sparseattn.traces.synthetic import synthetic
from tests.cases import Heaviest, attention, drawn, heads

B, H, G, D = 2, 2, 3, 32


def filled(selector, rows: int = 300, batch: int = B, **zones: int) -> tuple[KVCache, Tensor]:
    """A cache through a prefill and several seals, and the newest query."""
    queries, keys, values = attention(batch, H, G, rows, D)
    cache = KVCache(selector, **({"sink": 0, "window": 0, "seal": 32, "check": True} | zones))
    cache.append(keys[:, :, :200], values[:, :, :200], queries[:, :, :, :200])
    cache.seal()
    for t in range(200, rows):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1], queries[:, :, :, t : t + 1])
        cache.seal()
    return cache, queries[:, :, :, -1]


def expected(cache: KVCache, query: Tensor, selection: Selection, member: Tensor, groups: int) -> Tensor:
    """Float64 attention to the rows read, to what is not sealed, and to `left` copies of each group's mean row."""
    keys, values = cache.keys.double(), cache.values.double()
    zone = cache.stored.sealed_keys.shape[2]
    one = torch.nn.functional.one_hot(member, groups).double()  # [B,H,N,P]
    count = one.sum(2)
    means = [one.mT @ rows[:, :, :zone] / count.clamp(min=1)[..., None] for rows in (keys, values)]
    means = [mean.to(torch.bfloat16).double() for mean in means]  # as they are kept
    read = selection.mask(zone).unflatten(1, (H, -1)).expand(-1, -1, G, -1).double()  # [B,H,G,N]
    left = count[:, :, None] - read @ one
    logits = query.double() @ keys.mT / D**0.5
    logits[..., :zone] = logits[..., :zone].masked_fill(read == 0, -torch.inf)
    more = query.double() @ means[0].mT / D**0.5 + left.log()
    return torch.cat([logits, more], -1).softmax(-1) @ torch.cat([values, means[1]], 2)


@pytest.mark.parametrize(
    ("selector", "rows"),
    [
        (Tailed(Quest(8)), 8),
        (Tailed(Quest(4, "each"), 16), 16),  # read in part
        (Tailed(LowBit(rows=16), 8), 8),
        (Tailed("window", 32), 32),
    ],
    ids=["pages", "blocks-each", "rows", "none"],
)
def test_a_groups_mean_stands_for_its_rows_not_read(selector: Tailed, rows: int) -> None:
    cache, query = filled(selector)
    zone = cache.stored.sealed_keys.shape[2]
    member = (torch.arange(zone) // rows).expand(B, H, -1)
    selection = cache.select(query, 24)
    wanted = expected(cache, query, selection, member, zone // rows)
    torch.testing.assert_close(decode(query, cache, 24).double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_buckets_of_several_seals_are_groups() -> None:
    saap = drawn(SAAP, probes=3)
    cache, query = filled(Tailed(saap))
    inner = cache.selector.inner
    assert inner.edges.rows > 1, "several segments"
    place = torch.arange(inner.places).expand(B, H, -1)
    member = inner.bucket_at(place)
    assert torch.equal(member, inner._stored())
    selection = cache.select(query, 37)  # cuts a bucket
    wanted = expected(cache, query, selection, member, inner.edges.data.shape[3] - 2)
    torch.testing.assert_close(decode(query, cache, 37).double(), wanted, rtol=1e-4, atol=1e-5)


def test_rows_that_move_take_their_group_along() -> None:
    cache, query = filled(Tailed(TwoStage(drawn(SAAP, probes=4), 4, rows=16), 16))
    member = cache.selector.member.data.long()
    assert not torch.equal(member, member.sort(-1).values), "rows moved"
    selection = cache.select(query, 24)
    wanted = expected(cache, query, selection, member, cache.selector.count.rows)
    torch.testing.assert_close(decode(query, cache, 24).double(), wanted, rtol=1e-4, atol=1e-5)


def test_dropped_rows_go_on_standing_in_when_their_memory_is_freed() -> None:
    """And rows sealed later are groups behind those that were."""
    queries, keys, values = heads(B, H, G, 300, D)
    cache, plain = (KVCache(Tailed(Heaviest(40), 8), sink=4, window=8, seal=32) for _ in range(2))
    for one in (cache, plain):
        one.append(keys[:, :, :200], values[:, :, :200], queries[:, :, :, :200])
        one.seal()
    assert cache.compact() > 0
    for t in range(200, 300):
        new = slice(t, t + 1)
        for one in (cache, plain):
            one.append(keys[:, :, new], values[:, :, new], queries[:, :, :, new])
        if t % 30 == 0:
            query = queries[:, :, :, t]
            torch.testing.assert_close(decode(query, cache, 24), decode(query, plain, 24))
    assert int(cache.selector.count.data.sum()) == B * H * (cache.selector.count.rows * 8)


def test_a_zone_is_the_heaviest_groups_and_its_cost_is_told() -> None:
    every, query = filled(Tailed(Quest(8)), batch=1)
    some, _ = filled(Tailed(Quest(8), zone=0.25), batch=1)
    zone = some.stored.sealed_keys.shape[2] // 8
    tails = []
    for cache in (every, some):
        selection = cache.select(query, 16)
        tails.append((cache.search.tail(query, selection), selection))
    (whole, _), (part, selection) = tails
    kept = -(-zone // 4)
    assert part.selection.attended.tolist() == [[kept] * H]
    assert whole.selection.attended.tolist() == [[zone - 2] * H]
    weight = (query @ whole.keys.mT / D**0.5).softmax(-1).masked_fill(selection.mask(8 * zone)[:, :, None, ::8], 0)
    best = (weight / weight.sum(-1, keepdim=True)).sum(2).topk(kept).indices.sort(-1).values  # pages are of one size
    assert torch.equal(part.selection.rows.sort(-1).values, best)
    extra = some.search.latest.scan_bytes - every.select(query, 16).scan_bytes
    assert extra.tolist() == [[(zone - kept) * (2 * D + 4)] * H]
    bytes_read = compare(query, every, every.select(query, 16), D**-0.5)["bytes_share"]
    plain, _ = filled(Quest(8), batch=1)
    without = compare(query, plain, plain.select(query, 16), D**-0.5)["bytes_share"]
    rows = plain.keys.shape[2]
    more = (zone - 2) * (8 * D + 4) / (rows * 8 * D)  # float32: a row is 8 D bytes
    torch.testing.assert_close(bytes_read - without, torch.full_like(without, more))


@pytest.mark.parametrize("inner", ["quest:page=8", "lowbit:rows=16", "exact:group=softmax"])
def test_a_tail_lessens_the_error_where_rows_beside_each_other_are_alike(inner: str) -> None:
    draw = torch.Generator().manual_seed(0)
    alike, own = torch.randn(2, 1, H, 32, 1, D, generator=draw), torch.randn(2, 1, H, 32, 16, D, generator=draw)
    keys, values = (alike + 0.3 * own).flatten(3, 4)
    query = torch.randn(1, H, G, D, generator=draw)
    full = (query @ keys.mT / D**0.5).softmax(-1) @ values
    errors = []
    for method in (inner, f"tailed:inner=[{inner}],rows=16"):
        cache = KVCache(method, sink=0, window=0, seal=64)
        cache.append(keys, values)
        errors.append(float((decode(query, cache, 32) - full).norm()))
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inner": SparQ(8)}, "have a tail that stands for rows not read, .* mean=False"),
        ({"inner": "magicpig"}, "have a bias"),
        ({"inner": "quest", "rows": 8}, "at least the span of quest.*, 16, or 0, got 8"),
        ({"inner": "exact", "rows": 24}, "a power of two"),
        ({"inner": "saap", "rows": 16}, "its buckets, so rows is 0, got 16"),
        ({"zone": 0.0}, "above 0 and up to 1, got 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tailed(**arguments)


# -- RetroInfer ------------------------------------------------------------------------------------------------------


def test_clusters_are_runs_with_their_means_and_stay_in_their_segment() -> None:
    _, keys, values = attention(B, H, G, 256, D)
    selector = RetroInfer(8, segment=64)
    order = selector.append(Rows(keys, values, torch.arange(256).expand(B, -1)))
    count, start = selector.count.data, selector.start.data
    assert torch.equal(start[..., 1:], (start + count)[..., :-1])
    assert int(count.sum()) == B * H * 256
    assert torch.equal((order // 64).sort(-1).values, order // 64), "a segment's rows stay together"
    stored = [rows.gather(2, order[..., None].expand_as(rows)) for rows in (keys, values)]
    for b, h, p in ((0, 0, 0), (1, 1, 31), (1, 0, 12)):
        first, rows = int(start[b, h, p]), int(count[b, h, p])
        for held, given in zip((selector.keys, selector.values), stored, strict=True):
            mean = given[b, h, first : first + rows].mean(0) if rows else torch.zeros(D)
            torch.testing.assert_close(held.data[b, h, p].float(), mean, rtol=1e-2, atol=1e-2)


def test_k_means_begins_at_evenly_spaced_keys_of_any_length() -> None:
    """microsoft/RetrievalAttention, cache_hub/kmeans.py:235-247: seeds as they are, means of unit length after it."""
    _, keys, _ = attention(1, H, G, 160, D)
    for h in range(H):
        own = keys[0, h].double() * torch.linspace(0.2, 3.0, 160)[:, None]
        data = own - own.mean(0)
        centroids = torch.stack([data[int((c + 0.5) * 16)] for c in range(10)])
        for _ in range(3):
            label = (data @ centroids.T).argmax(1)
            for c in range(10):
                if bool((label == c).any()):
                    centroids[c] = torch.nn.functional.normalize(data[label == c].mean(0), dim=0)
        assert torch.equal(clustered(own[None].float(), 10, 4)[0], (data @ centroids.T).argmax(1))


def test_well_apart_keys_are_found_whatever_their_common_part() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(4, D, generator=draw), dim=-1)
    kind = torch.arange(64) % 4
    keys = centres[kind] * 5 + 0.1 * torch.randn(64, D, generator=draw) + 30.0
    found = clustered(keys[None], 16, 10)[0]
    same = found[:, None] == found[None]
    assert not bool((same & (kind[:, None] != kind[None])).any()), "no cluster mixes kinds"


def test_retroinfer_reads_the_best_clusters_and_estimates_the_next() -> None:
    cache, query = filled(RetroInfer(8, zone=0.25), batch=1)
    selector = cache.selector
    selection = cache.select(query, 40)
    clusters = selector.count.data > 0
    logits = (query @ selector.keys.data.float().mT / D**0.5).masked_fill(~clusters[:, :, None], -torch.inf)
    best = int(logits.softmax(-1).sum(2)[0, 0].argmax())
    first, rows = int(selector.start.data[0, 0, best]), int(selector.count.data[0, 0, best])
    assert bool(selection.mask(cache.stored.sealed_keys.shape[2])[0, 0, first : first + rows].all())
    assert selection.attended.tolist() == [[40] * H]
    tail = cache.search.tail(query, selection)
    taken = (clusters.sum(-1) / 4).ceil().long()
    assert torch.equal(tail.selection.attended, taken)
    part = (clusters.sum(-1) - taken) * 2 * D + 8 * clusters.sum(-1)
    assert torch.equal(selection.scan_bytes, part)


def test_estimating_more_clusters_lessens_the_error() -> None:
    trace = synthetic(1200, heads=2, group=2, size=32, clusters=12, rope=True)
    errors = [
        evaluate(trace, RetroInfer(zone=zone), 32, last=4, seal=64).mean("relative_error") for zone in (0.01, 0.3, 1.0)
    ]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": 12}, "power of two rows in the mean, got 12"),
        ({"segment": 100}, "multiple of a cluster's 16 rows, got 100"),
        ({"zone": 1.5}, "above 0 and up to 1, got 1.5"),
        ({"rounds": 0}, "rounds is 1 or more, got 0"),
    ],
)
def test_retroinfer_refuses_what_it_cannot_do(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RetroInfer(**arguments)
