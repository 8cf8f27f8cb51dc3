"""RocketKV beyond the laws: what its paper promises of both stages, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch

from sparseattn import Exact, KVCache, RocketKV, Selector, SnapKV, decode
from tests.cases import attention, heads


def filled(selector: Selector, keys: torch.Tensor, queries: torch.Tensor | None = None, **zones: int) -> KVCache:
    cache = KVCache(selector, **({"sink": 0, "window": 0, "seal": 32} | zones))
    cache.append(keys, keys, queries)
    cache.seal()
    return cache


@pytest.mark.parametrize(
    ("ratio", "page", "channels"),
    [(1, 1, 64), (1.5, 1, 42), (2, 2, 64), (4, 2, 32), (5, 3, 38), (8.5, 3, 22), (16, 4, 16), (400, 20, 3)],
)
def test_page_and_channels_follow_from_the_ratio(ratio: float, page: int, channels: int) -> None:
    assert (RocketKV(ratio).unit, RocketKV(ratio)._channels(64)) == (page, channels)
    assert (RocketKV(ratio, 8, 5).unit, RocketKV(ratio, 8, 5)._channels(64)) == (8, 5)
    assert RocketKV(1e9)._channels(64) == 1


def test_logits_are_those_of_the_largest_keys_of_a_page_by_the_groups_signs() -> None:
    queries, keys, _ = heads(2, 2, 3, 52, 24)
    query, rocket = queries[:, :, :, -1], RocketKV(16)
    filled(rocket, keys)
    got = rocket.logits(query)
    for b in range(2):
        for h in range(2):
            q = query[b, h]
            sign = torch.where(q.sum(0) > 0, 1.0, -1.0)
            largest = q.abs().mean(0).argsort(descending=True)[:6]
            page = (keys[b, h] * sign).unflatten(0, (13, 4)).amax(1)
            for g in range(3):
                temperature = (24 * q[g, largest].abs().sum() / q[g].abs().sum()).sqrt()
                expected = page[:, largest] @ (q[g] * sign)[largest] / temperature
                torch.testing.assert_close(got[b, h, g], expected)


def test_rows_are_those_of_the_best_pages_and_the_last_page_is_cut() -> None:
    queries, keys, _ = heads(1, 2, 3, 64, 16)
    query, rocket = queries[:, :, :, -1], RocketKV(16)
    cache = filled(rocket, keys)
    order = rocket.logits(query).softmax(-1).mean(2).argsort(dim=-1, descending=True)[0]
    found = cache.select(query, 10)
    for h in range(2):
        pages = [list(range(4 * page, 4 * page + 4)) for page in order[h, :3].tolist()]
        assert found.rows[0, h][found.rows[0, h] >= 0].tolist() == pages[0] + pages[1] + pages[2][:2]
    assert cache.select(query, 12).whole
    assert not found.whole
    with pytest.raises(ValueError, match="at least 4 rows, got 3"):
        rocket.select(query, query.new_zeros(1), 3)


@pytest.mark.parametrize("page", [3, 5])
def test_pages_of_any_size_are_found_and_read_whole(page: int) -> None:
    queries, keys, _ = heads(2, 2, 3, 20 * page, 16)
    query, rocket = queries[:, :, :, -1].contiguous(), RocketKV(16, page=page, channels=16, group="each")
    cache = filled(rocket, keys, seal=page)
    assert rocket.bounds.rows == 20
    found = cache.select(query, 4 * page)
    assert found.length.unique().tolist() == [page]
    signs = torch.where(query.sum(2, keepdim=True) > 0, 1.0, -1.0)  # [B,H,1,D]
    pages = (keys[:, :, None] * signs[..., None, :]).unflatten(3, (20, page)).amax(4)[:, :, 0]  # [B,H,20,D]
    order = ((query * signs) @ pages.mT).flatten(1, 2).argsort(dim=-1, descending=True)  # [B,H*G,20]
    assert torch.equal((found.start // page).sort(-1).values, order[..., :4].int().sort(-1).values)
    every = decode(query, cache, None)
    torch.testing.assert_close(every, decode(query, filled(Exact(), keys), None))


def test_without_compression_the_top_rows_are_read() -> None:
    queries, keys, _ = heads(2, 2, 3, 200, 32)
    query = queries[:, :, :, -1]
    found, exact = (filled(one, keys).select(query, 20) for one in (RocketKV(1.0), Exact("softmax")))
    assert torch.equal(found.rows.sort(-1).values, exact.rows.sort(-1).values)


def test_the_first_stage_holds_what_snapkv_would_and_pages_are_of_what_is_held() -> None:
    queries, keys, values = attention(2, 2, 3, 320, 16)
    zones = {"sink": 0, "window": 1, "seal": 4}
    caches = {}
    for name, method in (("rocket", RocketKV(16, prompt=66, kernel=15)), ("snap", SnapKV(32, 15))):
        cache = caches[name] = KVCache(method, **zones)
        cache.append(keys[:, :, :301], values[:, :, :301], queries[:, :, :, :301])
        cache.seal()
    rocket, query = caches["rocket"].selector, queries[:, :, :, 301]
    kept = caches["snap"].select(query, 64).mask(300)
    held = rocket.held()
    assert held.sum(-1).tolist() == [[64] * 2] * 2
    stored = caches["rocket"].stored.sealed_values
    for b in range(2):
        for h in range(2):
            expected = values[b, h, :300][kept[b, h]]
            assert torch.equal(stored[b, h, :300][held[b, h]], expected), "in their order"
            pages = keys[b, h, :300][kept[b, h]].unflatten(0, (16, 4))
            assert torch.equal(rocket.bounds.data[b, h, :, :16], torch.cat([pages.amin(1), pages.amax(1)], 1).T)
    for t in range(301, 320):
        caches["rocket"].append(keys[:, :, t : t + 1], values[:, :, t : t + 1], queries[:, :, :, t : t + 1])
        caches["rocket"].seal()
    assert rocket.held().sum(-1).tolist() == [[64 + 16] * 2] * 2, "rows of the answer are all held"


def test_what_is_dropped_can_be_freed() -> None:
    queries, keys, values = attention(1, 2, 2, 300, 16)
    cache = KVCache(RocketKV(4.0, prompt=64), sink=4, window=16)
    cache.append(keys, values, queries)
    query = queries[:, :, :, -1].contiguous()
    before = decode(query, cache, 32)
    assert cache.compact() == 280 - 64
    assert cache.selector.bounds.rows == 32
    assert torch.equal(decode(query, cache, 32), before)


def test_the_papers_setting_splits_the_compression_between_the_stages() -> None:
    setting = RocketKV.paper(32768, 512, answer=128)
    method, held = setting["selector"], int(32768 / 64**0.56)
    assert method.ratio == held / 512
    assert (method.prompt, method.unit, setting["seal"]) == (held - 128, 3, 3)
    assert RocketKV.paper(100, 200, 0)["selector"].ratio == 1
    # A long answer has room: twice its tokens are held at least, but no more than there are.
    assert RocketKV.paper(32768, 512, answer=3000)["selector"].prompt == 3000
    assert RocketKV.paper(4000, 512, answer=3000)["selector"].prompt == 1000


def test_a_step_reads_few_channels_of_one_bound() -> None:
    queries, keys, _ = heads(1, 2, 3, 320, 64)
    found = filled(RocketKV(16), keys.bfloat16()).select(queries[:, :, :, -1].bfloat16(), 16)
    assert found.scan_bytes.tolist() == [[80 * 16 * 2] * 2]
    assert found.scanned.tolist() == [[80] * 2]


def test_arguments_out_of_range_are_refused() -> None:
    for given, words in (
        ({"ratio": 0.5}, "ratio is 1 .* got 0.5"),
        ({"ratio": math.inf}, "got inf"),
        ({"page": -1}, "page is 0 or more, got -1"),
        ({"channels": -1}, "channels is 0 or more, got -1"),
        ({"prompt": 3}, "at least a page, 4 rows, got 3"),
        ({"kernel": 4}, "kernel is an odd number"),
        ({"group": "mean"}, "group is one of"),
    ):
        with pytest.raises(ValueError, match=words):
            RocketKV(**given)
