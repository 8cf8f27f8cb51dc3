"""What queries give to rows, compiled by numba for the CPU: each key is read once, 16 at a time for many queries."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.attend.cpu_many import BY_ROWS, logits, prepare, products_for, room_for
from sparseattn.kernels.attend.cpu_sixteens import ROWS
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, as_bits, flat_rows, read
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import FLOATS, LANES, every, place_in, powers, splat
from sparseattn.kernels.row_scores.cpu import scores_of_part

PART = 16 * ROWS  # rows that a thread takes at a time


@intrinsic
def _add_powers(typing, out, to, numbers, at, count, total):
    """Add to `out[to:to + count]` 2 to what `numbers[at:]` lie above `total`, 1 at most; `count` is whole 16s."""

    def code(context, builder, signature, arguments):
        out_, to_, numbers_, at_, count_, total_ = arguments
        whole = splat(builder, total_, FLOATS)
        none, lanes = ir.Constant(at_.type, 0), ir.Constant(at_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, lanes, intp=at_.type) as (n, _):
            place = place_in(context, builder, out, out_, builder.add(to_, n), FLOATS)
            source = place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS)
            above = builder.fsub(builder.load(source, align=4), whole)
            most = every(FLOATS, 0.0)
            power = powers(builder, builder.select(builder.fcmp_ordered(">", above, most), most, above))
            builder.store(builder.fadd(builder.load(place, align=4), power), place, align=4)
        return context.get_dummy_value()

    return types.void(out, types.intp, numbers, types.intp, types.intp, types.float32), code


@njit
def _weights_of_part(query, scaled, share, size, scale, products, total, keys, at, step, rows, out):
    """`out[:rows]`: what `share` queries, flat as stored and as float32 times `scale`, give to rows from `at` on."""
    room = np.empty(room_for(share, size) if products != BY_ROWS else 0, np.uint8)
    held = np.empty((share + 15) // 16 * 16 * ROWS, np.float32)
    given, places, coming = np.empty(ROWS, np.float32), np.empty(ROWS, np.int64), np.empty(ROWS, np.int64)
    if products != BY_ROWS:
        prepare(room, query, share, size)
    for first in range(0, rows, ROWS):
        many = min(ROWS, rows - first)
        if products != BY_ROWS:
            for t in range(many):
                places[t] = at + (first + t) * step
                coming[t] = places[t] + ROWS * step
            logits((products, room, share, size, scale), (keys, places), many, (keys, coming), held)
        else:
            scores_of_part(scaled, share, size, keys, at + first * step, step, 0, many, held.reshape(-1, ROWS))
        given[:] = 0
        whole = (many + LANES - 1) // LANES * LANES  # what lies behind the last row is summed for nobody
        for g in range(share):
            if total[g] != np.inf:
                _add_powers(given, 0, held, g * ROWS, whole, total[g] * LOG2E)
        for t in range(many):
            out[first + t] = given[t]


@entry(parallel=True, cache=True, nogil=True)
def _weights_given(query, total, keys, steps, heads, scale, products, out):
    """query: `[B*H,M*D]`, stored numbers; total: `[B*H,M]`; scale: factor of logits of base 2; out: `[B*H,N]`."""
    (lists, rows), share = out.shape, total.shape[1]
    parts = (rows + PART - 1) // PART
    for work in prange(lists * parts):
        which, first = work // parts, work % parts * PART
        flat, scaled = query[which], np.empty(query.shape[1], np.float32)
        for d in range(len(scaled)):
            scaled[d] = read(flat, d) * scale
        at = which // heads * steps[0] + which % heads * steps[1] + first * steps[2]
        _weights_of_part(flat, scaled, share, len(scaled) // share, scale, products, total[which], keys, at, steps[2],
                         min(PART, rows - first), out[which, first:])  # fmt: skip


def weights_given(queries: Tensor, total: Tensor, keys: Tensor, scale: float) -> Tensor:
    """As `dispatch.weights_given`."""
    (batch, heads, share, size), rows = queries.shape, keys.shape[2]
    out = torch.zeros(batch, heads, rows)
    flat, steps = flat_rows(keys)
    with ONE_AT_A_TIME:
        use_threads(out.numel() * share * size)
        _weights_given(
            as_bits(queries.contiguous()).reshape(batch * heads, -1),
            total.float().contiguous().flatten(0, 1).numpy(),
            flat,
            steps,
            heads,
            np.float32(scale) * LOG2E,
            products_for(share, queries.dtype, size),
            out.flatten(0, 1).numpy(),
        )
    return out
