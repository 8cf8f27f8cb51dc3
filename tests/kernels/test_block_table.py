"""Attention over a paged store equals attention over the same rows in place; in the Triton kernel bit for bit."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from sparseattn import Bounds, Selection, attend
from sparseattn.kernels.attend.reference import named

TRITON = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
NUMBA = importlib.util.find_spec("numba") is not None
IMPLS = ["reference", "gather", *["numba"] * NUMBA, *["triton"] * TRITON]
B, H, G, D, ROWS = 3, 2, 2, 16, 90


def paged(rows: Tensor, size: int, spare: int, order: str) -> tuple[Tensor, Tensor]:
    """A store `[blocks,H,size,D]` of the rows `[B,H,N,D]` in shuffled blocks and a table with `spare` entries more.

    `order`: "HND" or "NHD", how the store lies in memory, or "FlashInfer", K and V side by side (only one is used).
    Blocks that hold no row are NaN, entries of the table behind the rows are no block.
    """
    batch, heads, number, width = rows.shape
    each = -(-number // size)
    place = torch.randperm(2 * batch * each)[: batch * each].view(batch, each)
    table = torch.full((batch, each + spare), 1 << 30, dtype=torch.int32)
    table[:, :each] = place
    blocks = 2 * batch * each
    if order == "HND":
        store = torch.full((blocks, heads, size, width), torch.nan, dtype=rows.dtype)
    elif order == "NHD":
        store = torch.full((blocks, size, heads, width), torch.nan, dtype=rows.dtype).transpose(1, 2)
    else:
        store = torch.full((blocks, 2, size, heads, width), torch.nan, dtype=rows.dtype)[:, 1].transpose(1, 2)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, each * size - number), value=torch.nan)
    store[place] = padded.unflatten(2, (each, size)).transpose(1, 2)
    return store, table


def inputs(per_query_head: bool, span: int, dtype: torch.dtype, zones: str, biased: bool = False):
    chosen = H * G if per_query_head else H
    ends = torch.tensor([ROWS, 61, 0 if zones == "ragged" else 60], dtype=torch.int32)
    sealed = torch.tensor([70, 50, 3 if zones == "ragged" else 50], dtype=torch.int32).minimum(ends.clamp(min=3))
    sink = torch.tensor([3, 3, 0], dtype=torch.int32)
    bounds = Bounds(sink, 3, sealed, ends.maximum(sealed if zones != "ragged" else torch.zeros_like(sealed)))
    page = torch.stack([torch.randperm(72 // span)[: 24 // span] for _ in range(B * chosen)]).view(B, chosen, -1)
    length = torch.randint(0, span + 1, page.shape)
    start = torch.where(length == 0, 1_234_567, page * span)
    bias = torch.where(length == 0, torch.nan, torch.randn(length.shape)) if biased else None
    selection = Selection(start.int(), length.int(), span, bias=bias)
    read = named(selection, bounds, H, ROWS).any(2)[..., None]
    keys, values = torch.randn(2, B, H, ROWS, D).masked_fill(~read, torch.nan).to(dtype)
    return torch.randn(B, H, G, D).to(dtype), keys, values, selection, bounds


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("size", "order", "per_query_head", "span", "dtype", "zones"),
    [
        (16, "HND", False, 8, torch.float32, "even"),
        (16, "NHD", True, 8, torch.float16, "ragged"),
        (7, "FlashInfer", False, 1, torch.float32, "ragged"),
        (64, "NHD", True, 4, torch.float32, "even"),
        (1, "HND", False, 8, torch.float16, "ragged"),
    ],
)
def test_a_paged_store_gives_what_rows_in_place_give(
    impl: str, size: int, order: str, per_query_head: bool, span: int, dtype: torch.dtype, zones: str
) -> None:
    query, keys, values, selection, bounds = inputs(per_query_head, span, dtype, zones, biased=size == 7)
    expected, expected_lse = attend(query.double(), keys.double(), values.double(), selection, bounds, impl="reference")
    state = torch.get_rng_state()
    key_store, table = paged(keys, size, 3, order)
    torch.set_rng_state(state)
    value_store, same = paged(values, size, 3, order)
    assert torch.equal(table, same)
    out, lse = attend(query, key_store, value_store, selection, bounds, impl=impl, block_table=table)
    assert out.dtype == dtype
    unit = 2.0**-10 if dtype == torch.float16 else 2.0**-20
    torch.testing.assert_close(out.double(), expected, rtol=unit, atol=4 * unit)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
    in_place, in_place_lse = attend(query, keys, values, selection, bounds, impl=impl)
    if impl == "triton":  # the others add up in an order that depends on the number of rows
        assert torch.equal(out, in_place)
        assert torch.equal(lse, in_place_lse)


def test_bfloat16_and_float64_are_taken() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        query, keys, values, selection, bounds = inputs(False, 8, dtype, "even")
        state = torch.get_rng_state()
        key_store, table = paged(keys, 16, 0, "NHD")
        torch.set_rng_state(state)
        value_store, _ = paged(values, 16, 0, "NHD")
        expected, _ = attend(query, keys, values, selection, bounds, impl="reference")
        out, _ = attend(query, key_store, value_store, selection, bounds, block_table=table)
        torch.testing.assert_close(out, expected)


def test_only_rows_that_are_named_are_copied() -> None:
    """gather costs what the budget costs: no tensor as long as the store is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for made in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(made, Tensor) and made.untyped_storage().data_ptr() != held:
                    self.seen = max(self.seen, made.numel())
            return out

    store = torch.randn(4096, H, 16, D)
    held = store.untyped_storage().data_ptr()
    table = torch.randperm(4096).view(1, -1).int()
    bounds = Bounds.of(1, 4096 * 16, sink=4, sealed=4096 * 16 - 20)
    selection = Selection.pages(torch.arange(0, 4000, 500).expand(1, H, -1), 16)
    with Largest() as largest:
        attend(torch.randn(1, H, G, D), store, store, selection, bounds, impl="gather", block_table=table)
    assert largest.seen < store.numel() // 50


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), r"int32 \[B,blocks of a sequence\] with B = 1 on cpu, got"),
        (torch.zeros(1, 3, dtype=torch.int64), "got torch.int64"),
        (torch.zeros(3, dtype=torch.int32), r"got torch.int32 \[3\]"),
        (torch.tensor([[0, 5, 4]], dtype=torch.int32), r"blocks 0 to 4 .* got 5 at \[0,1\]"),
        (torch.tensor([[0, -1, 4]], dtype=torch.int32), r"got -1 at \[0,1\]"),
        (torch.tensor([[0]], dtype=torch.int32), "bounds.sealed lies within the 8 rows"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: Tensor, sentence: str) -> None:
    store = torch.zeros(5, 2, 8, 16)
    bounds = Bounds.of(1, 20, sink=1)
    with pytest.raises(ValueError, match=sentence):
        attend(torch.zeros(1, 2, 1, 16), store, store, Selection.none(1, 2), bounds, block_table=table)


def test_a_store_without_blocks_is_refused() -> None:
    store, table = torch.zeros(0, 2, 8, 16), torch.zeros(1, 0, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"has blocks and rows in them, got \[0, 2, 8, 16\]"):
        attend(torch.zeros(1, 2, 1, 16), store, store, Selection.none(1, 2), block_table=table)
