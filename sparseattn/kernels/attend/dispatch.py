"""Exact attention of one query per head over the rows that a selection names, by the implementation that fits."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, overload

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend import block_table as paged
from sparseattn.kernels.attend import reference
from sparseattn.kernels.attend.weights import weights as of_rows
from sparseattn.kernels.implementations import Operation
from sparseattn.utils.tensors import STORED, only_tensors

ATTEND = Operation(__package__, "reference", "gather", "numba", "triton", fallback="gather")
DTYPES = (*STORED.values(), torch.float64)


@overload
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds | None = None,
    *,
    scale: float | None = None,
    impl: str | None = None,
    block_table: Tensor | None = None,
    weights: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds | None = None,
    *,
    scale: float | None = None,
    impl: str | None = None,
    block_table: Tensor | None = None,
    weights: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds | None = None,
    *,
    scale: float | None = None,
    impl: str | None = None,
    block_table: Tensor | None = None,
    weights: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Compute the exact attention of one query per head over the rows that `selection` and `bounds` name, and no
    others.

    Args:
        query: `[B,H,G,D]`, after RoPE; G 1 or more, D from 1 to 256.
        keys, values: `[B,H,N,D]`, the query's dtype and device. Rows that nobody names may hold anything.
        selection: rows chosen, counted from `bounds.base`; spans of one head are disjoint. Its bias is added to their
            logits.
        bounds: the zones; None means no sink and no window, and a selection counted from row 0. They lie within N,
            which is checked on the CPU only: on a GPU the check would make the host wait.
        scale: factor of the logits, a finite number, default `1/sqrt(D)`.
        impl: "reference", "gather", "numba" or "triton". None takes Triton on a CUDA device that has it, and on the CPU
            numba's code where it is installed, for float32, float16 and bfloat16; and gather elsewhere, where elements
            of a row are not adjacent, and where gradients are asked for. A named implementation runs or raises, it is
            never replaced by another.
        block_table: `[B,M]` int32: keys and values are a paged store `[blocks,H,block_size,D]`, and row r of sequence b
            lies in block `block_table[b, r // block_size]` at `r % block_size`, so that N is `M * block_size`. Entries
            behind a sequence's rows, and blocks that no entry names, may hold anything. Stores of another order are
            given as views: vLLM's and FlashAttention's `[blocks,block_size,H,D]` by `.transpose(1, 2)`, FlashInfer's
            `[blocks,2,...]` by `[:, 0]` and `[:, 1]`. Triton and numba read the rows where they lie; "gather"
            copies the rows named, "reference" all of them. Entries are checked on the CPU only.
        weights: whether to return what the selected rows weigh too, for which their keys are read once more.

    Returns:
        out `[B,H,G,D]` in the query's dtype; lse `[B,H,G]` float32 (float64 for float64 inputs), the natural
        logarithm of the sum of exponentiated logits. A head that reads no row gives 0 and -inf. With `weights` a third,
        `[B,H*G,S,span]` float32: softmax weights of the selected rows over everything attended. Sink and window are in
        the denominator, so that those of a head sum to 1 at most; places that are not used are 0.

    Raises:
        ValueError: no tensors; shapes, dtypes or devices that do not fit, a scale that is no finite number, or an
            unknown `impl`.
        RuntimeError: `impl="triton"` or "numba" where it cannot run.
    """
    _check(query, keys, values, selection, bounds, block_table)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    elif not is_scale(scale):
        raise no_scale(scale)
    if bounds is None:
        rows = keys.shape[2] if block_table is None else keys.shape[2] * block_table.shape[1]
        bounds = Bounds.of(query.shape[0], rows, device=keys.device)
    kernel = ATTEND.pick(impl, query.device, query.dtype, _torch_only(query, keys, values, selection.bias))
    if not query.numel():  # no sequence or no head
        return _nothing(query, selection, weights)
    out, lse = kernel.attend(query, keys, values, selection, bounds, scale, block_table)
    if not weights:
        return out, lse
    if kernel is reference:
        return out, lse, reference.weights(query, keys, selection, bounds, scale, block_table)
    return out, lse, of_rows(query, keys, selection, bounds, scale, block_table, lse)


