"""Products with every key: compiled code gives the reference's."""

from __future__ import annotations

import pytest
import torch

from sparseattn.kernels.row_scores import dispatch


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("group", "rows"), [(1, 5), (4, 700), (7, 513), (2, 0)])
def test_compiled_products_are_the_references(group: int, rows: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(rows)
    query = torch.randn(2, 3, group, 32, generator=draw).to(dtype)
    keys = torch.randn(2, 3, rows + 9, 32, generator=draw).to(dtype)[:, :, :rows]  # a view, as of a row buffer
    found, expected = (dispatch.row_scores(query, keys, impl=impl) for impl in ("numba", "torch"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.dtype == torch.float32


def test_doubles_stay_doubles() -> None:
    query, keys = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 3, 8, dtype=torch.float64)
    assert dispatch.row_scores(query, keys).dtype == torch.float64
