"""The best rows found among those that can be: the same as by the votes of all rows, whatever the sample says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparseattn.core.selection import Bounds
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.attend_coded.dispatch import coded_step
from sparseattn.kernels.encode_keys.dispatch import encode
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys

pytest.importorskip("numba")
from sparseattn.kernels.quantized_keys.cpu_choice import LikelyRows
from sparseattn.kernels.quantized_keys.cpu_vote import best_by_vote, best_of_all, voted_scores

HEADS, ROWS, SIZE = 3, 32, 64
IMPLS = ("numba", "torch")


def coded(keys: Tensor, valid: Tensor | None = None) -> QuantizedKeys:
    """Keys `[B,H,N,D]` in groups of 32."""
    there = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if valid is None else valid
    return replace(encode(keys, ROWS, 2, "bins", torch.bfloat16), valid=there)


def drawn(name: str) -> tuple[Tensor, QuantizedKeys]:
    query, keys = torch.randn(1, HEADS, 5, SIZE), torch.randn(1, HEADS, 4096, SIZE)
    valid = torch.ones(1, 4096, dtype=torch.bool)
    if name == "peaked":
        query *= 8
    if name in ("heavy rows in the sample", "heavy rows elsewhere"):  # of one query head, which weighs them most
        first = 0 if name == "heavy rows in the sample" else ROWS
        keys[:, :, first : first + 3] = query[:, :, 2:3] * 1.5
    if name == "far above the sample":
        keys[:, :, ROWS] = query[:, :, 2] * 20
    if name == "padding":
        valid[:, :2500] = False
    return query, coded(keys, valid)


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("flat", {1}), ("peaked", {1, 2}), ("heavy rows in the sample", {1, 2}), ("heavy rows elsewhere", {1, 2}),
        ("far above the sample", {0}), ("padding", {1, 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [16, 100, 700])
def test_the_best_are_those_of_all_votes(name: str, passes: set[int], count: int) -> None:
    query, keys = drawn(name)
    likely = LikelyRows(query, keys, count)
    found, expected = likely(query), best_of_all(query, keys, count)
    assert set(likely.passes.tolist()) <= passes
    assert (found is None) == (0 in likely.passes)
    votes = voted_scores(query, keys, 1)
    for ids in (best_by_vote(query, keys, count), *([] if found is None else [found])):
        assert all(len(set(of.tolist())) == count for of in ids[0])
        chosen, right = (votes.gather(2, x.long()).sort(-1).values for x in (ids, expected))
        torch.testing.assert_close(chosen, right, rtol=0, atol=1e-4)


def test_a_second_pass_is_made_where_the_sample_misleads() -> None:
    """The groups of the sample weigh more for one query head than others, the best rows for the other lie elsewhere."""
    query, keys = torch.randn(1, 1, 2, SIZE), torch.randn(1, 1, 256 * ROWS, SIZE)
    groups = keys.unflatten(2, (256, ROWS))
    groups[:, :, ::8] += query[:, :, 0] * 0.5
    groups[:, :, 5::8, :4] += query[:, :, 1] * 0.6
    index = coded(keys)
    likely = LikelyRows(query, index, 64)
    found = likely(query)
    assert likely.passes.tolist() == [2]
    assert found is not None
    assert set(found.flatten().tolist()) == set(best_of_all(query, index, 64).flatten().tolist())


def test_what_is_chosen_does_not_depend_on_the_number_of_threads() -> None:
    query, keys = (
        torch.randn(1, HEADS, 4, SIZE),
        coded(torch.randn(1, HEADS, 20000, SIZE)[:, :, : 20000 // ROWS * ROWS]),
    )
    before, found = torch.get_num_threads(), []
    try:
        for prepared, used in ((1, 1), (2, 2), (2, 1)):
            torch.set_num_threads(prepared)
            likely = LikelyRows(query, keys, 300)
            torch.set_num_threads(used)
            found.append(likely(query))
    finally:
        torch.set_num_threads(before)
    assert found[0] is not None
    assert found[1] is not None
    assert found[2] is not None
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_codes_whose_numbers_are_not_adjacent_are_refused() -> None:
    keys = coded(torch.randn(1, 2, 640, SIZE))
    apart = replace(keys, low=keys.low.repeat_interleave(2, 3)[..., ::2])
    with pytest.raises(ValueError, match="the last stride is 1, got 2"):
        LikelyRows(torch.randn(1, 2, 2, SIZE), apart, 20)


@pytest.mark.parametrize("what", ["query", "levels", "nothing there"])
def test_no_numbers_and_no_rows_are_left_to_the_votes_of_all(what: str) -> None:
    query, keys = torch.randn(1, 2, 2, SIZE), coded(torch.randn(1, 2, 640, SIZE))
    if what == "query":
        query[0, 0, 1, 3] = torch.inf
    elif what == "levels":
        keys.step[0, 1, 3] = torch.inf
    else:
        keys.mask[:, 5:] = False
    found, expected = best_by_vote(query, keys, 20), best_of_all(query, keys, 20)
    for h in range(2) if what == "nothing there" else [0 if what == "levels" else 1]:  # the head without such numbers
        assert set(found[0, h].tolist()) == set(expected[0, h].tolist())
    assert int(found.min()) >= -1
    assert int(found.max()) < 640


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_attends_to_the_rows_that_it_chose(dtype: torch.dtype) -> None:
    query = torch.randn(2, HEADS, 2, SIZE).to(dtype)
    keys, values = torch.randn(2, 2, HEADS, 400, SIZE).to(dtype)
    valid = torch.ones(2, 320, dtype=torch.bool)
    valid[1, 200:] = False
    index, bounds = coded(keys[:, :, 8:328], valid), Bounds.of(2, 400, sink=5, sealed=320)
    bounds = Bounds(bounds.sink, 8, bounds.sealed, bounds.rows)
    steps = {impl: coded_step(query, index, 40, keys, values, bounds, scale=0.125, impl=impl) for impl in IMPLS}
    assert all(steps.values())
    made = [step(query, 72) for step in steps.values() if step is not None]
    assert None not in made
    (out, selection), (expected, named) = ((out, chosen.selection) for out, chosen in made if out is not None)
    assert torch.equal(selection.start.sort().values, best_of_all(query, index, 40).sort().values)
    assert bool((selection.length == 1).all())
    right = attend(query, keys, values, selection, bounds, scale=0.125, impl="gather")[0]
    off = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, right, rtol=off, atol=off)
    same = (named.start[..., None] == selection.start[..., None, :]).any(-1)
    assert same.float().mean() > 0.95  # compiled code rounds the query
    assert (out - expected).float().norm() < 0.1 * expected.float().norm()
    assert coded_step(query, index, 161, keys, values, bounds, scale=0.125, impl="numba") is None
