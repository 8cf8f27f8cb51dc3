"""Budgets by mass: what they are, that a cut is the smallest set, and what selectors say their rows weigh."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from sparseattn import (
    Clse,
    Exact,
    KVCache,
    LowBit,
    Mass,
    PageMass,
    Quest,
    Random,
    Selection,
    Selector,
    Weighed,
    Window,
    decode,
    evaluate,
)
from sparseattn.cache.selection_checks import ContractError
from sparseattn.core.budget import budget_label, budget_order, budget_record, budget_rows, parse_budget
from sparseattn.core.mass import cut
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.registry import SELECTORS
from sparseattn.traces.synthetic import synthetic
from tests.cases import CASES, Case, Same, attention, full, missing

B, H, G, D = 2, 2, 3, 32
# A form of each estimate: forms of one method share its code.
NAMES = (
    *("exact", "exact-group", "quest", "quest-int8", "lowbit", "lowbit-page", "fier", "pq", "selfindex", "sparq-mean"),
    *("loki", "doublesparsity"),
)
SAME = Case("same-exact", lambda: Same(Exact()), lambda: Same(Exact()))
ESTIMATING = [*(case for case in CASES if case.name in NAMES and missing(case) is None), SAME]


def filled(selector, rows: int = 180, **settings):
    """A cache of random rows, and the query of its last."""
    queries, keys, values = attention(B, H, G, rows, D)
    cache = KVCache(selector, **{"sink": 2, "window": 5, "seal": 32, "check": True} | settings)
    cache.append(keys, values, queries)
    return cache, queries[:, :, :, -1], keys, values


# -- the budget ------------------------------------------------------------------------------------------------------


def test_a_mass_is_written_and_read_back() -> None:
    for text, mass in {
        "mass:0.95": Mass(0.95),
        "mass:1": Mass(1.0),
        "mass:0.9:2048": Mass(0.9, 2048),
        "mass:0.123456789:12.5%": Mass(0.123456789, 0.125),
    }.items():
        assert parse_budget(text) == mass
        assert parse_budget(str(mass)) == mass
        assert parse_budget(json.loads(json.dumps(budget_record(mass)))) == mass
        assert budget_label(mass) == str(mass)
        assert parse_budget(budget_label(1_048_577)) == 1_048_577
    assert budget_rows(Mass(0.9, 64), 1000) == 64
    assert budget_rows("mass:0.9", 1000) == 1000
    assert sorted([64, Mass(0.9), 2000, Mass(0.5, 10)], key=lambda one: budget_order(one, 1000)) == [
        Mass(0.5, 10),
        64,
        Mass(0.9),
        2000,
    ]
    for text in (
        "mass:",
        "mass:0",
        "mass:1.5",
        "mass:nan",
        "mass:0.9,64",
        "mass:0.9:",
        "mass:0.9:0",
        "mass:1:mass:1",
    ):
        with pytest.raises(ValueError, match=r"mass|budget"):
            parse_budget(text)
    for share, most in ((True, None), ("0.5", None), (0.5, True), (0.5, 2.0), (0.5, "64")):
        with pytest.raises(ValueError, match=r"mass|share|rows"):
            Mass(share, most)


def test_who_does_not_estimate_is_refused_before_any_work() -> None:
    cache, query, *_ = filled(Random())
    with pytest.raises(ValueError, match=r"random does not estimate .* not mass:0.9"):
        decode(query, cache, "mass:0.9")
    assert cache.counts[1] == [0, 0], "nothing was sealed"
    with pytest.raises(ValueError, match="does not estimate"):
        evaluate(synthetic(300, heads=1, group=1, size=16), "recent", Mass(0.9), last=2)
    cache, query, *_ = filled(Window())  # which has no use for any budget
    assert int(cache.select(query, Mass(0.9)).attended.sum()) == 0
    cache, query, *_ = filled(Exact(refresh=2))
    with pytest.raises(ValueError, match="does not estimate"):
        cache.select(query, Mass(0.9))
    for name, method in SELECTORS.items():
        assert issubclass(method, EstimatesMass) == hasattr(method, "weigh"), name


# -- the cut ---------------------------------------------------------------------------------------------------------


def test_the_cut_is_the_smallest_set_that_holds_the_mass() -> None:
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(1, 6, 9, generator=draw) * 2
    weights[0, 3, 4:] = -torch.inf
    length = (~weights.isneginf()).int()
    rest, near = torch.randn(1, 6, generator=draw), torch.randn(1, 2, 3, generator=draw)
    start = torch.arange(9, dtype=torch.int32).expand(1, 6, 9)
    for wanted in (0.05, 0.5, 0.8, 0.99, 1.0):
        chosen, promise = cut(Weighed(Selection(start, length, 1), weights, rest), near, wanted)
        for head in range(6):
            sizes = weights[0, head].double().exp()
            everything = sizes.sum() + rest[0, head].double().exp() + near.flatten()[head].double().exp()
            kept = chosen.length[0, head] > 0
            held = (near.flatten()[head].double().exp() + sizes[kept].sum()) / everything
            assert promise.held[0, head].item() == pytest.approx(held.item(), rel=1e-5)
            if wanted == 1:
                assert torch.equal(kept, length[0, head] > 0), "everything that was named"
            elif held < wanted:
                assert torch.equal(kept, length[0, head] > 0), "all of it is too little"
            elif kept.any():
                assert held - sizes[kept].min() / everything < wanted, "one row fewer is too little"
    shared = Selection(start[:, :2], torch.ones(1, 2, 9, dtype=torch.int32), 1)
    weights = weights.masked_fill(weights.isneginf(), -3.0)
    chosen, promise = cut(Weighed(shared, weights, rest), near, 0.7)
    total = torch.cat([weights, rest[..., None], near.flatten(1)[..., None]], -1).logsumexp(-1)
    share = (weights - total[..., None]).exp().unflatten(1, (2, 3)).mean(2)
    dense = (near.flatten(1) - total).exp().unflatten(1, (2, 3)).mean(2)
    held = dense + (share * (chosen.length > 0)).sum(-1)
    assert torch.allclose(promise.held.unflatten(1, (2, 3)).mean(2), held), "one choice: the mean of its query heads"
    least = share.masked_fill(chosen.length == 0, torch.inf).amin(-1)
    assert bool((held >= 0.7 - 1e-6).all())
    assert bool((held - least < 0.7).all())


# -- what selectors say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ESTIMATING, ids=lambda case: case.name)
def test_rows_that_are_weighed_are_those_selected_and_all_of_them_are_full_attention(case: Case) -> None:
    assert case.exhaustive is not None
    cache, query, keys, values = filled(case.exhaustive())
    expected = full(query, keys, values)
    for mass in (Mass(1.0), None):
        torch.testing.assert_close(decode(query, cache, mass).double(), expected, rtol=1e-5, atol=1e-5)
    for apart in (None, "cpu"):
        cache, query, *_ = filled(case.make(), sealed_device=apart)
        plain, twin = cache.clone(), cache.clone()
        everything = plain.select(query, 48)
        named = cache.select(query, Mass(1.0, 48))
        assert torch.equal(everything.mask(180), named.mask(180))
        some = cache.select(query, Mass(0.6, 48))
        assert some.start.shape == named.start.shape, "shapes do not follow the mass"
        assert bool((some.mask(180) <= named.mask(180)).all())
        assert int(some.attended.sum()) < int(named.attended.sum())
        out = decode(query, twin, Mass(0.6, 48))  # the device's part is weighed by its own attention
        assert twin.search.latest is not None
        assert torch.equal(twin.search.latest.mask(180), some.mask(180))
        assert bool(out.isfinite().all())
        assert cache.search.latest_promise is not None
        torch.testing.assert_close(twin.search.latest_promise.held, cache.search.latest_promise.held)
        plain.select(query, 48)
        assert plain.search.latest_promise is None


def test_exact_weighs_truly_and_reads_the_fewest_rows() -> None:
    for scale in (None, 0.4):
        selector = Exact()
        selector.bind(replace(selector.layer_context, scale=scale))
        cache, query, keys, _ = filled(selector)
        cache.select(query, Mass(0.9))
        logits = query.double() @ keys.double().mT * (D**-0.5 if scale is None else scale)
        reads = torch.zeros(B, H, G, 180, dtype=torch.bool)
        reads[..., :2] = reads[..., int(cache.sealed[0]) + 2 :] = True
        sealed = int(cache.sealed[0])
        reads[..., 2 : 2 + sealed] = cache.search.latest.mask(sealed).view(B, H, G, -1)
        weights = logits.softmax(-1)
        held = (weights * reads).sum(-1)
        torch.testing.assert_close(cache.search.latest_promise.held.view(B, H, G), held.float(), rtol=1e-4, atol=1e-5)
        assert bool((held > 0.9 - 1e-5).all())
        mine = weights.masked_fill(~reads, torch.inf)[..., 2 : 2 + sealed].amin(-1)
        assert bool(((held - mine < 0.9) | mine.isinf()).all()), "one row fewer holds too little"
    with pytest.raises(ValueError, match="scale"):
        decode(query, cache, Mass(0.9), scale=0.3)


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize(
    ("selector", "off"), [(PageMass(8), 1e-4), (Clse(8, rank=7, bits=16), 0.02), (LowBit(4, 32), 0.1)]
)
def test_pages_and_short_keys_weigh_at_the_layers_scale(selector: Selector, off: float, scale: float | None) -> None:
    selector = selector.for_layer(0)
    selector.bind(replace(selector.layer_context, scale=scale))
    cache, query, keys, _ = filled(selector)
    cache.select(query, Mass(0.8))
    assert cache.search.latest is not None
    assert cache.search.latest_promise is not None
    weights = (query.double() @ keys.double().mT * (D**-0.5 if scale is None else scale)).softmax(-1)
    sealed = int(cache.sealed[0])
    reads = torch.ones(B, H, 180, dtype=torch.bool)
    reads[..., 2 : 2 + sealed] = cache.search.latest.mask(sealed)
    held = (weights * reads[:, :, None]).sum(-1).float()
    torch.testing.assert_close(cache.search.latest_promise.held.view(B, H, G), held, rtol=0, atol=off)


def test_what_finding_a_mass_reads_is_counted() -> None:
    cache, query, *_ = filled(Quest(8))
    plain, by_mass = cache.clone().select(query, 48), cache.select(query, Mass(0.9, 48))
    near = cache.lengths - cache.sealed
    assert torch.equal(by_mass.scan_bytes - plain.scan_bytes, (near * D * 4)[:, None].expand(-1, H))
    assert torch.equal(by_mass.scanned - plain.scanned, near[:, None].expand(-1, H))


def test_pages_of_a_bound_promise_too_much_and_rows_of_four_bits_about_what_they_hold() -> None:
    trace = synthetic(1024, heads=2, group=2, size=32, clusters=8)
    settings = {"last": 8, "window": 16, "layers": [0]}
    found = {name: evaluate(trace, made, Mass(0.8), **settings) for name, made in _estimates().items()}
    exact, fine = found["exact"], found["lowbit"]
    assert exact.mean("promised") == pytest.approx(exact.mean("mass"), abs=1e-4)
    assert exact.mean("fulfilled") == 1
    assert exact.mean("kept") == exact.mean("oracle_kept") > 0
    assert fine.mean("promised") == pytest.approx(fine.mean("mass"), abs=0.02)
    assert fine.mean("oracle_kept") == pytest.approx(exact.mean("oracle_kept"), abs=0.2), "rows that wait are dense"
    assert fine.mean("promised") >= 0.8
    assert math.isnan(evaluate(trace, "exact", 64, **settings).mean("promised"))
    record = json.loads(json.dumps(found["quest"].record()))
    assert record["budget"] == "mass:0.8"
    assert record["mean"]["promised"] >= 0.8


def _estimates():
    return {"exact": Exact(), "lowbit": LowBit(4, 16, group="each"), "quest": Quest(8, "each")}


def test_a_selector_that_weighs_wrongly_breaks_the_contract() -> None:
    class Wrong(Exact):
        def weigh(self, query, step, budget):
            found = super().weigh(query, step, budget)
            return Weighed(found.selection, found.weights * math.nan, found.rest)

    cache, query, *_ = filled(Wrong())
    with pytest.raises(ContractError, match="NaN"):
        cache.select(query, Mass(0.9))
