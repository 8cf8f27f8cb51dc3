"""Scores of pages by mean, deviations and directions: what each promises, and compiled code as the specification."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparseattn import Clse, Ellipsoid, KVCache, Mean, PageMass, PageSelector, Quad, Quest, Unique
from sparseattn.kernels.group_vote.dispatch import GROUPS
from sparseattn.kernels.page_directions import dispatch as page_directions
from sparseattn.kernels.page_directions import reference as page_directions_reference
from sparseattn.kernels.page_directions.reference import Form
from sparseattn.selectors.base import vote

B, H, G, D, PAGE, P = 2, 2, 3, 33, 16, 9


def keys_and_query(size: int = D, page: int = PAGE) -> tuple[Tensor, Tensor]:
    """Keys that differ along few directions more than along others, and queries."""
    scale = torch.linspace(3, 0.1, size)
    keys = (torch.randn(B, H, P * page, size) * scale)[..., torch.randperm(size)] + torch.randn(size)
    return keys, torch.randn(B, H, G, size)


def scored(selector: PageSelector, keys: Tensor, query: Tensor) -> Tensor:
    """`[B,H,G,P]`: every query head's own scores, in torch."""
    selector.group = "each"
    real = torch.ones(B, keys.shape[2] // selector.page, dtype=torch.bool)
    return selector.scores(query.double(), selector.entries(keys), real).unflatten(1, (H, G))


def logits_of(keys: Tensor, query: Tensor, page: int = PAGE) -> Tensor:
    """`[B,H,G,P,page]`, at the usual temperature."""
    return (query.double() @ keys.double().mT / keys.shape[-1] ** 0.5).unflatten(-1, (-1, page))


def held_bytes(selector: PageSelector, size: int) -> int:
    """Bytes of an entry of a bfloat16 cache."""
    one = selector.entries(torch.randn(1, 1, selector.page, size).bfloat16())
    return sum(part.nbytes for part in one.values())


# Of what amass-kv 0.1.1 keeps of a page (D = 128, 16 rows), variances and a content tag are not kept here.
TAG, VARIANCES = 16, 2 * 2


@pytest.mark.parametrize(
    ("selector", "bytes_of_page"),
    [
        (Quad(bits=8), 410 - TAG - VARIANCES),
        (Quad(bits=4), 282 - TAG - VARIANCES),
        (Clse(bits=4, rest=True), 332 - TAG - VARIANCES),
        (Quest(), 512),
        (Unique(), 512),
        (Mean(), 256),
        (Mean(bits=8), 130),
        (Quad(), 768),
        (PageMass(), 0),
    ],
    ids=repr,
)
def test_an_entry_takes_the_bytes_it_is_said_to(selector: PageSelector, bytes_of_page: int) -> None:
    assert held_bytes(selector, 128) == bytes_of_page


def test_bytes_read_are_those_of_every_real_entry() -> None:
    keys = torch.randn(1, 1, 90 * PAGE, 128).bfloat16()
    cache = KVCache(Quad(bits=4), sink=4, window=12)
    cache.append(keys, keys)
    chosen = cache.select(keys[:, :, -1:], 64)
    assert chosen.scanned is not None
    assert chosen.scan_bytes is not None
    assert chosen.scanned.tolist() == [[89]]
    assert chosen.scan_bytes.tolist() == [[89 * (128 + 2 * 64 + 3 * 2)]]
    cache = KVCache(PageMass(), sink=4, window=12)
    cache.append(keys, keys)
    chosen = cache.select(keys[:, :, -1:], 64)
    assert chosen.scanned is not None
    assert chosen.scan_bytes is not None
    assert (chosen.scanned.item(), chosen.scan_bytes.item()) == (89 * 16, 89 * 16 * 128 * 2)


def test_unique_is_the_mean_and_the_deviations() -> None:
    keys, query = keys_and_query()
    pages = keys.unflatten(2, (-1, PAGE))
    mean, deviation = pages.mean(3), pages.std(3, correction=0)
    expected = (query @ mean.mT + 1.5 * query.abs() @ deviation.mT) / D**0.5
    torch.testing.assert_close(scored(Unique(deviations=1.5), keys, query), expected.double(), rtol=1e-4, atol=1e-4)


def test_the_mean_is_below_and_quests_bound_above_the_pages_mass() -> None:
    """Jensen's inequality; the largest of P logits is at least their log-sum-exp less log P."""
    keys, query = keys_and_query()
    mass = logits_of(keys, query).logsumexp(-1)
    level = torch.tensor(PAGE).log()
    assert bool((scored(Mean(), keys, query) + level <= mass + 0.02).all())  # 16 bits of the mean
    assert bool((scored(Quest(), keys, query) + level >= mass).all())


def test_every_direction_makes_clse_the_pages_mass_and_the_ellipsoid_its_covariance() -> None:
    keys, query = keys_and_query()
    logits = logits_of(keys, query)
    torch.testing.assert_close(scored(Clse(rank=15), keys, query), logits.logsumexp(-1), rtol=0, atol=0.05)
    spread = logits.std(-1, correction=0)
    expected = logits.mean(-1) + 2 * spread
    torch.testing.assert_close(scored(Ellipsoid(rank=15), keys, query), expected, rtol=0, atol=0.05)
    expected = logits.mean(-1) + spread.square() / 2
    torch.testing.assert_close(scored(Quad(rank=15), keys, query), expected, rtol=0.01, atol=0.05)


def test_the_rest_is_the_variance_that_directions_leave_out() -> None:
    """In the mean over queries of every direction: of one query it is a guess."""
    keys, _ = keys_and_query()
    away = keys.unflatten(2, (-1, PAGE))
    away = away - away.mean(3, keepdim=True)
    lines, deviation, rest = page_directions_reference.principal(away, 3)
    left = away - away @ lines.mT @ lines
    torch.testing.assert_close(rest.square() * (D - 3), left.square().sum((-2, -1)) / PAGE, rtol=1e-3, atol=1e-4)
    whole = (deviation.square().sum(-1) + (D - 3) * rest.square()) / D
    query = torch.randn(B, H, 4000, D)
    query = query / query.norm(dim=-1, keepdim=True) * D**0.5
    form = Form("quad", PAGE, 3, rest=True)
    entries = page_directions_reference.encode(keys, form, torch.bfloat16)
    plain = page_directions_reference.encode(keys, Form("quad", PAGE, 0), torch.bfloat16)
    variance = page_directions_reference.estimates(query, entries, form, 1.0) - page_directions_reference.estimates(
        query, plain, Form("quad", PAGE, 0), 1.0
    )
    torch.testing.assert_close(2 * variance.mean(2), D * whole, rtol=0.1, atol=0)


def test_directions_are_the_principal_ones_with_one_sign() -> None:
    away = keys_and_query()[0].unflatten(2, (-1, PAGE))
    away = away - away.mean(3, keepdim=True)
    lines, deviation, _ = page_directions_reference.principal(away, 4)
    values = torch.linalg.svdvals(away)[..., :4]
    torch.testing.assert_close(deviation, values / PAGE**0.5, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lines @ lines.mT, torch.eye(4).expand(B, H, P, 4, 4), rtol=0, atol=1e-3)
    along = away @ lines.mT  # [B,H,P,page,r]
    assert bool((along.amax(3) >= -along.amin(3) - 1e-5).all()), "the farthest row is on the positive side"
    again = page_directions_reference.principal(away[:1, :1], 4)[0]
    torch.testing.assert_close(again, lines[:1, :1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("selector", [Quad(bits=4), Clse(bits=8, rest=True), Ellipsoid(rest=True)], ids=repr)
def test_equal_rows_and_padding_have_no_directions(selector: Quad | Clse | Ellipsoid) -> None:
    keys = torch.randn(1, 1, 1, D).expand(B, H, 2 * PAGE, D).clone()
    keys[:, :, PAGE:] = 0
    query = torch.randn(B, H, G, D)
    found = scored(selector, keys, query)
    expected = logits_of(keys, query).logsumexp(-1) - (0 if selector.mass else torch.tensor(PAGE).log())
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_half_a_step_off_at_most(bits: int) -> None:
    keys, _ = keys_and_query()
    form, exact = Form("clse", PAGE, 3, bits, True), Form("clse", PAGE, 3, 16, True)
    vectors, coordinates, rest = page_directions_reference.decode(
        page_directions_reference.encode(keys, form, torch.float16), form, D, torch.float32
    )
    right, at, other = page_directions_reference.decode(
        page_directions_reference.encode(keys, exact, torch.float16), exact, D, torch.float32
    )
    assert coordinates is not None
    assert at is not None
    last = 127 if bits == 8 else 7
    for got, wanted, of in (
        (vectors[..., 1:, :], right[..., 1:, :], last),
        (vectors[..., :1, :], right[..., :1, :], 127),
    ):
        far = wanted.abs().amax(-1, keepdim=True) * (0.5 / of + 2e-3)  # and 16 bits of both sides
        assert bool(((got - wanted).abs() <= far).all())
    assert bool(((coordinates - at).abs() <= at.abs().amax(-2, keepdim=True) * (0.5 / last + 2e-3) + 1e-3).all())
    assert torch.equal(rest, other)


def test_the_oracle_finds_most_and_better_scores_more() -> None:
    """The mass that the best third of the pages holds, in the mean over the heads."""
    keys, query = keys_and_query()
    keys, query = keys * 2, query * 2
    mass = logits_of(keys, query).logsumexp(-1).softmax(-1)

    def found(score: Tensor) -> float:
        return float(mass.gather(-1, score.topk(3).indices).sum(-1).mean())

    best = found(mass)
    by = {name: found(scored(one, keys, query)) for name, one in {"mean": Mean(), "clse": Clse(rank=8)}.items()}
    assert by["mean"] < by["clse"] <= best
    oracle = PageMass(group="each")
    cache = KVCache(oracle, sink=0, window=0)
    cache.append(keys, keys)
    chosen = cache.select(query, 3 * PAGE)
    held = (chosen.mask(P * PAGE)[..., ::PAGE].unflatten(1, (H, G)) * mass).sum(-1)
    assert float(held.mean()) == pytest.approx(best, abs=1e-6)


def test_probabilities_of_a_group_are_at_the_layers_temperature() -> None:
    keys, query = keys_and_query()
    real = torch.ones(B, P, dtype=torch.bool)
    for selector in (Unique(), Mean(), Clse(), Quest(group="softmax")):
        selector.bind(replace(selector.layer_context, scale=0.5))
        own = selector.scores(query, selector.entries(keys), real)
        selector.bind(replace(selector.layer_context, scale=None))
        selector.group = "each"
        usual = selector.scores(query * (0.5 * D**0.5), selector.entries(keys), real).unflatten(1, (H, G))
        torch.testing.assert_close(own, vote(usual, "softmax"), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Quad(rank=16), "rank is 1 to 15: the rows of a page of 16 .* got 16"),
        (lambda: Clse(bits=2), "bits is one of 16, 8, 4, got 2"),
        (lambda: Mean(bits=4), "bits of a mean is 16 or 8, got 4"),
        (lambda: Ellipsoid(deviations=-1.0), "deviations is 0 or more .* got -1.0"),
        (lambda: Unique(deviations=float("nan")), "deviations is 0 or more .* got nan"),
        (lambda: Quad(page=12), "power of two"),
    ],
)
def test_bad_arguments_get_a_sentence(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


# kind, rank, bits, rest, head size, query heads, page, dtype: every kind, number of bits and tail of four heads
FORMS = [
    ("quad", 0, 16, False, 64, 4, 16, torch.bfloat16),
    ("quad", 2, 8, True, 80, 3, 16, torch.float32),
    ("quad", 3, 4, False, 33, 5, 8, torch.bfloat16),
    ("clse", 2, 16, True, 33, 1, 32, torch.float32),
    ("clse", 3, 4, True, 64, 6, 4, torch.bfloat16),
    ("clse", 2, 8, False, 64, 4, 16, torch.float32),
    ("ellipsoid", 4, 16, True, 33, 9, 16, torch.bfloat16),
    ("ellipsoid", 3, 4, False, 128, 2, 16, torch.float32),
]


def stored(form: Form, size: int, group: int, dtype: torch.dtype):
    """Query, entries in storage with spare places, of which those that are not real hold anything, and what is real."""
    kept = torch.bfloat16 if dtype == torch.float32 else dtype
    made = page_directions_reference.encode(torch.randn(B, H, P * form.page, size) * 2, form, kept)
    real = torch.rand(B, P) < 0.8
    real[-1] = False
    real[0, 0] = True
    entries = {}
    for name, part in made.items():
        wide = part.new_full((B, H, P + 5, part.shape[3]), torch.nan if part.is_floating_point() else 99)
        wide[:, :, :P] = part.masked_fill(~real[:, None, :, None], wide[0, 0, -1, 0])
        entries[name] = wide[:, :, :P]
    return torch.randn(B, H, group, size).to(dtype), entries, real


def in_a_store(entries: dict[str, Tensor], real: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same entries in shuffled places of a store that sequences share, and the table of them."""
    held = 2 * B * P
    table = torch.randperm(held)[: B * P].view(B, P).int()
    store = {}
    for name, part in entries.items():
        store[name] = part.new_full((held, H, part.shape[3]), torch.nan if part.is_floating_point() else 99)
        store[name][table.long()] = part.transpose(1, 2)
    return store, table.masked_fill(~real, -1)


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize(("kind", "rank", "bits", "rest", "size", "group", "page", "dtype"), FORMS)
def test_compiled_code_is_the_specification(kind, rank, bits, rest, size, group, page, dtype) -> None:
    """Within the roundings of sums of products in float32; in the order of entries and in a store, by every vote."""
    form = Form(kind, page, rank, bits, rest, 1.5)
    query, entries, real = stored(form, size, group, dtype)
    store, table = in_a_store(entries, real)
    for way in GROUPS:
        expected = page_directions.scores(query.double(), entries, real, form, way, 7.0, "torch")
        for got in (
            page_directions.scores(query, entries, real, form, way, 7.0, "numba"),
            page_directions.scores_at(query, store, table, form, way, 7.0, "numba"),
        ):
            assert torch.equal(got.isneginf(), expected.isneginf())
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_bits_and_kinds_do_not_compile_anew() -> None:
    """A form of code for 16 bits and one for fewer, by the dtype that these are of."""
    from sparseattn.kernels.page_directions import cpu as page_directions_cpu

    for form in (
        Form("quad", 16, 2),
        Form("clse", 8, 3, rest=True),
        Form("quad", 4, 2, 8),
        Form("clse", 16, 2, 4, True),
    ):
        query, entries, real = stored(form, 64, 4, torch.bfloat16)
        page_directions.scores(query, entries, real, form, "max", 8.0, "numba")
        page_directions.scores_at(query, *in_a_store(entries, real), form, "sum", 8.0, "numba")
    kinds = {str(signature) for signature in page_directions_cpu._scores.signatures if "uint16" in str(signature)}
    assert len(kinds) == 2, kinds


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_queries_may_lie_as_a_model_leaves_them() -> None:
    """Query heads outermost in memory, as a projection's output is transposed."""
    form = Form("quad", 8, 2)
    entries = page_directions_reference.encode(torch.randn(1, 2, 32, 16).bfloat16(), form, torch.bfloat16)
    query, real = torch.randn(3, 2, 1, 16).permute(2, 1, 0, 3), torch.ones(1, 4, dtype=torch.bool)
    found = [page_directions.scores(query, entries, real, form, "sum", 4.0, impl) for impl in ("torch", "numba")]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_an_entry_that_is_no_number_shows() -> None:
    form = Form("clse", 16, 2, 16)
    for impl in ("torch", *(["numba"] if importlib.util.find_spec("numba") else [])):
        query, entries, _ = stored(form, 64, 2, torch.bfloat16)
        real = torch.ones(B, P, dtype=torch.bool)
        entries = {name: part.nan_to_num(0) for name, part in entries.items()}
        entries["vectors"][0, 0, 3, 5] = torch.nan
        for way in ("sum", "max", "each"):
            found = page_directions.scores(query, entries, real, form, way, 8.0, impl)
            assert found[0, 0].isnan().tolist() == [p == 3 for p in range(P)], (impl, way)