def attend_stored(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` for a cache, which has checked what it stores, its bounds and the query: a selection of another shape
    or device is refused all the same, as a method may have made it.

    Raises:
        ValueError: such a selection, or an unknown `impl` or a scale that is no finite number.
        RuntimeError: see `attend`.
    """
    if scale is None:
        scale = query.shape[3] ** -0.5
    (batch, heads, group, _), (lists, chosen, _) = query.shape, selection.start.shape
    fits = lists == batch and chosen in (heads, heads * group) and selection.start.device == query.device
    number = type(scale) is float or isinstance(scale, Real)
    if not fits or not number or not math.isfinite(scale):
        return attend(query, keys, values, selection, bounds, scale=scale, impl=impl)
    kernel = ATTEND.pick(impl, query.device, query.dtype, _torch_only(query, keys, values, selection.bias))
    out: tuple[Tensor, Tensor] = kernel.attend(query, keys, values, selection, bounds, scale, None)
    return out


def _nothing(
    query: Tensor, selection: Selection, weights: bool
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Return what `attend` does for a query of no elements."""
    (batch, heads, group, _), places = query.shape, selection.start.shape[2]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out, lse = torch.zeros_like(query), query.new_zeros(batch, heads, group, dtype=wide)
    if not weights:
        return out, lse
    return out, lse, query.new_zeros(batch, heads * group, places, selection.span, dtype=torch.float32)


def is_scale(scale: object) -> bool:
    """Return whether it is a finite number, as a factor of logits is."""
    return isinstance(scale, Real) and math.isfinite(scale)


def no_scale(given: object) -> ValueError:
    """Return the refusal of a factor of logits that is no finite number."""
    return ValueError(f"scale is a finite number, or None for 1/sqrt(D), got {given!r}")


def _torch_only(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> bool:
    """Return whether compiled code is not for these tensors: it reads adjacent elements, and knows no gradients."""
    if not keys.stride(-1) == values.stride(-1) == 1:
        return True
    learns = query.requires_grad or keys.requires_grad or values.requires_grad
    return learns or (bias is not None and bias.requires_grad)


def _check(
    query: Tensor, keys: Tensor, values: Tensor, selection: Selection, bounds: Bounds | None, table: Tensor | None
) -> None:
    if not (isinstance(query, Tensor) and isinstance(keys, Tensor) and isinstance(values, Tensor)):
        only_tensors(query=query, keys=keys, values=values)
    if query.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"attend takes query [B,H,G,D] and keys and values [B,H,N,D], got {list(query.shape)}, "
            f"{list(keys.shape)} and {list(values.shape)}"
        )
    batch, heads, group, size = query.shape
    first, key_heads, stored, key_size = keys.shape
    if (batch if table is not None else first, key_heads, key_size) != (batch, heads, size):
        raise ValueError(
            f"query {list(query.shape)} and keys {list(keys.shape)} must agree in B, H and D: query is [B,H,G,D] with "
            f"H KV heads of G query heads each, keys are [B,H,N,D]"
        )
    if not group:
        raise ValueError(f"query is [B,H,G,D] with one query head of each KV head or more (G), got {list(query.shape)}")
    if not 1 <= size <= 256:
        raise ValueError(f"the head size D is 1 to 256, got {size}")
    if query.dtype not in DTYPES or not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"query, keys and values share one dtype of float32, float16, bfloat16, float64; got {query.dtype}, "
            f"{keys.dtype} and {values.dtype}"
        )
    if not query.device == keys.device == values.device == selection.start.device:
        raise ValueError(
            f"query, keys, values and selection are on one device, got {query.device}, {keys.device}, "
            f"{values.device} and {selection.start.device}"
        )
    if table is not None:
        paged.check(keys, batch, bounds, table)
    if bounds is not None:
        _check_bounds(bounds, batch, stored * (1 if table is None else table.shape[1]), keys.device)
    chosen = tuple(selection.start.shape[:2])
    if chosen not in ((batch, heads), (batch, heads * group)):
        raise ValueError(
            f"a selection for this query is [B,Hs,S] with B = {batch} and Hs = {heads} (per KV head) or "
            f"{heads * group} (per query head), got {list(selection.start.shape)}"
        )


def _check_bounds(bounds: Bounds, batch: int, rows: int, device: torch.device) -> None:
    on_host = device.type == "cpu"
    for name in ("sink", "sealed", "rows"):
        bound = getattr(bounds, name)
        if bound.shape != (batch,) or bound.dtype != torch.int32 or bound.device != device:
            raise ValueError(
                f"bounds.{name} is int32 [B] = [{batch}] on {device}, got {bound.dtype} {list(bound.shape)} on "
                f"{bound.device}"
            )
        numbers = bound.tolist() if on_host else []
        if numbers and not 0 <= min(numbers) <= max(numbers) <= rows:
            raise ValueError(f"bounds.{name} lies within the {rows} rows of the keys, got {numbers}")
    if not 0 <= bounds.base <= rows:
        raise ValueError(f"bounds.base is a row of the keys, 0 to {rows}, got {bounds.base}")
