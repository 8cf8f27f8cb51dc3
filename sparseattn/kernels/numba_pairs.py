"""Products of pairs of bfloat16 in compiled code (AVX-512 BF16): each number of a register of floats grows by two.

Products of bfloat16 are exact in float32, and so only their sum is rounded. Numbers below 2^-126 count as 0.
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core.codegen import get_host_cpu_features

from sparseattn.kernels.numba_vectors import call

NAMED = 17  # of LLVM: from here on its instruction takes numbers of this type, before it took words


class BFloat(ir.Type):
    """LLVM's bfloat16, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def compiled_for_pairs() -> bool:
    """Return whether numba compiles for a processor with these products (`NUMBA_CPU_FEATURES`, or the machine's)."""
    features = numba.config.CPU_FEATURES
    there = set((get_host_cpu_features() if features is None else features).split(","))
    return {"+avx512bf16", "+avx512vl"} <= there and llvmlite.binding.llvm_version_info[0] >= NAMED


@functools.cache
def pairs() -> bool:
    """Return whether compiled code may use them here."""
    return compiled_for_pairs()


def pairs_added(builder, totals, left, right):
    """Return `totals`, floats, plus the products of the pairs that words hold; `totals` for a processor without these
    products, where nobody may call what holds them (`pairs`)."""
    if not compiled_for_pairs():
        return totals
    lanes = totals.type.count
    kind = ir.VectorType(BFloat(), 2 * lanes)
    given = (builder.bitcast(words, kind) for words in (left, right))
    return call(builder, f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", totals.type, totals, *given)
