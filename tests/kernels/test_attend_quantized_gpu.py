"""Attention over rows of few bits by the Triton kernel, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from sparseattn import CodedRows, Selection, attend_coded
from tests.cases import heads
from tests.kernels.test_attend_quantized import B, G, H, expected, rows_of, selections

pytest.importorskip("triton")
from sparseattn.kernels.attend_quantized import gpu as attend_quantized_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def there(rows: CodedRows) -> CodedRows:
    parts = (getattr(rows, name).to(DEVICE) for name in ("keys", "key_levels", "values", "value_levels"))
    return CodedRows(*parts, rows.bits, rows.group)


@pytest.mark.parametrize(
    ("bits", "size", "name", "dtype"),
    [
        (8, 32, "pages", torch.float32),
        (4, 80, "rows", torch.float32),
        (4, 64, "runs", torch.float16),
        (2, 80, "rows", torch.float32),
        pytest.param(8, 80, "rows", torch.float16, marks=pytest.mark.slow),
        pytest.param(4, 33, "rows", torch.float32, marks=pytest.mark.slow),
        pytest.param(2, 33, "pages", torch.float16, marks=pytest.mark.slow),
        pytest.param(8, 128, "none", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_attends_to_the_rows_read_back(bits: int, size: int, name: str, dtype: torch.dtype) -> None:
    queries, _, _ = heads(B, H, G, 1, size, seed=5)
    query, rows = queries[:, :, :, 0].to(dtype), rows_of(bits, size=size, dtype=dtype)
    selection = selections(96)[name]
    parts = {"start": selection.start, "length": selection.length}
    bias = None if selection.bias is None else selection.bias.to(DEVICE)
    moved = Selection(*(part.to(DEVICE) for part in parts.values()), selection.span, bias=bias)
    right, right_lse = expected(query, rows, selection)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    out, lse = attend_coded(query.to(DEVICE), there(rows), moved, impl="triton")
    torch.testing.assert_close(out.cpu().double(), right, **near)
    torch.testing.assert_close(lse.cpu().double(), right_lse, **near)
    out, lse = attend_quantized_gpu.attend(query.to(DEVICE), there(rows), moved, size**-0.5, splits=3)
    torch.testing.assert_close(out.cpu().double(), right, **near)
    torch.testing.assert_close(lse.cpu().double(), right_lse, **near)
