"""vAttention: the sample is the paper's, its bound holds as often as it says, and a budget voids it openly."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from sparseattn import H2O, Exact, KVCache, MagicPIG, SparQ, VAttention, decode, evaluate, make_selector
from sparseattn.selectors.pages.quest import Quest
from sparseattn.traces.synthetic import synthetic

H, G, D, N = 2, 2, 32, 2000


def filled(selector, gain: float = 1.0, batch: int = 1, rows: int = N):
    """A cache of normal rows, and a query whose logits have a deviation of `gain`."""
    draw = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, batch, H, rows, D, generator=draw)
    query = torch.randn(batch, H, G, D, generator=draw) * gain
    cache = KVCache(selector, sink=2, window=6, check=True)
    cache.append(keys, values)
    return cache, query, keys, values


def errors(cache, query, keys, budget=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative error of the denominator `[B,H,G]`, and what was selected."""
    chosen = cache.select(query, budget)
    logits = query.double() @ keys.double().mT / D**0.5
    sealed = keys.shape[2] - 8
    named = torch.ones(*query.shape[:3], keys.shape[2], dtype=torch.bool)
    named[..., 2:-6] = chosen.mask(sealed).view(*query.shape[:3], -1)
    bias = torch.zeros(named.shape, dtype=torch.float64)
    bias[..., 2:-6] = chosen.row_bias(sealed).view(*query.shape[:3], -1)
    sampled = (logits + bias).masked_fill(~named, -torch.inf).logsumexp(-1)
    return (sampled - logits.logsumexp(-1)).expm1().abs(), chosen


def test_the_bound_holds_as_often_as_it_says() -> None:
    """400 draws of each head: seeds are as good as steps."""
    epsilon, delta = 0.1, 0.1
    found = []
    selector = VAttention("exact", epsilon, delta, 0.03, 0.01)
    cache, query, keys, _ = filled(selector)
    for seed in range(100):
        selector.seed = seed
        error, chosen = errors(cache, query, keys)
        assert int(chosen.attended.max()) < 900, "it does read less than everything"
        found.append(error)
    missed = float((torch.stack(found) > epsilon).double().mean())
    assert 0 < missed <= delta, "0 would be no sample"


def test_a_sample_is_no_bias_in_the_mean() -> None:
    """The estimate of the denominator over seeds comes to the truth, rows drawn twice among them."""
    selector = VAttention("exact", 10.0, 0.1, 0.2, 4)
    cache, query, keys, _ = filled(selector)
    logits = query.double() @ keys.double().mT / D**0.5
    ratio = []
    for seed in range(200):
        selector.seed = seed
        chosen = cache.select(query, None)
        named = chosen.mask(N - 8).view(1, H, G, -1)
        near = logits[..., [0, 1, *range(N - 6, N)]].exp().sum(-1)
        far = (logits[..., 2:-6] + chosen.row_bias(N - 8).view(1, H, G, -1)).exp()
        ratio.append((near + (far * named).sum(-1)) / logits.exp().sum(-1))
        drawn = selector.drawn
        twice = (chosen.bias[..., -N:].exp() * drawn.flatten(1)[..., None] / (N - 8)).round()  # times drawn
        assert bool((torch.where(chosen.length > 0, twice, 0.0).amax(-1) > 1).all())
    mean, spread = torch.stack(ratio).mean(0), torch.stack(ratio).std(0) / 200**0.5
    assert bool(((mean - 1).abs() < 4 * spread).all())


