"""Softmax over numbers that lie one after the other, 16 at a time, in compiled code."""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_rows import FAST
from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, every, larger, place_in, powers, splat


@intrinsic
def exponentials(typing, numbers, at, count, highest):
    """Replace `numbers[at:at + count]`, `count` a multiple of 16, by 2 to their distance from `highest`, which none of
    them is above; return the sum. What is no number stays so."""

    def code(context, builder, signature, arguments):
        numbers_, at_, count_, highest_ = arguments
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(every(FLOATS, 0.0), total)
        peak = splat(builder, highest_, FLOATS)
        none, lanes = ir.Constant(at_.type, 0), ir.Constant(at_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, lanes, intp=at_.type) as (n, _):
            to = place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS)
            x = builder.load(to, align=4)
            out = builder.fcmp_ordered("==", x, every(FLOATS, -math.inf))
            unlike = builder.fcmp_unordered("uno", x, x)
            power = builder.select(out, every(FLOATS, 0.0), powers(builder, builder.fsub(x, peak)))
            x = builder.select(unlike, x, power)
            builder.store(x, to, align=4)
            builder.store(builder.fadd(x, builder.load(total)), total)
        kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
        add = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(add, [ir.Constant(FLOAT, 0.0), builder.load(total)], fastmath=FAST)

    return types.float32(numbers, types.intp, types.intp, types.float32), code


@intrinsic
def peak_of(typing, numbers, at, count):
    """Return the largest of `numbers[at:at + count]`, `count` a multiple of 16; what is no number is passed over."""

    def code(context, builder, signature, arguments):
        numbers_, at_, count_ = arguments
        top = cgutils.alloca_once(builder, FLOATS)
        builder.store(every(FLOATS, -math.inf), top)
        none, lanes = ir.Constant(at_.type, 0), ir.Constant(at_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, lanes, intp=at_.type) as (n, _):
            x = builder.load(place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS), align=4)
            builder.store(larger(builder, x, builder.load(top)), top)
        kind = ir.FunctionType(FLOAT, [FLOATS])
        most = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        return builder.call(most, [builder.load(top)])

    return types.float32(numbers, types.intp, types.intp), code
