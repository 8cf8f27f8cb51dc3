"""Rows of stored numbers in compiled code: read in place, widened in registers, multiplied, asked for ahead of use.

Numbers of 16 bits are widened in registers, so that memory is read at its stored size; sums are float32. Functions of
Python make of a tensor what compiled code takes: its storage as a flat array, and the steps in it.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from torch import Tensor

from sparseattn.kernels.numba_cache import njit

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}  # how compiled code is told of 16-bit floats
KINDS: dict[torch.dtype, Any] = {  # what compiled code takes the numbers of a tensor for: an array of none of them
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
    torch.uint8: np.empty(0, np.uint8),
    torch.bool: np.empty(0, np.uint8),
    torch.int32: np.empty(0, np.int32),
    torch.int64: np.empty(0, np.int64),
}
LINE = 64  # bytes of a cache line
LOG2E, LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
# Sums may be reordered, which vector instructions need, and rounded once; NaN and infinity keep their meaning.
FAST = ("reassoc", "contract", "nsz")


def widened(builder, value, number):
    if number == types.uint16:
        bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())
    if number == types.int16:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
    if number == types.float64:
        return builder.fptrunc(value, ir.FloatType())
    if number == types.int8:
        return builder.sitofp(value, ir.FloatType())
    if number == types.uint8:
        return builder.uitofp(value, ir.FloatType())
    return value


@intrinsic
def widen(typing, number):
    """Return a stored number as float32: float32 as it is, uint16 holds the bits of a bfloat16, int16 those of a
    float16."""

    def code(context, builder, signature, arguments):
        return widened(builder, arguments[0], number)

    return types.float32(number), code


def scope(builder):
    """Says that rows read and sums written never overlap, without which no loop over both is vectorised."""
    module = builder.module
    domain = module.add_metadata([ir.MetaDataString(module, "sparseattn")])
    return module.add_metadata([module.add_metadata([ir.MetaDataString(module, "rows"), domain])])


@intrinsic
def read(typing, array, place):
    """`widen(array[place])` of a flat array, without numba's check for negative places, which no vector code has."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        value = builder.load(builder.gep(data, [arguments[1]]))
        value.set_metadata("alias.scope", scope(builder))
        return widened(builder, value, array.dtype)

    return types.float32(array, types.intp), code


@intrinsic
def add_to(typing, array, place, number):
    """`array[place] += number` of a flat float32 array that no `read` in the loop touches."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        at = builder.gep(data, [arguments[1]])
        value = builder.load(at)
        value.set_metadata("noalias", scope(builder))
        builder.store(builder.fadd(value, arguments[2], flags=FAST), at).set_metadata("noalias", scope(builder))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), code


@intrinsic
def put(typing, array, place, number):
    """`array[place] = number` of a flat array that no `read` in the loop touches."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]])).set_metadata("noalias", scope(builder))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), code


@intrinsic
def put_float(typing, array, place, number):
    """`array[place] = number` of a flat array of stored numbers (`widen`), rounded to the nearest, half to even."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        value, word, short = arguments[2], ir.IntType(32), ir.IntType(16)
        if array.dtype == types.int16:
            value = builder.bitcast(builder.fptrunc(value, ir.HalfType()), short)
        elif array.dtype == types.uint16:
            bits = builder.bitcast(value, word)
            odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
            bits = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
            nan = builder.fcmp_unordered("uno", value, value)
            bits = builder.select(nan, ir.Constant(word, 0x7FC00000), bits)
            value = builder.trunc(builder.lshr(bits, ir.Constant(word, 16)), short)
        builder.store(value, builder.gep(data, [arguments[1]])).set_metadata("noalias", scope(builder))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), code


@intrinsic
def array_at(typing, kind, address, size):
    """Return a flat array of `size` numbers in memory that another holds, at `address`: of the dtype of the array
    `kind`, or of `kind` itself where it is a class of numpy's. Made of a tensor in tenths of a microsecond, where
    `numpy()` and views take some."""
    number = kind.dtype

    def code(context, builder, signature, arguments):
        array = context.make_array(signature.return_type)(context, builder)
        data = builder.inttoptr(arguments[1], context.get_data_type(number).as_pointer())
        width = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(number)))
        populate_array(array, data=data, shape=[arguments[2]], strides=[width], itemsize=width, meminfo=None)
        return array._getvalue()

    return types.Array(number, 1, "C")(kind, types.intp, types.intp), code


@intrinsic
def prefetch(typing, array, place):
    """Asks for the cache line of the element at `place` of an array, counted in its storage, ahead of its use."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read_often = [ir.Constant(word, number) for number in (0, 3, 1)]
        builder.call(ask, [builder.bitcast(builder.gep(data, [arguments[1]]), byte), *read_often])
        return context.get_dummy_value()

    return types.void(array, types.intp), code


