"""Attention over rows of few bits: `attend_coded` checks what it is given and takes the implementation that fits."""

from __future__ import annotations

import math
from numbers import Real

from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.attend_quantized.reference import CodedRows
from sparseattn.kernels.implementations import Operation
from sparseattn.utils.tensors import only_tensors

ATTEND = Operation(__package__, "torch", "numba", "triton")


def attend_coded(
    query: Tensor,
    rows: CodedRows,
    selection: Selection,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of one query per head over the rows of a few bits that a selection names: what `attend`
    gives over `rows.decoded()`.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        rows: N rows; those that nobody names may hold anything.
        selection: rows chosen, counted from 0; places from N on are not read. Spans of one head are disjoint. Its bias
            is added to their logits.
        scale: factor of the logits, a finite number, default `1/sqrt(D)`.
        impl: "torch" (the specification), "numba" or "triton"; None: Triton on a CUDA device that has it, numba's code
            on the CPU where it is installed and takes the dtype, torch elsewhere. A named one runs or raises. In 16
            bits Triton's kernel rounds what it has read back to the query's dtype, as a model's own rows are.

    Returns:
        out `[B,H,G,D]` in the query's dtype; lse `[B,H,G]` float32 (float64 for float64). A head that reads no row
        gives 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a scale that is no finite number, or an unknown `impl`.
        RuntimeError: an `impl` that cannot run.
    """
    _check(query, rows, selection)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    elif not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"scale is a finite number, or None for 1/sqrt(D), got {scale!r}")
    learns = query.requires_grad or (selection.bias is not None and selection.bias.requires_grad)
    kernel = ATTEND.pick(impl, query.device, query.dtype, learns)
    return kernel.attend(query, rows, selection, scale)


def _check(query: Tensor, rows: CodedRows, selection: Selection) -> None:
    only_tensors(query=query)
    if not isinstance(rows, CodedRows):
        raise ValueError(f"attend_coded takes rows of a few bits, CodedRows, got {type(rows).__name__}")
    wanted = *rows.keys.shape[:2], "G", rows.size
    if query.ndim != 4 or (*query.shape[:2], "G", query.shape[3]) != wanted:
        raise ValueError(
            f"a query of these rows is [B,H,G,D] = [{', '.join(map(str, wanted))}], got {list(query.shape)}"
        )
    if not query.is_floating_point() or not query.device == rows.keys.device == selection.start.device:
        raise ValueError(
            f"a query is of a floating dtype, on the device of rows and selection, got {query.dtype} on "
            f"{query.device}, {rows.keys.device} and {selection.start.device}"
        )
    batch, heads, group, _ = query.shape
    if tuple(selection.start.shape[:2]) not in ((batch, heads), (batch, heads * group)):
        raise ValueError(
            f"a selection for this query is [B,Hs,S] with B = {batch} and Hs = {heads} (per KV head) or "
            f"{heads * group} (per query head), got {list(selection.start.shape)}"
        )
