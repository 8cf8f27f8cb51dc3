"""A decode step in one compiled call gives what choosing and attending one after the other give, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from sparseattn import Bounds, Fier, KVCache, LowBit, Mass, QueryPQ, Quest, decode
from sparseattn.cache.at_once import StepAtOnce
from sparseattn.cache.decode import attend_chosen
from sparseattn.kernels.attend_bounded.dispatch import bounded_step
from sparseattn.kernels.page_bounds.bounds import PageBounds, VotedBounds
from tests.cases import heads, with_rope

pytest.importorskip("numba")

HEADS, GROUP, SIZE = 2, 3, 32


def drawn(batch: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[B,H,n,D]`, and a query `[B,H,G,D]`."""
    keys, values = torch.randn(2, batch, HEADS, rows, SIZE).to(dtype)
    return keys, values, torch.randn(batch, HEADS, GROUP, SIZE).to(dtype)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was made at once."""
    made: list[bool] = []
    call = StepAtOnce.__call__

    def watched(*given):
        found = call(*given)
        made.append(found is not None)
        return found

    monkeypatch.setattr(StepAtOnce, "__call__", watched)
    return made


def same_in_two(query: Tensor, cache: KVCache, budget: int) -> None:
    """A step, and what `select` and `attend_chosen` give on a clone. Attending is compiled into both, where it may be
    rounded differently: the last bits have depended on which was compiled first."""
    twin = cache.clone()
    out = decode(query, cache, budget)
    selection = twin.select(query, budget)
    torch.testing.assert_close(out, attend_chosen(query, twin, selection))
    assert cache.search.latest is not None
    assert torch.equal(cache.search.latest.start, selection.start)
    assert torch.equal(cache.search.latest.length, selection.length)


METHODS = {
    "sum": Quest(8, "sum"), "max": Quest(8, "max"), "each": Quest(8, "each"),
    "lowbit": LowBit(rows=16), "four bits": LowBit(4, rows=16, scales=8),
    "products": QueryPQ(8, metric="keys"), "products of 8 bits": QueryPQ(8, 8, metric="keys"),
    "missed": with_rope(QueryPQ(4, metric="keys", missed=0.1)),
    "missed of 8 bits": with_rope(QueryPQ(4, 8, metric="keys", missed=0.1)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((method, dtype) for method in ("sum", "max", "each") for dtype in (torch.float32, torch.bfloat16)),
        ("lowbit", torch.bfloat16),
        ("products", torch.float32),  # the form that models of the fast run compile too
        ("missed", torch.float32),
        pytest.param("lowbit", torch.float32, marks=pytest.mark.slow),  # another compiled form
        pytest.param("four bits", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("products", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("products of 8 bits", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("missed of 8 bits", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_same_through_the_life_of_a_cache(method: str, dtype: torch.dtype, counted: list[bool]) -> None:
    """Tokens, seals, growth of storage, padding, other budgets, drafts taken back, beams and a new prompt."""
    torch.manual_seed(0)
    selector = copy.deepcopy(METHODS[method])
    cache, served = KVCache(selector, sink=3, window=6, seal=16, rollback=4, check=False), []
    for batch, rows in ((1, 90), (3, 61)):
        keys, values, query = drawn(batch, rows, dtype)
        at = torch.arange(rows).expand(batch, -1).clone()
        at -= torch.arange(batch)[:, None] * 9  # the later sequences begin with padding
        cache.append(keys, values, positions=at)
        for token in range(70):
            budget = (24, 40, 400)[token // 9 % 3]
            same_in_two(query, cache, budget)
            rows = cache.stored.zones.zone
            served.append(budget <= {LowBit: rows // 2, QueryPQ: rows}.get(type(selector), budget))
            keys, values, query = drawn(batch, 1, dtype)
            cache.append(keys, values)
            if token % 20 == 7:
                cache.crop(2)
            if batch > 1 and token == 30:
                cache.reorder(torch.tensor([2, 0, 0]))
        cache.reset()
    assert counted == served  # by codes only where they choose a part of the rows
    assert sum(served) > 60


@pytest.mark.parametrize(
    ("selector", "dtype"),
    [
        (Quest(8), torch.bfloat16),
        (LowBit(rows=16), torch.bfloat16),
        (QueryPQ(8, metric="keys"), torch.float32),
    ],
    ids=["bounds", "codes", "products"],
)
def test_a_copy_attends_to_its_own_rows(
    selector: Quest | LowBit | QueryPQ, dtype: torch.dtype, counted: list[bool]
) -> None:
    keys, values, query = drawn(1, 200, dtype)
    cache = KVCache(selector, seal=16, check=False)
    cache.append(keys, values)
    decode(query, cache, 32)
    copied, twin = copy.deepcopy(cache), cache.clone()
    cache.reset()
    more = drawn(1, 40, dtype)[:2]
    for one in (copied, twin):
        one.append(*more)
    assert torch.equal(decode(query, copied, 32), decode(query, twin, 32))
    assert counted == [True] * 3


def test_a_prepared_step_is_of_its_scale_and_implementation(counted: list[bool]) -> None:
    keys, values, query = drawn(1, 200, torch.float32)
    cache = KVCache(Quest(8), check=False)
    cache.append(keys, values)
    first, other = decode(query, cache, 32), decode(query, cache, 32, scale=0.5)
    assert not torch.equal(first, other)
    assert torch.equal(decode(query, cache, 32, impl="numba"), first)
    assert counted == [True] * 3
    torch.testing.assert_close(decode(query, cache, 32, impl="reference"), first)
    with pytest.raises(ValueError, match="scale is a finite number"):
        decode(query, cache, 32, scale=float("nan"))
    assert counted == [True] * 3 + [False] * 2


class _Halved(Quest):
    """Scores that a kernel knows nothing of."""

    def scores(self, *given) -> Tensor:
        return super().scores(*given) / 2


@pytest.mark.parametrize(
    "settings",
    [
        {"check": True}, {"rows": "kivi:bits=8"}, {"selector": Quest(8, "softmax")}, {"selector": Quest(8, int8=True)},
        {"selector": _Halved(8)}, {"capacity": 400, "fixed": True}, {"budget": Mass(0.9)}, {"dtype": torch.float64},
        {"selector": LowBit(page=8)}, {"selector": LowBit(group="max")}, {"selector": "lowbit", "budget": 65},
        {"selector": Fier(), "capacity": 400, "fixed": True}, {"selector": "window"},
        {"selector": QueryPQ(8, metric="keys", group="sum")}, {"selector": QueryPQ(8, metric="keys", page=8)},
    ],
    ids=[
        "checked", "codec", "softmax", "int8", "scores", "fixed", "mass", "float64", "pages", "max", "half", "bits",
        "other", "summed products", "pages of products",
    ],
)  # fmt: skip
def test_what_takes_two_calls(settings: dict, counted: list[bool]) -> None:
    given = {"selector": Quest(8), "check": False} | settings
    budget, dtype = given.pop("budget", 32), given.pop("dtype", torch.float32)
    keys, values, query = drawn(1, 200, dtype)
    cache = KVCache(**given)
    cache.append(keys, values)
    decode(query, cache, budget)
    assert not any(counted)


def test_gradients_take_two_calls(counted: list[bool]) -> None:
    keys, values, query = drawn(1, 200, torch.float32)
    cache = KVCache(Quest(8), check=False)
    cache.append(keys, values)
    decode(query, cache, 32)
    assert cache.search.decoded(query.requires_grad_(), 32, None, None) is None
    assert counted == [True, False]


@pytest.mark.parametrize("method", ["sum", "lowbit", "products"])
def test_a_query_that_is_not_finite_is_refused(method: str, counted: list[bool]) -> None:
    keys, values, query = drawn(1, 200, torch.float32)
    cache = KVCache(METHODS[method].clone(), check=False)
    cache.append(keys, values)
    bad = query.clone()
    bad[0, 1, 2, 3] = torch.nan
    for sealed in (False, True):  # before the first seal, which is left to a step that is good, and behind it
        with pytest.raises(ValueError, match="query must be finite, got nan"):
            decode(bad, cache, 32)
        assert bool(cache.sealed.any()) == sealed
        decode(query, cache, 32)
    huge = torch.full_like(query, 2e36)  # finite numbers whose sum is not take two calls
    assert decode(huge, cache, 32).isfinite().all()
    assert counted == [True, False, True, False]


def test_a_kept_choice_is_read_again(counted: list[bool]) -> None:
    keys, values, query = drawn(1, 200, torch.float32)
    cache = KVCache(Quest(8), check=False)
    cache.append(keys, values)
    decode(query, cache, 32)
    first, cache.search.keep_choice = cache.search.latest, True
    decode(-query, cache, 32)
    assert cache.search.latest is first
    assert counted == [True]


@pytest.mark.parametrize("group", ["sum", "max", "each"])
def test_compiled_code_is_the_specification(group: str) -> None:
    queries, keys, values = heads(2, 2, 3, 200, 64)
    low, high = keys[:, :, 8:168].unflatten(2, (20, 8)).aminmax(dim=3)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 13:] = False
    voted, bounds = VotedBounds(PageBounds(low, high, valid), group, 8.0), Bounds.of(2, 200, sink=5, sealed=168)
    bounds = Bounds(bounds.sink, 8, bounds.sealed, bounds.rows)
    found = [
        bounded_step(queries[:, :, :, 0], voted, 6, 8, keys, values, bounds, scale=0.125, impl=impl)(
            queries[:, :, :, 0], 32
        )
        for impl in ("numba", "torch")
    ]
    assert None not in found
    (out, chosen), (right, expected) = ((out, chosen.selection) for out, chosen in found)
    torch.testing.assert_close(out, right)
    assert torch.equal(chosen.start.sort().values, expected.start.sort().values)
    assert torch.equal(chosen.length, expected.length)
