"""Logits of listed rows by product codes: every implementation gives what those of all rows are at the listed ones."""

from __future__ import annotations

import os

import pytest
import torch

from sparseattn.kernels.listed_codes import dispatch
from sparseattn.kernels.product_codes import reference as product_codes_reference
from tests.kernels.test_product_codes import SHAPES, made


def runs(impl: str) -> None:
    pytest.importorskip({"numba": "numba", "triton": "triton"}.get(impl, "torch"))
    if impl == "triton" and os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")


@pytest.mark.parametrize("impl", ["torch", "numba", "triton"])
@pytest.mark.parametrize("each", [False, True], ids=["kv", "query"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_listed_logits_are_those_of_their_rows(shape: tuple[int, ...], each: bool, impl: str) -> None:
    runs(impl)
    made_tables, keys = made(*shape)
    tables = made_tables.numbers()
    batch, heads, group, _, _, rows = shape
    draw = torch.Generator().manual_seed(1)
    listed = torch.randint(-1, rows + 2, (batch, heads * (group if each else 1), 67), generator=draw).int()
    every = product_codes_reference.logits(tables, keys)
    own = listed.view(batch, heads, -1, 67).expand(-1, -1, group, -1)
    outside = (own < 0) | (own >= rows)
    expected = every.gather(3, own.clamp(0, rows - 1).long()).masked_fill(outside, -torch.inf)
    assert bool(expected.isfinite().any())
    torch.testing.assert_close(dispatch.logits(tables, keys, listed, impl=impl), expected)
