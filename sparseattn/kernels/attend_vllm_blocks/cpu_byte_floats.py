"""8-bit floats of a cache (FP8) as compiled code reads them: e4m3 and e5m2, https://arxiv.org/abs/2209.05433.

Both are 16-bit floats of which some bits are missing: e5m2 is the upper half of one, e4m3 has an exponent of four bits
that is smaller by 8. So 16 numbers become floats by one shift and one conversion, subnormal ones too. What e4m3 is too
small by, and the scale that a cache is kept at, are factors of the logits and of the output. vLLM writes no NaN, and
e4m3's is read as 480.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.kernels.numba_rows import KINDS, storage_of
from sparseattn.kernels.numba_vectors import FLOATS, LANES, every

SHORTS, HALVES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)
BYTES: dict[torch.dtype, tuple[torch.dtype, float]] = {  # how compiled code is told of them, and its numbers' factor
    torch.float8_e4m3fn: (torch.uint8, 256.0),
    torch.float8_e5m2: (torch.int8, 1.0),
}


def kind_of(packed: Tensor) -> Any:
    """Return what `array_at` takes a cache's numbers for."""
    return KINDS[BYTES[packed.dtype][0] if packed.dtype in BYTES else packed.dtype]


def flat(packed: Tensor) -> Any:
    """Return `storage_of` a cache."""
    return storage_of(packed.view(BYTES[packed.dtype][0]) if packed.dtype in BYTES else packed)


def factors(cache: BlockCache) -> tuple[Any, Any]:
    """Return what the compiled code's keys and values are to be multiplied by, float32."""
    own = BYTES[cache.packed.dtype][1] if cache.packed.dtype in BYTES else 1.0
    return np.float32(own * cache.key_scale), np.float32(own * cache.value_scale)


def widened_bytes(builder, loaded, number):
    """16 numbers, in the lower bytes of 16-bit words, as floats; the upper bytes are ignored."""
    if number == types.int8:  # e5m2
        bits = builder.shl(loaded, every(SHORTS, 8))
    else:
        sign = builder.and_(builder.shl(loaded, every(SHORTS, 8)), every(SHORTS, 0x8000))
        rest = builder.and_(builder.shl(loaded, every(SHORTS, 7)), every(SHORTS, 0x3F80))
        bits = builder.or_(sign, rest)
    return builder.fpext(builder.bitcast(bits, HALVES), FLOATS)
