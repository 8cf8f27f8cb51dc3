"""What queries give to rows: compiled code gives the reference's, and the reference is a softmax."""

from __future__ import annotations

import pytest
import torch

from sparseattn.kernels.weights_given import dispatch


def _drawn(queries: int, rows: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(rows)
    query = 2 * torch.randn(2, 3, queries, size, generator=draw).to(dtype)
    keys = torch.randn(2, 3, rows + 9, size, generator=draw).to(dtype)[:, :, :rows]  # a view, as of a row buffer
    total = (query.double() @ keys.double().mT * 0.3).logsumexp(-1).float()
    total[1, 2, 0] = torch.inf
    return query, total, keys


def test_it_is_a_sum_of_softmax_weights() -> None:
    query, total, keys = _drawn(5, 70, 16, torch.float64)
    expected = (query @ keys.mT * 0.3).softmax(-1)
    expected[1, 2, 0] = 0
    torch.testing.assert_close(dispatch.weights_given(query, total, keys, 0.3), expected.sum(2).float())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("queries", "rows", "size"), [(1, 5, 32), (6, 700, 64), (20, 2_177, 128), (36, 130, 64)])
def test_compiled_sums_are_the_references(queries: int, rows: int, size: int, dtype: torch.dtype) -> None:
    """By rows, and by matrix tiles or pairs where these are: 16 bits, many queries, a size in whole tiles."""
    pytest.importorskip("numba")
    query, total, keys = _drawn(queries, rows, size, dtype)
    found, expected = (dispatch.weights_given(query, total, keys, 0.3, impl=impl) for impl in ("numba", "torch"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(found[0].sum()) == pytest.approx(3 * queries, rel=1e-3)


@pytest.mark.parametrize("impl", ["torch", "numba"])
def test_a_row_that_the_sum_does_not_hold_weighs_one_at_most(impl: str) -> None:
    """Rows that came after a pass may be nearer to its queries than all that these read."""
    if impl == "numba":
        pytest.importorskip("numba")
    query, keys = torch.full((1, 1, 2, 16), 3.0), torch.full((1, 1, 5, 16), 3.0)
    given = dispatch.weights_given(query, torch.zeros(1, 1, 2), keys, 1.0, impl=impl)  # logits of 144
    torch.testing.assert_close(given, torch.full((1, 1, 5), 2.0))


def test_no_rows() -> None:
    query, total, keys = _drawn(3, 0, 8, torch.float32)
    assert dispatch.weights_given(query, total, keys, 1.0).shape == (2, 3, 0)


@pytest.mark.parametrize("heads", [1, 3])
def test_log_sums_are_over_what_a_query_sees(heads: int) -> None:
    query, _, keys = _drawn(4, 30, 8, torch.float32)
    seen = torch.rand(2, heads, 4, 30, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[0, 0, 2] = False
    found = dispatch.log_sums(query, keys, seen, 0.3)
    expected = (query @ keys.mT * 0.3).masked_fill(~seen, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(found, expected)
    assert found[0, 0, 2] == -torch.inf
