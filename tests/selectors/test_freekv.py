"""FreeKV: which heads keep their choice, against one head at a time, and what makes a kept choice void."""

from __future__ import annotations

import pytest
import torch

from sparseattn import Exact, FreeKV, KVCache, Quest, Rows, Selection, Selector, decode, evaluate, make_selector
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.abilities import Biases, ReadsKeys
from sparseattn.traces.synthetic import synthetic
from tests.cases import Heaviest, heads

B, H, G, N, D = 2, 2, 3, 96, 16


class Asked(Quest):
    """Quest that counts how often it is asked."""

    calls = 0

    def select(self, query, step, budget):
        self.calls += 1
        return super().select(query, step, budget)


def walk(steps: int) -> torch.Tensor:
    """`[B,H,G,T,D]`: queries that drift, each head at its own pace."""
    draw = torch.Generator().manual_seed(1)
    pace = torch.tensor([0.1, 0.6]).view(1, H, 1, 1, 1) * torch.tensor([1.0, 2.0]).view(B, 1, 1, 1, 1)
    first = torch.randn(B, H, G, 1, D, generator=draw)
    return first + (pace * torch.randn(B, H, G, steps, D, generator=draw)).cumsum(3)


def sets(rows: torch.Tensor) -> list[set[int]]:
    return [set(one[one >= 0].tolist()) for one in rows.flatten(0, -2)]


@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("group", ["sum", "each"])
def test_each_head_keeps_its_choice_as_if_it_were_alone(group: str, refresh: bool) -> None:
    """The rule, one sequence and head at a time over choices of Quest at every step."""
    steps, tau = 40, 0.9
    _, keys, values = heads(B, H, G, N + steps, D)
    queries = walk(steps)
    whole, plain = (
        KVCache(made, sink=2, window=4, seal=16) for made in (FreeKV(Quest(8, group), tau, refresh), Quest(8, group))
    )
    kept: dict[tuple[int, int], tuple[torch.Tensor, list[set[int]]]] = {}
    again = 0
    for t in range(steps):
        rows = slice(0, N) if t == 0 else slice(N + t - 1, N + t)
        for cache in (whole, plain):
            cache.append(keys[:, :, rows], values[:, :, rows])
        query = queries[:, :, :, t]
        got, fresh = whole.select(query, 24), plain.select(query, 24)
        named, chosen = (sets(one.rows.unflatten(1, (H, -1))) for one in (got, fresh))
        each = len(named) // (B * H)
        for b in range(B):
            for h in range(H):
                place = (b * H + h) * each
                mine, new, asked = named[place : place + each], chosen[place : place + each], query[b, h]
                like = (b, h) in kept and float(torch.cosine_similarity(asked, kept[b, h][0], -1).mean()) >= tau
                assert mine == (kept[b, h][1] if like else new)
                if refresh or not like:
                    kept[b, h] = asked, new
                again += like
                cost = int(fresh.scan_bytes[b, h])
                assert int(got.scan_bytes[b, h]) == (0 if like and not refresh else cost) < int(fresh.scan_bytes.sum())
                scanned = got.scanned.unflatten(1, (H, -1))[b, h]
                assert bool((scanned == 0).all()) == (like and not refresh)
    assert 0.1 < again / (steps * B * H) < 0.99, "both happen"
    assert whole.selector.reused == pytest.approx(again / (steps * B * H))


def test_the_inner_method_is_asked_only_where_a_head_needs_it() -> None:
    _, keys, values = heads(B, H, G, N, D)
    cache = KVCache(FreeKV(Asked(8), 0.9), sink=0, window=0, seal=8)
    cache.append(keys, values)
    query, inner = walk(1)[:, :, :, 0], cache.selector.inner
    first = cache.select(query, 24)
    assert sets(cache.select(query * 3, 24).rows) == sets(first.rows), "the length of a query is not looked at"
    assert inner.calls == 1
    other = query.clone()
    other[1, 0] *= -1
    second = cache.select(other, 24)
    assert inner.calls == 2
    assert second.scan_bytes.gt(0).tolist() == [[False, False], [True, False]]
    assert sets(second.rows)[:2] + sets(second.rows)[3:] == sets(first.rows)[:2] + sets(first.rows)[3:]
    assert sets(second.rows)[2] != sets(first.rows)[2]


