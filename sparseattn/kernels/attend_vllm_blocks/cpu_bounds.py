"""The least and the largest numbers of an engine's pages in every channel, compiled by numba for the CPU.

A step makes few entries. Torch would take a dozen operations on small tensors for them, each of which waits for memory.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.kernels.attend_vllm_blocks.cpu_byte_floats import factors, kind_of
from sparseattn.kernels.attend_vllm_blocks.cpu_products import PAIRED, _halves, _widened
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, array_at, put_float
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, call, place_in
from sparseattn.kernels.page_bounds.bounds import PageBounds

MANY = 1 << 48  # numbers of an array whose end nobody asks for


@intrinsic(prefer_literal=True)
def _extremes(typing, pairs, cache, at, step, tiles):
    """Return the least and the largest of a channel in `tiles` times 16 rows, of which the first register is at
    `cache[at:]` and another `step` on; in pairs also those of the next channel. NaN is both."""
    if not isinstance(pairs, types.BooleanLiteral):
        return None
    paired = pairs.literal_value and cache.dtype in PAIRED

    def code(context, builder, signature, arguments):
        _, cache_, at_, step_, tiles_ = arguments

        def channels(tile):
            to = place_in(context, builder, cache, cache_, builder.add(at_, builder.mul(step_, tile)))
            return _halves(builder, to, cache.dtype) if paired else (_widened(builder, to, cache.dtype),)

        found = [
            (name, cgutils.alloca_once_value(builder, part))
            for part in channels(ir.Constant(at_.type, 0))
            for name in ("minimum", "maximum")
        ]
        with cgutils.for_range_slice(builder, ir.Constant(at_.type, 1), tiles_, ir.Constant(at_.type, 1)) as (n, _):
            parts = channels(n)
            for number, (name, kept) in enumerate(found):
                part = parts[number // 2]
                builder.store(call(builder, f"llvm.{name}.v16f32", FLOATS, builder.load(kept), part), kept)
        ends = [call(builder, f"llvm.vector.reduce.f{name}.v16f32", FLOAT, builder.load(kept)) for name, kept in found]
        return context.make_tuple(builder, signature.return_type, ends if paired else ends + ends)

    return types.UniTuple(types.float32, 4)(pairs, cache, types.intp, types.intp, types.intp), code


@njit
def _entry(paired, cache, key, form, factor, low, to, high, other):
    """Write the bounds of a page's keys, which begin at `cache[key:]`, times a factor to `low[to:]` and `high[other:]`;
    form: rows of a block and of a page, and D."""
    block, page, size = form
    if paired:
        for d in range(0, size, 2):
            least, most, next_least, next_most = _extremes(True, cache, key + d * LANES, LANES * size, page // LANES)
            put_float(low, to + d, factor * least)
            put_float(high, other + d, factor * most)
            put_float(low, to + d + 1, factor * next_least)
            put_float(high, other + d + 1, factor * next_most)
    else:
        for d in range(size):
            least, most, _, _ = _extremes(False, cache, key + d * block, LANES, page // LANES)
            put_float(low, to + d, factor * least)
            put_float(high, other + d, factor * most)


@entry(parallel=True, cache=True, nogil=True)
def _write_bounds(kind, packed, paired, layer, form, factor, places):
    """kind: what bounds are; packed: what rows are; layer: where rows, minima and maxima lie, the steps of block and
    head of rows, and of head and place of both bounds; form: KV heads, and what `_entry` takes; factor: of rows;
    places: `[n]`."""
    heads, block, page, size = form
    in_block = block // page
    cache = array_at(packed, layer[0], MANY)
    low = array_at(kind, layer[1], MANY)
    high = array_at(kind, layer[2], MANY)
    for unit in prange(places.shape[0] * heads):
        place, h = places[unit // heads], unit % heads
        row = place % in_block * page
        key = place // in_block * layer[3] + h * layer[4] + (row * size if paired else row)
        to, other = h * layer[5] + place * layer[6], h * layer[7] + place * layer[8]
        _entry(paired, cache, key, (block, page, size), factor, low, to, high, other)


def write_bounds(cache: BlockCache, bounds: PageBounds, places: Tensor, page: int) -> None:
    """As `dispatch.write_bounds`."""
    packed, low, high = cache.packed, bounds.minimum, bounds.maximum
    heads, size = packed.shape[1], cache.size
    steps = [part.stride(dim) for part, dims in ((packed, (0, 1)), (low, (1, 0)), (high, (1, 0))) for dim in dims]
    layer = np.array([packed.data_ptr(), low.data_ptr(), high.data_ptr(), *steps], np.int64)
    with ONE_AT_A_TIME:
        use_threads(places.numel() * heads * page * size, STEP)
        kinds, form = (KINDS[low.dtype], kind_of(packed)), (heads, cache.block, page, size)
        _write_bounds(*kinds, cache.packing == "pairs", layer, form, factors(cache)[0], places.numpy())
