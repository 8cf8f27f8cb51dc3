"""What intrinsics of product codes are made of: registers of the widest shuffle of bytes, read and written by address.

A table of 16 bytes lies in a register, and one shuffle looks up the codes of as many rows as the register has bytes.
Prior art: faiss' fast scan, https://arxiv.org/abs/1704.07355.
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from sparseattn.kernels.numba_vectors import BYTE, FEATURES, WORD, call, every

# Bytes of a register whose shuffle looks up bytes; 0: there is none.
SHUFFLES = 64 if "+avx512bw" in FEATURES else 32 if "+avx2" in FEATURES else 0
WIDTH = SHUFFLES or 32
# Whether bytes, and numbers of 32 bits, that a mask names move together in one instruction.
COMPRESSES = "+avx512vbmi2" in FEATURES and SHUFFLES == 64
SHUFFLE = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}
BIT, SHORT, LONG = ir.IntType(1), ir.IntType(16), ir.IntType(64)
BYTES, SHORTS, TABLE = ir.VectorType(BYTE, WIDTH), ir.VectorType(SHORT, WIDTH // 2), ir.VectorType(BYTE, 16)
SIXTEEN_OF = ir.Constant(ir.VectorType(WORD, WIDTH), [lane % 16 for lane in range(WIDTH)])
NONE = 0x7FFF  # how far below the best a row is that is not valid


class CodesAt(NamedTuple):
    """Where codes lie, as numbers of the compiled code.

    Args:
        at: the address of the codes of the first part of keys.
        step: bytes from these to the next part's.
        count: parts.
    """

    at: Any
    step: Any
    count: Any


def long(number):
    return ir.Constant(LONG, number)


def moved(builder, at, number):
    return builder.add(at, long(number)) if number else at


def load(builder, at, kind):
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=1)


def store(builder, value, at):
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=1)


def shorts_of(builder, number):
    none = ir.Constant(SHORTS, ir.Undefined)
    first = builder.insert_element(none, number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, none, every(ir.VectorType(WORD, SHORTS.count), 0))


def both_codes(builder, at):
    """Of a register's rows the codes in the low bits of the bytes at `at`, and those in the high bits."""
    both, mask = load(builder, at, BYTES), every(BYTES, 15)
    above = builder.bitcast(builder.lshr(builder.bitcast(both, SHORTS), every(SHORTS, 4)), BYTES)
    return builder.and_(both, mask), builder.and_(above, mask)


def table_at(builder, at):
    table = load(builder, at, TABLE)
    return builder.shuffle_vector(table, table, SIXTEEN_OF)


def looked_up(builder, table, names):
    return call(builder, SHUFFLE[WIDTH], BYTES, table, names)


def for_groups(builder, share, body):
    """`body(heads, first)` for query heads four at a time, then two, then one."""
    with cgutils.for_range(builder, builder.lshr(share, long(2))) as loop:
        body(4, builder.shl(loop.index, long(2)))
    done = builder.and_(share, long(-4))
    for heads in (2, 1):
        some = builder.and_(share, long(heads))
        with builder.if_then(builder.icmp_unsigned("!=", some, long(0))):
            body(heads, done)
        done = builder.add(done, some)


def mask_of(builder, marks):
    """Return the marks `<n x i1>` of 64 rows or fewer as a number, the first row's its lowest bit."""
    bits = builder.bitcast(marks, ir.IntType(marks.type.count))
    return bits if marks.type.count == 64 else builder.zext(bits, LONG)
