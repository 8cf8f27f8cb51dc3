"""One operation, `attend`, in four implementations with one signature, which stand in `attend/`.

`impl="reference"` is `reference.py`, the specification; "gather" is `gather.py`, torch that runs anywhere at a cost
proportional to the budget; "numba" is `cpu.py`, compiled for the CPU; "triton" is `gpu.py`, the fused kernel. `ATTEND`
is the table of them. `weights.py` is what rows got, for those who ask; `merge.py` combines attention over disjoint
rows.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend import block_table as paged
from sparseattn.kernels.attend import gather
from sparseattn.kernels.attend import reference as attend_reference
from sparseattn.kernels.attend.merge import merge
from sparseattn.kernels.attend.weights import weights as of_rows
from sparseattn.utils.tensors import STORED, only_tensors

__all__ = ["ATTEND", "attend", "merge", "why_not_numba", "why_not_triton"]

DTYPES = (*STORED.values(), torch.float64)


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why `impl="triton"` cannot run on this device and dtype, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'sparseattn[triton]')"
    if dtype == torch.float64:
        return "the Triton kernel takes float32, float16 and bfloat16, not float64"
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        if dtype == torch.bfloat16:
            return (
                "Triton's interpreter computes wrong bfloat16 products; use float32 or float16 under TRITON_INTERPRET=1"
            )
        return None
    if device.type != "cuda":
        return f"Triton needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1, for tests)"
    return None


def why_not_numba(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why `impl="numba"` cannot run on this device and dtype, or None if it can."""
    if device.type != "cpu":
        return f"numba's code runs on the CPU, not on {device.type}"
    if dtype not in DTYPES or dtype == torch.float64:
        return f"numba's code takes float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return _missing_numba()


@functools.cache
def _missing_numba() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'sparseattn[numba]')"
    return None


def _anywhere(device: torch.device, dtype: torch.dtype) -> None:
    """Nothing keeps an implementation in torch from running."""


def _numba(*inputs: Any) -> tuple[Tensor, Tensor]:
    from sparseattn.kernels.attend import cpu as attend_cpu  # imported on first use: numba is optional

    return attend_cpu.attend(*inputs)


def _triton(*inputs: Any) -> tuple[Tensor, Tensor]:
    from sparseattn.kernels.attend import gpu as attend_gpu  # imported on first use: Triton is optional

    return attend_gpu.attend(*inputs)


# impl -> (why it cannot run on a device and dtype, or None; the function that runs).
ATTEND: dict[str, tuple[Callable[[torch.device, torch.dtype], str | None], Callable[..., tuple[Tensor, Tensor]]]] = {
    "reference": (_anywhere, attend_reference.attend),
    "gather": (_anywhere, gather.attend),
    "numba": (why_not_numba, _numba),
    "triton": (why_not_triton, _triton),
}


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
    """Exact attention of one query per head over the rows that `selection` and `bounds` name, and no others.

    Args:
        query: `[B,H,G,D]`, after RoPE; D from 1 to 256.
        keys, values: `[B,H,N,D]`, the query's dtype and device. Rows that nobody names may hold anything.
        selection: rows chosen, counted from `bounds.base`; spans of one head are disjoint. Its bias is added to their
            logits.
        bounds: the zones; None means no sink and no window, and a selection counted from row 0. They lie within N,
            which is checked on the CPU only: on a GPU the check would make the host wait.
        scale: factor of the logits, a finite number, default `1/sqrt(D)`.
        impl: "reference", "gather", "numba" or "triton". None takes Triton on a CUDA device that has it; on the CPU
            numba's code where it is installed, for float32, float16 and bfloat16 rows whose elements are adjacent; and
            gather elsewhere. A named implementation runs or raises, it is never replaced by another.
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
    elif not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"scale is a finite number, or None for 1/sqrt(D), got {scale!r}")
    if bounds is None:
        rows = keys.shape[2] if block_table is None else keys.shape[2] * block_table.shape[1]
        bounds = Bounds.of(query.shape[0], rows, device=keys.device)
    if impl is None:
        impl = _default(query, keys, values, selection.bias)
    elif impl not in ATTEND:
        raise ValueError(f"impl is one of {', '.join(ATTEND)} or None, got {impl!r}")
    why_not, run = ATTEND[impl]
    reason = why_not(query.device, query.dtype)
    if reason is not None:
        raise RuntimeError(f'impl="{impl}" cannot run: {reason}')
    out, lse = run(query, keys, values, selection, bounds, scale, block_table)
    if not weights:
        return out, lse
    if impl == "reference":
        return out, lse, attend_reference.weights(query, keys, selection, bounds, scale, block_table)
    return out, lse, of_rows(query, keys, selection, bounds, scale, block_table, lse)


def _default(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> str:
    if query.is_cuda:
        return "triton" if why_not_triton(query.device, query.dtype) is None else "gather"
    adjacent = keys.stride(-1) == values.stride(-1) == 1
    learns = any(part is not None and part.requires_grad for part in (query, keys, values, bias))
    return "numba" if adjacent and not learns and why_not_numba(query.device, query.dtype) is None else "gather"


def _check(
    query: Tensor, keys: Tensor, values: Tensor, selection: Selection, bounds: Bounds | None, table: Tensor | None
) -> None:
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
        held = getattr(bounds, name)
        if held.shape != (batch,) or held.dtype != torch.int32 or held.device != device:
            raise ValueError(
                f"bounds.{name} is int32 [B] = [{batch}] on {device}, got {held.dtype} {list(held.shape)} on "
                f"{held.device}"
            )
        numbers = held.tolist() if on_host else []
        if numbers and not 0 <= min(numbers) <= max(numbers) <= rows:
            raise ValueError(f"bounds.{name} lies within the {rows} rows of the keys, got {numbers}")
    if not 0 <= bounds.base <= rows:
        raise ValueError(f"bounds.base is a row of the keys, 0 to {rows}, got {bounds.base}")
