"""Codes and levels of quantised keys as Triton kernels read them: places in memory, planes of codes, levels of a grid.

What the kernels cannot read is refused here too.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.kernels.quantized_keys import level_grid
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys


@triton.jit
def place(row, j, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Where byte j of a group's row lies in the group: words of 4 bytes, those of TILE rows beside each other."""
    if TILE == 1:
        return row * WIDE + j
    return row // TILE * (WIDE * TILE) + j // 4 * (4 * TILE) + row % TILE * 4 + j % 4


@triton.constexpr_function
def down_by(bits, plane):
    """By how much a plane's codes are shifted down: the highest bit of a byte is not one of bfloat16's mantissa."""
    return 1 if bits * plane + bits == 8 else 0


@triton.jit
def codes_of_plane(packed, BITS: tl.constexpr, plane: tl.constexpr, kind: tl.constexpr):
    """Codes of a plane times `2^(BITS * plane - down)`, of a float type.

    In 16 bits without a conversion, of which a multiprocessor does few: below the exponent of 128 (bfloat16) or 1,024
    the bits of an integer are a mantissa.
    """
    down: tl.constexpr = down_by(BITS, plane)
    codes = (packed >> down) & (((1 << BITS) - 1) << (BITS * plane - down))
    if kind == tl.bfloat16:
        return (codes.to(tl.uint16) | 0x4300).to(kind, bitcast=True) - tl.full([1, 1], 128.0, kind)
    if kind == tl.float16:
        return (codes.to(tl.uint16) | 0x6400).to(kind, bitcast=True) - tl.full([1, 1], 1024.0, kind)
    return codes.to(kind)


@triton.jit
def lows(low, mask, grid, head, d, here, D: tl.constexpr):
    """Return the lowest levels of channels d, where these are `here`, that `low` points at; where masked that of a
    0."""
    levels = tl.load(low, mask=mask, other=0).to(tl.float32)
    if grid is not None:
        anchor = tl.load(grid + head * 3 * D + d, mask=here, other=0.0)
        levels = levels * tl.load(grid + head * 3 * D + D + d, mask=here, other=0.0) + anchor
    return levels


@triton.jit
def steps(step, mask, grid, head, d, here, D: tl.constexpr):
    """Return the steps of channels d, where these are `here`, that `step` points at; 0 where masked."""
    wide = tl.load(step, mask=mask, other=0).to(tl.float32)
    if grid is not None:
        wide = wide * tl.load(grid + head * 3 * D + 2 * D + d, mask=here, other=0.0)
    return wide


def check(query: Tensor, keys: QuantizedKeys) -> None:
    """ValueError for what the kernels cannot read."""
    codes, low, step, grid = keys.codes, keys.low, keys.step, keys.grid
    if grid is None:
        fit, wanted = low.dtype == step.dtype and low.element_size() == 2, "levels of one 16-bit dtype"
    else:
        fit = (low.dtype, step.dtype) == (torch.int8, torch.uint8)
        wanted = "levels on a grid torch.int8 and torch.uint8"
        shape = *low.shape[:2], level_grid.NUMBERS, low.shape[3]
        if grid.dtype != torch.float32 or grid.shape != shape:
            raise ValueError(f"a grid is {list(shape)} in float32, got {list(grid.shape)} in {grid.dtype}")
    if not fit or codes.dtype != torch.uint8:
        raise ValueError(f"codes are torch.uint8 and {wanted}, got {codes.dtype}, {low.dtype} and {step.dtype}")
    strides = codes.stride(-1), low.stride(-1), step.stride(-1)
    if strides != (1, 1, 1):
        raise ValueError(f"codes and levels have adjacent elements, got last strides {strides}")
    if codes.shape[:3] != low.shape[:3] or low.shape != step.shape or low.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"a query [B,H,G,D], codes [B,H,N/rows,rows*4W] and levels [B,H,N/rows,D] agree in B, H and N/rows, got "
            f"{list(query.shape)}, {list(codes.shape)}, {list(low.shape)} and {list(step.shape)}"
        )
