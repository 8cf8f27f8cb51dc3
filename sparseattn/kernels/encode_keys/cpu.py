"""Keys rounded to a few bits in compiled code: what levels are made of, and codes packed as they are stored."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, flat_rows, put, read, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import BYTE, FLOAT, LANES, MAGIC, WORD
from sparseattn.kernels.quantized_keys import packing


@njit
def _bounds(keys, at, step, rows, size, least, most):
    for d in range(size):
        least[d] = most[d] = read(keys, at + d)
    for row in range(1, rows):
        first = at + row * step
        for d in range(size):
            x = read(keys, first + d)
            least[d] = x if x < least[d] else least[d]
            most[d] = x if x > most[d] else most[d]


@entry(parallel=True, cache=True, nogil=True)
def _extents(keys, steps, rows, least, most):
    """least, most: `[B,H,n/rows,D]`."""
    batch, heads, groups, size = least.shape
    for unit in prange(batch * heads * groups):
        which, group = unit // groups, unit % groups
        b, h = which // heads, which % heads
        at = b * steps[0] + h * steps[1] + group * rows * steps[2]
        _bounds(keys, at, steps[2], rows, size, least[b, h, group], most[b, h, group])


@njit(fastmath=set(FAST))
def _sides(keys, at, step, rows, size, below, above, middles):
    """below, above: `[D]`, replaced by the means of the numbers below and above the middle of what they reach over;
    both the one below where none is above."""
    for d in range(size):
        middles[d] = (below[d] + above[d]) / np.float32(2)
        below[d] = above[d] = middles[size + d] = 0
    for row in range(rows):
        first = at + row * step
        for d in range(size):
            x = read(keys, first + d)
            upper = x > middles[d]
            above[d] += x if upper else np.float32(0)
            below[d] += np.float32(0) if upper else x
            middles[size + d] += np.float32(1) if upper else np.float32(0)
    for d in range(size):
        many = middles[size + d]
        below[d] /= rows - many
        above[d] = above[d] / many if many > 0 else below[d]


@entry(parallel=True, cache=True, nogil=True)
def _means(keys, steps, rows, below, above):
    """below, above: `[B,H,n/rows,D]`."""
    batch, heads, groups, size = below.shape
    for unit in prange(batch * heads * groups):
        which, group = unit // groups, unit % groups
        b, h = which // heads, which % heads
        at = b * steps[0] + h * steps[1] + group * rows * steps[2]
        low, high = below[b, h, group], above[b, h, group]
        _bounds(keys, at, steps[2], rows, size, low, high)
        _sides(keys, at, steps[2], rows, size, low, high, np.empty(2 * size, np.float32))


def extremes(keys: Tensor, rows: int, levels: str) -> tuple[Tensor, Tensor]:
    """As `dispatch.extremes`."""
    batch, heads, new, size = keys.shape
    low, high = torch.empty(2, batch, heads, new // rows, size)
    means = levels == "means"
    with ONE_AT_A_TIME:
        use_threads((2 if means else 1) * keys.numel())
        (_means if means else _extents)(*flat_rows(keys), rows, low.numpy(), high.numpy())
    return low, high


@intrinsic
def _byte(typing, number):
    """Return a float32 from 0 to 255 rounded to an integer, to even where two are as near."""

    def code(context, builder, signature, arguments):
        moved = builder.fadd(arguments[0], ir.Constant(FLOAT, MAGIC))
        return builder.trunc(builder.bitcast(moved, WORD), BYTE)

    return types.uint8(types.float32), code


@njit
def _coded(keys, at, step, rows, size, low, low_at, by, by_at, last, bits, words, lows, steps, codes, packed, p):
    """One group: codes of each row, packed into words `packed[p:]` of int32."""
    planes = 8 // bits
    for d in range(size):
        lows[d], width = read(low, low_at + d), read(by, by_at + d)
        steps[d] = width if width > 0 else np.float32(1)
    for row in range(rows):
        first = at + row * step
        for d in range(size):
            code = (read(keys, first + d) - lows[d]) / steps[d]
            code = code if code > 0 else np.float32(0)
            put(codes, d, _byte(code if code < last else last))
        for plane in range(1, planes):
            for j in range(4 * words):
                codes[j] |= codes[plane * 4 * words + j] << np.uint8(plane * bits)
        row_words = codes.view(np.uint32)
        to = p + (row // LANES) * LANES * words + row % LANES
        for word in range(words):
            packed[to + word * LANES] = row_words[word]


@entry(parallel=True, cache=True, nogil=True)
def _encode(keys, steps, rows, size, heads, low, by, bits, words, packed):
    """low, by: flat `[B,H,n/rows,D]`; packed: `[B*H,n/rows,rows*W]` words."""
    lists, groups = packed.shape[:2]
    line, last = packed.reshape(-1), np.float32((1 << bits) - 1)
    for unit in prange(lists * groups):
        which, group = unit // groups, unit % groups
        b, h = which // heads, which % heads
        lows, widths = np.empty(size, np.float32), np.empty(size, np.float32)
        codes = np.zeros(4 * words * (8 // bits), np.uint8)
        at = b * steps[0] + h * steps[1] + group * rows * steps[2]
        _coded(keys, at, steps[2], rows, size, low, unit * size, by, unit * size, last, bits, words, lows, widths,
               codes, line, unit * rows * words)  # fmt: skip


def packed_codes(keys: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """As `dispatch.packed_codes`, of levels without a grid."""
    batch, heads, new, size = keys.shape
    rows, words = new // low.shape[2], packing.words(size, bits)
    packed = torch.empty(batch, heads, new // rows, rows * 4 * words, dtype=torch.uint8)
    with ONE_AT_A_TIME:
        use_threads(8 * keys.numel())
        _encode(
            *flat_rows(keys), rows, size, heads, storage_of(low.contiguous()), storage_of(step.contiguous()), bits,
            words, packed.view(torch.int32).numpy().view(np.uint32).reshape(batch * heads, -1, rows * words),
        )  # fmt: skip
    return packed
