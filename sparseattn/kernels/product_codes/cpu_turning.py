"""What a key that is turned to each row's position adds to rows' sums, in compiled code, see `codes.Turning`.

A rotation by a position is one by that of the middle of a block of `VECTORS` positions and one by what is left, so that
products with a block's positions are sums of products with the same numbers (as in `Rope.products_below`). Pairs that
turn little within a block are taken together, as a polynomial of the position.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_centroids import OUTPUTS, VECTORS, multiply
from sparseattn.kernels.numba_rows import FAST, array_at
from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, call, every, place_in, times_plus
from sparseattn.kernels.product_codes.codes import Turning

NONE_ADDED: Any = np.zeros(16, np.int64)
TERMS = 6  # of the polynomial: with angles up to 1 it is off by a 720th of what its pairs add at most
AT_ONCE = 32  # times `VECTORS` positions
IRREGULAR = -(1 << 62)
PADDED = 128  # rows that kernels may read behind the last


@functools.lru_cache(maxsize=16)
def _angles(frequencies: tuple[float, ...], blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `round_turned` reads of a RoPE whose pairs turn by these radians a position.

    Pairs are in two lists, each filled up to whole registers, one at least: those that turn by more than 1 within half
    a block, F in all, and the others, S in all.

    Returns:
        which pair is which, `[F + S]` int64, -1 for one that fills up; cosines and sines at the middle of each block,
        `[blocks,2F + 2S]` float32; those of the first list at a block's positions, and behind these the powers of the
        position, `[2F + TERMS,VECTORS]`; and what the others count for in each term, `[TERMS,S]`.
    """
    half, turns = VECTORS // 2, torch.tensor(frequencies)
    order = turns.argsort(descending=True, stable=True)
    quick = int((turns * half > 1).sum())
    lists = []
    for part in (order[:quick], order[quick:]):
        fill = -len(part) % LANES if len(part) else LANES
        lists.append(torch.nn.functional.pad(part, (0, fill), value=-1))
    first, second = (turns[part.clamp(min=0)] for part in lists)
    middle, apart = torch.arange(half, blocks * VECTORS, VECTORS).float(), torch.arange(VECTORS).float() - half
    angles = [middle[:, None] * first, middle[:, None] * second]
    far = torch.cat([part for angle in angles for part in (angle.cos(), angle.sin())], 1)
    power, within = torch.arange(TERMS), apart[:, None] * first
    powers = (apart[:, None] / half) ** power / power.clamp(min=1).cumprod(0)
    near = torch.cat([within.cos(), within.sin(), powers], 1).mT
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    slow = signs[:, None] * (second * half) ** power[:, None]
    return torch.cat(lists), far.contiguous(), near.contiguous(), slow.contiguous()