@njit
def fetch(rows, at, size):
    """Asks for the `size` numbers from place `at` on of an array's storage, so that many rows come at once."""
    for d in range(0, size, LINE // rows.itemsize):
        prefetch(rows, at + d)


@intrinsic
def _power_of_two(typing, exponent):
    """2 to the int32 `exponent`, -126 to 127."""

    def code(context, builder, signature, arguments):
        word = ir.IntType(32)
        bits = builder.shl(builder.add(arguments[0], ir.Constant(word, 127)), ir.Constant(word, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), code


@njit(fastmath=set(FAST))
def exp2(x):
    """2 to the float32 x <= 0, within 2 units in the last place; below 2^-126 that."""
    x = np.float32(-126) if x < np.float32(-126) else x  # NaN stays
    whole = np.floor(x + np.float32(0.5))
    f = x - whole  # the series of 2^f, whose next term is below 6e-9
    p = np.float32(1.5252733e-05)
    p = p * f + np.float32(1.5403530e-04)
    p = p * f + np.float32(1.3333558e-03)
    p = p * f + np.float32(9.6181291e-03)
    p = p * f + np.float32(5.5504109e-02)
    p = p * f + np.float32(2.4022651e-01)
    p = p * f + np.float32(6.9314718e-01)
    p = p * f + np.float32(1)
    return p * _power_of_two(np.int32(whole))


@njit(fastmath=set(FAST))
def dot(query, q, rows, at, size):
    total = np.float32(0)
    for d in range(size):
        total += read(query, q + d) * read(rows, at + d)
    return total


@njit(fastmath=set(FAST))
def dot4(query, q, rows, at, size):
    """Return the products of one row with four query heads, for which it is widened once."""
    a, b, c, e = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for d in range(size):
        x = read(rows, at + d)
        a += read(query, q + d) * x
        b += read(query, q + size + d) * x
        c += read(query, q + 2 * size + d) * x
        e += read(query, q + 3 * size + d) * x
    return a, b, c, e


def address_of(part: Tensor) -> tuple[Any, int]:
    """Return what `array_at` takes of a tensor whose numbers are adjacent; it must live as long as what is made of
    it."""
    return KINDS[part.dtype], part.data_ptr()


def rows_at(rows: Tensor) -> tuple[Any, int, tuple[int, ...]]:
    """Return what `array_at` takes of `[B,H,N,D]`, which must live as long, and the steps of b, h and n in it."""
    steps = rows.stride()
    if steps[3] != 1 and rows.shape[3] > 1:
        raise ValueError(
            f"the compiled CPU kernel reads rows whose elements are adjacent: the last stride is 1, got {steps[3]}"
        )
    return KINDS[rows.dtype], rows.data_ptr(), steps[:3]


def as_bits(part: Tensor) -> Any:
    """`part` as a contiguous numpy array, 16-bit floats as their bits."""
    part = part.contiguous()
    bits = BITS.get(part.dtype)
    return (part if bits is None else part.view(bits)).numpy()


def flat_rows(rows: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return the storage of `[B,H,N,D]` from its first element to its last, a view, and the steps of b, h and n in
    it."""
    steps = rows.stride()
    if steps[3] != 1 and rows.shape[3] > 1:
        raise ValueError(
            f"the compiled CPU kernel reads rows whose elements are adjacent: the last stride is 1, got {steps[3]}"
        )
    return storage_of(rows), steps[:3]


def storage_of(part: Tensor) -> Any:
    """Return the storage of `part` from its first element to its last as a flat numpy array, a view."""
    if part.is_contiguous():
        flat = part.view(-1)
    else:
        shape, steps = part.shape, part.stride()
        last = 0 if 0 in shape else sum(map(operator.mul, shape, steps)) - sum(steps) + 1
        flat = part.as_strided((last,), (1,))
    bits = BITS.get(flat.dtype)
    return (flat if bits is None else flat.view(bits)).numpy()


@njit(fastmath=set(FAST))
def _sum(numbers, many):
    total = np.float32(0)
    for i in range(many):
        total += read(numbers, i)
    return total


@njit  # not fastmath, under which what is not finite may be taken to be so
def all_finite(numbers, many):
    """Return whether the first `many` numbers are finite, and their sum too."""
    return np.isfinite(_sum(numbers, many))