def test_what_makes_a_kept_choice_void() -> None:
    """A smaller budget, rows that come where all were named, rows that move, and a reset."""
    _, keys, values = heads(1, 1, 1, 64, D)
    query = torch.randn(1, 1, 1, D)
    cache = KVCache(FreeKV(Turning(), -1.0), sink=0, window=0, seal=16, check=True)
    cache.append(keys[:, :, :16], values[:, :, :16])
    assert int(cache.select(query, 20).attended) == 16
    cache.append(keys[:, :, 16:32], values[:, :, 16:32])
    assert int(cache.select(query, 20).attended) == 20, "it named every row there was, and rows have come"
    assert int(cache.select(-query, 20).scan_bytes) == 0
    assert int(cache.select(-query, 30).attended) == 20, "a larger budget alone changes nothing"
    small = cache.select(-query, 5)
    assert int(small.attended) == 5
    assert int(small.scan_bytes) > 0
    cache.append(keys[:, :, 32:48], values[:, :, 32:48])
    cache.select(-query, 5)
    assert int(cache.search.latest.scan_bytes) == 0, "rows that come move none"
    cache.selector.inner.turns = True
    cache.append(keys[:, :, 48:], values[:, :, 48:])
    plain = KVCache(Exact("sum"), sink=0, window=0, seal=16)
    plain.append(keys, values)
    torch.testing.assert_close(decode(query, cache, 5), decode(query, plain, 5))
    cache.reset()
    assert cache.selector.last.nbytes == 0
    assert cache.selector.reused != cache.selector.reused, "NaN"


class Turning(Exact):
    """Exact that turns the order of all rows around at a seal, if told so."""

    def __init__(self, turns: bool = False) -> None:
        super().__init__("sum")
        self.turns = turns
        self.shown = RowBuffer(1)  # [B,N]

    def append(self, rows: Rows) -> torch.Tensor | None:
        self.shown.append(rows.positions)
        if not self.turns:
            return None
        every = self.shown.rows
        return torch.arange(every - 1, -1, -1).expand(*rows.keys.shape[:2], -1)


class Sampling(Biases, ReadsKeys, Selector):
    """Reads the row whose key is nearest, with the logarithm of its number as a bias."""

    def append(self, rows: Rows) -> None:
        pass

    def select(self, query, step, budget):
        ids = (query @ self.stored_keys().mT).sum(2).topk(1).indices
        return Selection.tokens(ids, bias=(ids + 1.0).log())


def test_a_bias_stays_with_the_rows_it_was_drawn_with() -> None:
    _, keys, values = heads(B, H, G, N, D)
    cache = KVCache(FreeKV(Sampling(), 0.5), sink=0, window=0, seal=1, check=True)
    cache.append(keys, values)
    query = walk(1)[:, :, :, 0]
    cache.select(query, 4)
    query[0] *= -1
    mixed = cache.select(query, 4)
    torch.testing.assert_close(mixed.bias, (mixed.start + 1.0).log())
    assert mixed.scan_bytes is None, "what the inner method does not say is not known"


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="tau is a cosine, -1 to 1, got 2"):
        FreeKV(tau=2)
    with pytest.raises(ValueError, match=r"Heaviest.* has dropped since"):
        FreeKV(Heaviest())
    with pytest.raises(ValueError, match="wrap what its anchors choose by"):
        make_selector("freekv:inner=[kascade:anchors=[0]]")
    with pytest.raises(ValueError, match="the host waits for the device at every step"):
        KVCache(FreeKV(), capacity=500, fixed=True)
    assert make_selector("freekv:inner=[quest:page=8],tau=0.5").label() == "freekv:inner=[quest:page=8],tau=0.5"
    paper = KVCache(**FreeKV.paper())
    assert (paper.selector.inner.page, paper.selector.refresh, paper.seal_rows) == (32, True, 32)


def test_a_comparison_shows_how_often_a_choice_is_kept() -> None:
    trace = synthetic(700, heads=2, group=2, size=32, gap=0.26)
    never, always = (evaluate(trace, FreeKV(Quest(8), tau), 64, last=8, steps=("scanned",)) for tau in (1.0, -1.0))
    assert bool((never.steps["scanned"] > 0).all())
    assert bool((always.steps["scanned"][..., 0] > 0).all())
    assert not bool(always.steps["scanned"][..., 1:].any())
    assert always.mean("bytes_share") < never.mean("bytes_share")
    assert always.mean("recovered") < never.mean("recovered")
