"""Vectors of 16 numbers in compiled code: what numba's intrinsics of several kernels are made of.

These functions write LLVM's instructions; numba compiles them into the kernels that use them.
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

# What numba compiles for: `NUMBA_CPU_FEATURES`, or the machine's.
FEATURES = set((numba.config.CPU_FEATURES or get_host_cpu_features()).split(","))
LANES = 16  # of a register of 64 bytes
LOWEST = float(np.float32(-3e38))  # taken from -inf: -inf less itself is no number
MAGIC = 1.5 * 2**23  # added to a float32, it leaves the nearest integer in the lowest bits
# log2(1 + y) / y between sqrt(1/2) and sqrt(2), within 9e-8; 2^f - 1 by powers of f from -1/2 to 1/2, within 2.1e-7.
LOGARITHM = (
    -0.146203534, 0.234209851, -0.248821806, 0.287075611, -0.360241986, 0.480924039, -0.721352759, 1.44269496,
)  # fmt: skip
POWER = (1.33908674e-03, 9.66637369e-03, 5.55035710e-02, 2.40223489e-01, 6.93147188e-01, 1.0)

BYTE, WORD, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
WORDS, FLOATS, MARKS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES), ir.VectorType(BYTE, LANES)


def every(kind, number):
    return ir.Constant(kind, [number] * kind.count)


def splat(builder, number, kind):
    none = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(none, number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, none, every(ir.VectorType(WORD, kind.count), 0))


def call(builder, name, kind, *inputs, flags=()):
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [x.type for x in inputs]), name)
    return builder.call(function, inputs, fastmath=flags)


def place_in(context, builder, array, value, place, kind=None):
    """Pointer to the element at `place` of an array, as one to a `kind`."""
    pointer = builder.gep(context.make_array(array)(context, builder, value).data, [place])
    return pointer if kind is None else builder.bitcast(pointer, kind.as_pointer())


def times_plus(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def ask_for(builder, pointer):
    """Asks for a line of memory, which need not be there."""
    byte = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, WORD, WORD, WORD])
    ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    builder.call(ask, [builder.bitcast(pointer, byte), *(ir.Constant(WORD, number) for number in (0, 3, 1))])


def series(builder, x, numbers):
    total = every(FLOATS, numbers[0])
    for number in numbers[1:]:
        total = times_plus(builder, total, x, every(FLOATS, number))
    return total


def powers(builder, x):
    """2 to each x up to 127; below 2^-126, and for NaN, that."""
    x = larger(builder, x, every(FLOATS, -126.0))
    moved = builder.fadd(x, every(FLOATS, MAGIC))
    f = builder.fsub(x, builder.fsub(moved, every(FLOATS, MAGIC)))
    exponent = builder.shl(builder.bitcast(moved, WORDS), every(WORDS, 23))
    return builder.bitcast(builder.add(builder.bitcast(series(builder, f, POWER), WORDS), exponent), FLOATS)


def logarithms(builder, x):
    """log2 of each positive normal x."""
    bits = builder.bitcast(x, WORDS)
    exponent = builder.ashr(builder.sub(bits, every(WORDS, 0x3F3504F3)), every(WORDS, 23))
    y = builder.bitcast(builder.sub(bits, builder.shl(exponent, every(WORDS, 23))), FLOATS)
    y = builder.fsub(y, every(FLOATS, 1.0))
    return times_plus(builder, series(builder, y, LOGARITHM), y, builder.sitofp(exponent, FLOATS))
