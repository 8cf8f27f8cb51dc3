"""Attention over a run of rows by compiled code is torch's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from sparseattn.kernels.attend_run.dispatch import run_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_is_the_specification(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 700, 64, generator=draw).to(dtype)
    keys[:, :, :5], values[:, :, 690:] = torch.nan, torch.nan  # rows that no run names may hold anything
    query = torch.randn(2, 2, 3, 64, generator=draw).to(dtype)
    made, expected = (run_step(query, keys, values, 600, scale=0.2, impl=impl) for impl in ("numba", "torch"))
    off = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for first, end in ((5, 6), (5, 605), (17, 146), (689, 690)):
        torch.testing.assert_close(made(query, first, end), expected(query, first, end), rtol=off, atol=off)
