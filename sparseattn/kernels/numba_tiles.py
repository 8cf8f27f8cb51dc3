"""Matrix tiles (AMX) in compiled code: products of bfloat16, 16 rows with 16 columns at a time, summed in float32.

A tile register holds up to 16 rows of 64 bytes; `shaped` says how many of which. `multiplied` adds to a tile of sums
`[M,16]` the product of `[M,2K]` and of 2K rows with 16 columns, of which two rows lie in one, number by number.
Products of bfloat16 are exact in float32, and so only their sum is rounded.

Who shapes tiles gives them back by `released`, so that no other code of the thread meets them. Linux lets a process use
tiles once it has asked (`tiles`).
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import ctypes
import functools
import sys

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_vectors import BYTE, FLOATS, LANES, WORDS, call, every, place_in

TILE_ROWS = 16  # and words of 32 bits of a row
PAIR = 2 * TILE_ROWS  # bfloat16 numbers of a tile's row
TILE_QUERIES = TILE_ROWS // 2  # of a tile of weights, each with two rows (`halved`)
CHANNELS = 4 * TILE_ROWS  # whose sums are in four tiles at a time
TILE_SHAPES = 64  # bytes that say what tiles are like
ASK, TILE_DATA, PERMISSION = 158, 18, 0x1023  # arch_prctl, what is asked for, and ARCH_REQ_XCOMP_PERM, on x86-64
WIDE = ir.IntType(64)


def compiled_for_tiles() -> bool:
    """Return whether numba compiles for a processor with tiles of bfloat16 (`NUMBA_CPU_FEATURES`, or the machine's)."""
    features = numba.config.CPU_FEATURES
    there = set((get_host_cpu_features() if features is None else features).split(","))
    return {"+amx-tile", "+amx-bf16", "+avx512bw"} <= there


@functools.cache
def tiles() -> bool:
    """Return whether compiled code may use tiles here. The first call asks Linux for them, for all threads."""
    if not compiled_for_tiles() or sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ASK, PERMISSION, TILE_DATA) == 0


def _emit(builder, name, *inputs):
    """Emit an instruction; nothing for a processor without tiles, where nobody may call what holds it (`tiles`)."""
    if compiled_for_tiles():
        call(builder, f"llvm.x86.{name}", ir.VoidType(), *inputs)


def _register(literal):
    return ir.Constant(BYTE, literal.literal_value)


def _bytes_at(context, builder, array, value, place):
    return place_in(context, builder, array, value, place, BYTE)


@intrinsic
def begin(typing, shapes):
    """Let tiles have `shapes`, and be 0."""

    def code(context, builder, signature, arguments):
        _emit(builder, "ldtilecfg", _bytes_at(context, builder, shapes, arguments[0], ir.Constant(WIDE, 0)))
        return context.get_dummy_value()

    return types.void(shapes), code


@njit
def shaped(shapes, tile, rows, width):
    """Note in `shapes`, 64 bytes, that a tile has so many rows of `width` bytes; `begin` loads them."""
    shapes[0] = 1
    shapes[48 + tile] = rows
    shapes[16 + 2 * tile] = width


@intrinsic
def released(typing):
    """Give all tiles back."""

    def code(context, builder, signature, arguments):
        _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic(prefer_literal=True)
def zeroed(typing, tile):
    """Fill a tile with 0."""
    if not isinstance(tile, types.IntegerLiteral):
        return None

    def code(context, builder, signature, arguments):
        _emit(builder, "tilezero", _register(tile))
        return context.get_dummy_value()

    return types.void(tile), code


@intrinsic(prefer_literal=True)
def loaded(typing, tile, array, place, step):
    """Fill a tile from a flat array: a row is `step` numbers from the next."""
    if not isinstance(tile, types.IntegerLiteral):
        return None

    def code(context, builder, signature, arguments):
        _, array_, place_, step_ = arguments
        width = builder.mul(step_, ir.Constant(WIDE, array.dtype.bitwidth // 8))
        _emit(builder, "tileloadd64", _register(tile), _bytes_at(context, builder, array, array_, place_), width)
        return context.get_dummy_value()

    return types.void(tile, array, types.intp, types.intp), code


@intrinsic(prefer_literal=True)
def stored(typing, tile, array, place, step):
    """Put a tile into a flat array: a row is `step` numbers from the next."""
    if not isinstance(tile, types.IntegerLiteral):
        return None

    def code(context, builder, signature, arguments):
        _, array_, place_, step_ = arguments
        width = builder.mul(step_, ir.Constant(WIDE, array.dtype.bitwidth // 8))
        _emit(builder, "tilestored64", _register(tile), _bytes_at(context, builder, array, array_, place_), width)
        return context.get_dummy_value()

    return types.void(tile, array, types.intp, types.intp), code


@intrinsic(prefer_literal=True)
def multiplied(typing, sums, left, right):
    """Add the product of two tiles to a third."""
    if not all(isinstance(tile, types.IntegerLiteral) for tile in (sums, left, right)):
        return None

    def code(context, builder, signature, arguments):
        _emit(builder, "tdpbf16ps", *(_register(tile) for tile in (sums, left, right)))
        return context.get_dummy_value()

    return types.void(sums, left, right), code


@intrinsic
def halved(typing, weights, w, count, halves, high, low):
    """Put `weights[w:w + count]`, `count` a multiple of 16, as bfloat16 at `halves[high:]` and what that leaves at
    `halves[low:]`."""

    def code(context, builder, signature, arguments):
        weights_, w_, count_, halves_, high_, low_ = arguments
        short = ir.VectorType(ir.IntType(16), LANES)
        none, lanes = ir.Constant(w_.type, 0), ir.Constant(w_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, lanes, intp=w_.type) as (n, _):
            x = builder.load(place_in(context, builder, weights, weights_, builder.add(w_, n), FLOATS), align=4)
            first = builder.and_(builder.bitcast(x, WORDS), every(WORDS, 0xFFFF0000))
            rest = builder.bitcast(builder.fsub(x, builder.bitcast(first, FLOATS)), WORDS)
            rest = builder.add(rest, every(WORDS, 0x8000))
            for bits, at in ((first, high_), (rest, low_)):
                to = place_in(context, builder, halves, halves_, builder.add(at, n), short)
                builder.store(builder.trunc(builder.lshr(bits, every(WORDS, 16)), short), to, align=2)
        return context.get_dummy_value()

    return types.void(weights, types.intp, types.intp, halves, types.intp, types.intp), code


@njit
def sums_zeroed():
    """Fill the tiles 0 to 3, of sums, with 0."""
    zeroed(0)
    zeroed(1)
    zeroed(2)
    zeroed(3)


@njit
def sums_grown(halves, w, wide, values, at, step):
    """Add to the tiles of sums the values of 64 channels weighted by `halves[w:]`, two rows a query that lie `wide`
    apart: 16 channels of values lie at `values[at:]`, the next `step` behind. The tiles 4 to 6 are overwritten."""
    loaded(4, halves, w, wide)
    loaded(5, values, at, PAIR)
    multiplied(0, 4, 5)
    loaded(6, values, at + step, PAIR)
    multiplied(1, 4, 6)
    loaded(5, values, at + 2 * step, PAIR)
    multiplied(2, 4, 5)
    loaded(6, values, at + 3 * step, PAIR)
    multiplied(3, 4, 6)


@njit
def sums_stored(out, apart, step):
    """Put the tiles of sums into `out`, each `apart` from the next: a row is `step` numbers from the next."""
    stored(0, out, 0, step)
    stored(1, out, apart, step)
    stored(2, out, 2 * apart, step)
    stored(3, out, 3 * apart, step)
