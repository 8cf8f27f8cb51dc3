"""Sums of tables by product codes: compiled code equals the reference, and rounded tables keep their bound."""

from __future__ import annotations

import pytest
import torch

from sparseattn.kernels.product_codes import dispatch, reference
from sparseattn.kernels.product_codes.codes import MORE, ProductCodes, rounded

# batch, heads, group, subspaces, bits, rows: whole blocks and none, groups that fill no register, an odd subspace
SHAPES = [(1, 2, 4, 8, 4, 1000), (2, 2, 3, 5, 4, 513), (1, 2, 1, 4, 8, 640), (2, 1, 5, 3, 8, 70), (1, 1, 4, 2, 4, 3)]


def made(batch: int, heads: int, group: int, subspaces: int, bits: int, rows: int) -> tuple[torch.Tensor, ProductCodes]:
    draw = torch.Generator().manual_seed(rows)
    stored = torch.randint(0, 256, (batch, heads, -(-subspaces * bits // 8), rows + 9), generator=draw).to(torch.uint8)
    if subspaces * bits % 8:
        stored[:, :, -1] &= 15
    valid = torch.rand(batch, rows, generator=draw) > 0.1
    tables = torch.randn(batch, heads, group, subspaces, 1 << bits, generator=draw)
    return tables, ProductCodes(stored[..., :rows], bits, valid)  # a view, as of a row buffer


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_tables_are_within_half_a_step_a_subspace(shape: tuple[int, ...]) -> None:
    tables, keys = made(*shape)
    names, step, least = rounded(tables)
    read = least[..., None] + step[:, :, None, None] * reference.sums(names.double(), keys)
    off = (read - reference.sums(tables.double(), keys)).abs().amax((2, 3))
    assert bool((off <= shape[3] * step / 2 * 1.001).all())
    assert bool((off > 0).all()), "a step of 0 would pass too"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_sums_and_choices_are_the_references(shape: tuple[int, ...]) -> None:
    pytest.importorskip("numba")
    tables, keys = made(*shape)
    assert torch.equal(*(dispatch.relative(tables, keys, impl=impl) for impl in ("torch", "numba")))
    torch.testing.assert_close(*(dispatch.logits(tables, keys, impl=impl) for impl in ("numba", "torch")))
    for count in (1, 20, 100, 2000):
        found, expected = (dispatch.best(tables, keys, count, impl=impl).sort(-1).values for impl in ("numba", "torch"))
        assert torch.equal(found, expected)


def test_rows_that_are_chosen_are_those_of_the_whole_vote_where_all_are_candidates() -> None:
    tables, keys = made(1, 2, 4, 8, 4, 400)
    votes = reference.vote_softmax(reference.logits(tables, keys))
    whole = votes.topk(100).indices.sort(-1).values
    assert torch.equal(dispatch.best(tables, keys, 400 // MORE, impl="torch").sort(-1).values, whole.int())


def test_sums_that_would_not_fit_are_refused() -> None:
    pytest.importorskip("numba")
    tables, keys = made(1, 1, 1, 129, 8, 16)
    with pytest.raises(ValueError, match="sums of 16 bits hold 128 subspaces, got 129"):
        dispatch.best(tables, keys, 4, impl="numba")