def turning_numbers(turning: Turning | None, heads: int, size: int) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what `round_turned` takes of it, int64, and tensors that must live as long."""
    if turning is None:
        return NONE_ADDED, ()
    at, key, rope = turning.at.clamp(min=0), turning.key.float().contiguous(), turning.rope
    last = int(at.max()) if at.numel() else 0
    blocks = AT_ONCE * (last // (VECTORS * AT_ONCE) + 1)
    # By value: each layer has a RoPE of its own.
    order, far, near, slow = _angles(tuple(rope.inv_freq.tolist()), blocks)
    begins = _begins(at)
    # Whether there is one; addresses of keys, positions, first rows' positions, angles and a block's numbers; blocks,
    # R, whether interleaved, H, D and rows; addresses of the order and of the terms; F and S.
    numbers = np.array(
        [
            1, key.data_ptr(), at.data_ptr(), begins.data_ptr(), far.data_ptr(), near.data_ptr(), blocks, rope.rotated,
            rope.interleaved, heads, size, at.shape[1], order.data_ptr(), slow.data_ptr(),
            len(order) - slow.shape[1], slow.shape[1],
        ],
        np.int64,
    )  # fmt: skip
    return numbers, (key, at, begins, order, far, near, slow)


def _begins(at: Tensor) -> Tensor:
    """Return `[B]` int64, the position of row 0 where each row's is one more than the row's before, but for those at 0;
    `IRREGULAR` where some are not. Of padding in front it is below 0."""
    if not at.numel():
        return torch.zeros(len(at), dtype=torch.int64)
    places = torch.arange(at.shape[1])
    first = at.long()[:, -1] - places[-1]
    alike = ((first[:, None] + places).clamp(min=0) == at).all(1)
    return torch.where(alike, first, IRREGULAR)


def turning_room(share: int, rows: int, blocks: int) -> int:
    """Return the bytes that `round_turned` works in."""
    return 2 * share * (VECTORS * blocks + PADDED + rows + PADDED)


@intrinsic
def _turn_block(typing, across, along, far, at, fast, few, slow, left, to):
    """Write what a block's numbers are multiplied by to `left` from `to` on: cosines and sines of the first list, then
    the terms of the other. across, along: `[F + S]`; far: from `at` on; fast, few: F and S; slow: `[TERMS * S]`. All
    are float32 and flat."""

    def code(context, builder, signature, arguments):
        across_, along_, far_, at_, fast_, few_, slow_, left_, to_ = arguments
        arrays = {"across": (across, across_), "along": (along, along_), "far": (far, far_)}
        arrays |= {"slow": (slow, slow_), "left": (left, left_)}

        def place(name, index, kind=FLOATS):
            return place_in(context, builder, *arrays[name], index, kind)

        def turned(index, cosine, sine):
            u, v = (builder.load(place(name, index), align=4) for name in ("across", "along"))
            cos, sin = (builder.load(place("far", where), align=4) for where in (cosine, sine))
            back = builder.fneg(builder.fmul(u, sin))
            return times_plus(builder, u, cos, builder.fmul(v, sin)), times_plus(builder, v, cos, back)

        step = ir.Constant(at_.type, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(at_.type, 0), fast_, step, intp=at_.type) as (i, _):
            cosine = builder.add(at_, i)
            both = turned(i, cosine, builder.add(cosine, fast_))
            first = builder.add(to_, i)
            builder.store(both[0], place("left", first), align=4)
            builder.store(both[1], place("left", builder.add(first, fast_)), align=4)
        totals = [cgutils.alloca_once_value(builder, every(FLOATS, 0.0)) for _ in range(TERMS)]
        for total in totals:
            builder.store(every(FLOATS, 0.0), total)
        begin = builder.add(at_, builder.shl(fast_, ir.Constant(at_.type, 1)))
        with cgutils.for_range_slice(builder, ir.Constant(at_.type, 0), few_, step, intp=at_.type) as (i, _):
            cosine = builder.add(begin, i)
            both = turned(builder.add(fast_, i), cosine, builder.add(cosine, few_))
            for term, total in enumerate(totals):
                where = builder.add(i, builder.mul(few_, ir.Constant(at_.type, term)))
                by = builder.load(place("slow", where), align=4)
                builder.store(times_plus(builder, both[term % 2], by, builder.load(total)), total)
        behind = builder.add(to_, builder.shl(fast_, ir.Constant(at_.type, 1)))
        for term, total in enumerate(totals):
            whole = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, ir.Constant(FLOAT, 0.0),
                         builder.load(total), flags=FAST)  # fmt: skip
            builder.store(whole, place("left", builder.add(behind, ir.Constant(at_.type, term)), None))
        return context.get_dummy_value()

    index = types.intp
    return types.void(across, along, far, index, index, index, slow, left, index), code


@njit
def meet_queries(numbers, which, query, share, met):
    """Write what cosine and sine of each pair's angle count for in the products of a KV head's queries `[G*D]` float32
    with its key to `met` `[2,G,F + S]`, what does not turn and the least that products can be to `[2,G]` behind these.
    Return how far apart the least and the largest are, at the head where that is most."""
    wide, interleaved, size, both = numbers[7], numbers[8], numbers[10], numbers[14] + numbers[15]
    key = array_at(np.float32, numbers[1] + 4 * which * size, size)
    order, half, most = array_at(np.int64, numbers[12], both), wide // 2, np.float32(0)
    met[:] = 0
    for g in range(share):
        still, reach = np.float32(0), np.float32(0)
        for d in range(wide, size):
            still += query[g * size + d] * key[d]
        for i in range(both):
            pair = order[i]
            if pair < 0:
                continue
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            a, b = query[g * size + first], query[g * size + second]
            c, d = key[first], key[second]
            across, along = a * c + b * d, b * c - a * d
            met[g * both + i], met[(share + g) * both + i] = across, along
            reach += np.sqrt(across * across + along * along)
        met[2 * share * both + g], met[2 * share * both + share + g] = still, still - reach
        most = max(most, 2 * reach)
    return most


@njit(fastmath=set(FAST))
def _round(numbers, low, unit, out):
    """Write how many steps `numbers` are above `low`, to the nearest one; unit: steps in 1."""
    for n in range(len(numbers)):
        steps = (numbers[n] - low) * unit + np.float32(0.5)  # the polynomial may be a little below the least
        out[n] = np.int16(steps if steps > 0 else np.float32(0))


@njit
def round_turned(numbers, which, share, met, step, arena):
    """Write the products of a KV head's queries with its key, turned to each row's position, as int16 in whole steps
    from the least that they can be; met: what `meet_queries` has written. Return the address of the first row's, and
    how many numbers on the next query head's are."""
    sequence, rows, blocks = which // numbers[9], numbers[11], numbers[6]
    fast, few = numbers[14], numbers[15]
    inner, both, stride = 2 * fast + TERMS, fast + few, blocks * VECTORS + PADDED
    far, near = array_at(np.float32, numbers[4], blocks * 2 * both), array_at(np.float32, numbers[5], inner * VECTORS)
    slow, whole = array_at(np.float32, numbers[13], TERMS * few), array_at(np.int16, arena, share * stride)
    left, rest = np.empty(AT_ONCE * inner, np.float32), np.empty(AT_ONCE, np.float32)
    found, unit = np.empty(AT_ONCE * VECTORS, np.float32), np.float32(1) / step if step > 0 else np.float32(1)
    for g in range(share):
        u, v = met[g * both : (g + 1) * both], met[(share + g) * both : (share + g + 1) * both]
        rest[:], low = met[2 * share * both + g], met[2 * share * both + share + g]
        for block in range(0, blocks, AT_ONCE):
            for n in range(AT_ONCE):
                _turn_block(u, v, far, (block + n) * 2 * both, fast, few, slow, left, n * inner)
            multiply(left, rest, AT_ONCE // OUTPUTS, near, inner, found)
            at = g * stride + block * VECTORS
            _round(found, low, unit, whole[at : at + AT_ONCE * VECTORS])
        whole[(g + 1) * stride - PADDED : (g + 1) * stride] = 0
    begin = array_at(np.int64, numbers[3] + 8 * sequence, 1)[0]
    if begin >= 0:
        return arena + 2 * begin, stride
    places = array_at(np.int32, numbers[2] + 4 * sequence * rows, rows)
    by_row, row_stride = array_at(np.int16, arena + 2 * share * stride, share * (rows + PADDED)), rows + PADDED
    for g in range(share):
        for n in range(rows):
            by_row[g * row_stride + n] = whole[g * stride + places[n]]
        by_row[g * row_stride + rows : (g + 1) * row_stride] = 0
    return arena + 2 * share * stride, row_stride


@njit
def add_to_sums(sums, head_step, share, added, stride, first, count):
    """Add what rows from `first` on have to their sums, int16 at the address `sums`, `head_step` bytes from a query
    head's to the next's; none to those below 0, which are not valid."""
    for g in range(share):
        own = array_at(np.int16, sums + g * head_step, count)
        more = array_at(np.int16, added + 2 * (g * stride + first), count)
        for lane in range(count):
            own[lane] = own[lane] + more[lane] if own[lane] >= 0 else own[lane]


@njit
def add_to_listed(sums, head_step, share, added, stride, names, count):
    """As `add_to_sums`, of the rows that `names`, int32 at an address, says."""
    rows = array_at(np.int32, names, count)
    for g in range(share):
        own, more = array_at(np.int16, sums + g * head_step, count), array_at(np.int16, added + 2 * g * stride, stride)
        for i in range(count):
            own[i] += more[rows[i]]