def test_as_many_rows_are_drawn_as_the_formula_says() -> None:
    selector = VAttention("exact", 0.1, 0.2, 0.05, 10, margin=0.0)
    cache, query, keys, _ = filled(selector)
    chosen = cache.select(query, None)
    logits = (query.double() @ keys.double().mT / D**0.5)[0]
    base = math.ceil(0.05 * (N - 8))
    from sparseattn.kernels.random_draws import draws, streams

    rank = draws(streams(0, 0, range(H), keys.device), torch.tensor([N - 1]), torch.arange(base)[None])[0]
    rows = (rank & ((1 << 63) - 1)) % (N - 8) + 2
    z = statistics.NormalDist().inv_cdf(0.9)
    for h in range(H):
        for g in range(G):
            top = logits[h, g, 2:-6].topk(10).indices + 2
            sizes = logits[h, g, rows[h]].exp() * ~torch.isin(rows[h], top)
            exact = logits[h, g, [0, 1, *range(N - 6, N), *top]].exp().sum()
            needed = (z * sizes.std() * (N - 8) / (0.1 * (exact + (N - 8) * sizes.mean()))) ** 2
            assert float(selector.needed[0, h, g]) == pytest.approx(max(float(needed), base), rel=1e-3)
            assert int(selector.drawn[0, h, g]) == math.ceil(float(selector.needed[0, h, g]))
            named = chosen.mask(N - 8)[0, h * G + g]
            assert bool(named[top - 2].all())
            assert bool(named[rows[h] - 2].all()), "the base sample is part of the sample"
    assert int(chosen.attended.max()) <= 10 + int(selector.drawn.max())


def test_where_the_budget_binds_the_selector_says_so() -> None:
    selector = VAttention(epsilon=0.01)
    cache, query, keys, _ = filled(selector)
    free = cache.clone()
    _, chosen = errors(cache, query, keys, 100)
    assert bool((chosen.attended <= 100).all())
    assert bool((selector.needed > selector.drawn).all())
    assert int(selector.drawn.max()) <= 100
    error, chosen = errors(free, query, keys)
    assert bool((error < 1e-5).all())
    assert int(chosen.attended.min()) == N - 8, "a bound of more draws than rows reads every row"
    assert not bool(chosen.bias.masked_fill(chosen.length == 0, 0.0).any())


def test_draws_do_not_depend_on_the_batch_and_query_heads_share_them() -> None:
    # Two copies of one sequence, so that the second is in another place of the batch.
    selector = VAttention(top=8)
    cache, query, keys, values = filled(selector)
    twice = KVCache(VAttention(top=8), sink=2, window=6)
    twice.append(keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1))
    alone, both = decode(query, cache, 600), decode(query.repeat(2, 1, 1, 1), twice, 600)
    torch.testing.assert_close(both[1:], alone)
    assert torch.equal(twice.latest.mask(N - 8)[1], cache.search.latest.mask(N - 8)[0])
    sample = cache.search.latest.mask(N - 8).view(H, G, -1)
    least = min(int(rows.sum()) for rows in sample[0])
    assert int((sample[0, 0] & sample[0, 1]).sum()) > 0.5 * least
    other = VAttention(top=8, seed=1)
    again, *_ = filled(other)
    assert not torch.equal(decode(query, again, 600), alone)


def test_what_cannot_choose_for_it_is_refused() -> None:
    for inner in (H2O(), MagicPIG(), SparQ(8, True), VAttention()):
        with pytest.raises(ValueError, match="take another"):
            VAttention(inner)
    for arguments in (
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"rate": 0.0},
        {"top": 0},
        {"top": 1.5},
        {"top": True},
        {"margin": -1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            VAttention(**arguments)
    made = make_selector("vattention:inner=[quest:page=8],epsilon=.2,delta=.05,rate=.01")
    assert isinstance(made.inner, Quest)
    assert made.span == 8
    assert VAttention().label() == "vattention"
    assert repr(Exact()) in repr(VAttention())


def test_the_error_of_a_denominator_is_measured() -> None:
    trace = synthetic(600, heads=1, group=2, size=16)
    found = evaluate(trace, VAttention(epsilon=0.2), None, last=4, layers=[0], steps=["denominator_error"])
    plain = evaluate(trace, "quest", 64, last=4, layers=[0])
    torch.testing.assert_close(plain.heads["denominator_error"], 1 - plain.heads["mass"], rtol=1e-4, atol=1e-5)
    assert found.steps["denominator_error"].shape == (1, 2, 4)
    assert 0 <= found.mean("denominator_error") < 0.2
