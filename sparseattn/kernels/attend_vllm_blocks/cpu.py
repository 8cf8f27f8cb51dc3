"""Attention over chosen pages of a serving engine's cache, compiled by numba for the CPU: the best pages by their
scores, read where they lie in its blocks.

vLLM's CPU backend packs a block of keys and values for the instructions of its own kernel. Two packings are read here,
16 rows or 16 channels to a register:

- "columns": keys `[D,rows]`, values `[rows,D]`, for vector instructions of any machine and dtype;
- "pairs": bfloat16 for matrix tiles (AMX), two numbers in a word of 32 bits. Keys `[rows/16,D/2,16,2]`, two channels of
  16 rows; values `[D/16,rows/2,16,2]`, two rows of 16 channels.

The pages of a list are cut into parts, which are merged in their order: the result does not depend on how many threads
there are.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.attend.cpu import (
    FAST,
    LINE,
    LOG2E,
    ONE_AT_A_TIME,
    STEP,
    _exp2,
    _prefetch,
    _read,
    _whole,
    use_threads,
)
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_vectors import (
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    WORDS,
    every,
    larger,
    place_in,
    powers,
    splat,
    times_plus,
)
from sparseattn.kernels.topk.cpu import best

SERVED = 4  # query heads whose sums for two registers of rows or channels stay in registers
PART_ROWS = 256  # of a list for which a part of its own pays
FEW = 1 << 14  # scores of which one thread finds the best in less time than it takes to wake another
PARTS = 4  # parts in all for each thread, at least, where there are rows for them


def _widened(builder, pointer, number):
    """16 numbers of a dtype from a pointer to the first, as floats."""
    if number == types.float32:
        return builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
    short = ir.VectorType(ir.IntType(16), LANES)
    held = builder.load(builder.bitcast(pointer, short.as_pointer()), align=2)
    if number == types.uint16:  # the bits of bfloat16
        return builder.bitcast(builder.shl(builder.zext(held, WORDS), every(WORDS, 16)), FLOATS)
    return builder.fpext(builder.bitcast(held, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _halves(builder, pointer):
    """The first and the second numbers of 16 pairs of bfloat16, as floats."""
    held = builder.load(builder.bitcast(pointer, WORDS.as_pointer()), align=2)
    first = builder.shl(held, every(WORDS, 16))
    second = builder.and_(held, every(WORDS, 0xFFFF0000))
    return builder.bitcast(first, FLOATS), builder.bitcast(second, FLOATS)


def _for_heads(builder, served, kind, body):
    """`body(many)` for the number of query heads that `served` is."""
    for many in range(1, SERVED + 1):
        with builder.if_then(builder.icmp_signed("==", served, ir.Constant(kind, many))):
            body(many)


@intrinsic(prefer_literal=True)
def _logits(typing, pairs, tiles, served, cache, at, step, size, asked, a, out, o, wide):
    """Products of `tiles` (1 or 2) times 16 rows' keys with `served` (1 to 4) queries `asked[a + k * size:]`, to
    `out[o + k * wide:]`. Keys begin at `cache[at:]`; in columns, a channel is `step` from the next."""
    if not (isinstance(tiles, types.IntegerLiteral) and isinstance(pairs, types.BooleanLiteral)):
        return None
    many_tiles, paired = tiles.literal_value, pairs.literal_value
    if paired and cache.dtype != types.uint16:
        return types.void(pairs, tiles, served, cache, at, step, size, asked, a, out, o, wide), _nothing

    def code(context, builder, signature, arguments):
        _, _, served_, cache_, at_, step_, size_, asked_, a_, out_, o_, wide_ = arguments

        def number(n):
            return ir.Constant(at_.type, n)

        def body(many):
            totals = [[cgutils.alloca_once(builder, FLOATS) for _ in range(many)] for _ in range(many_tiles)]
            for total in (total for of_tile in totals for total in of_tile):
                builder.store(every(FLOATS, 0.0), total)

            def add(rows, channel):
                for k in range(many):
                    place = builder.add(builder.add(a_, builder.mul(size_, number(k))), channel)
                    x = splat(builder, builder.load(place_in(context, builder, asked, asked_, place)), FLOATS)
                    for t in range(many_tiles):
                        total = totals[t][k]
                        builder.store(times_plus(builder, rows[t], x, builder.load(total)), total)

            if paired:
                with cgutils.for_range(builder, builder.lshr(size_, number(1))) as loop:
                    first, second = [], []
                    for t in range(many_tiles):
                        place = builder.add(at_, builder.mul(size_, number(t * LANES)))
                        place = builder.add(place, builder.mul(loop.index, number(2 * LANES)))
                        one, other = _halves(builder, place_in(context, builder, cache, cache_, place))
                        first.append(one)
                        second.append(other)
                    channel = builder.mul(loop.index, number(2))
                    add(first, channel)
                    add(second, builder.add(channel, number(1)))
            else:
                with cgutils.for_range(builder, size_) as loop:
                    place = builder.add(at_, builder.mul(loop.index, step_))
                    rows = []
                    for t in range(many_tiles):
                        to = place_in(context, builder, cache, cache_, builder.add(place, number(t * LANES)))
                        rows.append(_widened(builder, to, cache.dtype))
                    add(rows, loop.index)
            for t in range(many_tiles):
                for k in range(many):
                    place = builder.add(builder.add(o_, builder.mul(wide_, number(k))), number(t * LANES))
                    to = place_in(context, builder, out, out_, place, FLOATS)
                    builder.store(builder.load(totals[t][k]), to, align=4)

        _for_heads(builder, served_, served_.type, body)
        return context.get_dummy_value()

    place = types.intp
    return types.void(pairs, tiles, place, cache, place, place, place, asked, place, out, place, place), code


@intrinsic(prefer_literal=True)
def _values(typing, pairs, tiles, served, cache, at, step, rows, weights, w, wide, acc, a, size):
    """Adds `rows` rows' values, weighted by `weights[w + k * wide:]`, to `tiles` (1 or 2) times 16 channels of `served`
    sums `acc[a + k * size:]`. Values begin at `cache[at:]`. In columns a row is `step` from the next; in pairs, 16
    channels are `step` from the next."""
    if not (isinstance(tiles, types.IntegerLiteral) and isinstance(pairs, types.BooleanLiteral)):
        return None
    many_tiles, paired = tiles.literal_value, pairs.literal_value
    if paired and cache.dtype != types.uint16:
        return types.void(pairs, tiles, served, cache, at, step, rows, weights, w, wide, acc, a, size), _nothing

    def code(context, builder, signature, arguments):
        _, _, served_, cache_, at_, step_, rows_, weights_, w_, wide_, acc_, a_, size_ = arguments

        def number(n):
            return ir.Constant(at_.type, n)

        def body(many):
            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(many)] for _ in range(many_tiles)]

            def place_of(t, k):
                place = builder.add(builder.add(a_, builder.mul(size_, number(k))), number(t * LANES))
                return place_in(context, builder, acc, acc_, place, FLOATS)

            for t in range(many_tiles):
                for k in range(many):
                    builder.store(builder.load(place_of(t, k), align=4), sums[t][k])

            def add(channels, row):
                for k in range(many):
                    place = builder.add(builder.add(w_, builder.mul(wide_, number(k))), row)
                    x = splat(builder, builder.load(place_in(context, builder, weights, weights_, place)), FLOATS)
                    for t in range(many_tiles):
                        total = sums[t][k]
                        builder.store(times_plus(builder, channels[t], x, builder.load(total)), total)

            def twins(pair):
                found = []
                for t in range(many_tiles):
                    place = builder.add(at_, builder.mul(step_, number(t)))
                    place = builder.add(place, builder.mul(pair, number(2 * LANES)))
                    found.append(_halves(builder, place_in(context, builder, cache, cache_, place)))
                return [list(part) for part in zip(*found, strict=True)]

            if paired:
                whole = builder.lshr(rows_, number(1))
                with cgutils.for_range(builder, whole) as loop:
                    row = builder.mul(loop.index, number(2))
                    first, second = twins(loop.index)
                    add(first, row)
                    add(second, builder.add(row, number(1)))
                odd = builder.icmp_unsigned("!=", builder.and_(rows_, number(1)), number(0))
                with builder.if_then(odd):  # what lies beside the last row may be anything
                    add(twins(whole)[0], builder.sub(rows_, number(1)))
            else:
                with cgutils.for_range(builder, rows_) as loop:
                    place = builder.add(at_, builder.mul(loop.index, step_))
                    channels = []
                    for t in range(many_tiles):
                        to = place_in(context, builder, cache, cache_, builder.add(place, number(t * LANES)))
                        channels.append(_widened(builder, to, cache.dtype))
                    add(channels, loop.index)
            for t in range(many_tiles):
                for k in range(many):
                    builder.store(builder.load(sums[t][k]), place_of(t, k), align=4)

        _for_heads(builder, served_, served_.type, body)
        return context.get_dummy_value()

    place = types.intp
    return types.void(
        pairs, tiles, place, cache, place, place, place, weights, place, place, acc, place, place
    ), code  # fmt: skip


def _nothing(context, builder, signature, arguments):
    """Numbers that are never paired: code that is never reached."""
    return context.get_dummy_value()


@intrinsic
def _exponentials(typing, numbers, at, count, highest):
    """Replaces `numbers[at:at + count]`, `count` a multiple of 16, by 2 to their distance from `highest`, which is
    none of them above; returns the sum."""

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
            x = powers(builder, builder.fsub(x, peak))
            x = builder.select(out, every(FLOATS, 0.0), x)
            builder.store(x, to, align=4)
            builder.store(builder.fadd(x, builder.load(total)), total)
        kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
        add = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(add, [ir.Constant(FLOAT, 0.0), builder.load(total)], fastmath=FAST)

    return types.float32(numbers, types.intp, types.intp, types.float32), code


@intrinsic
def _peak(typing, numbers, at, count):
    """The largest of `numbers[at:at + count]`, `count` a multiple of 16."""

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


@intrinsic
def _store(typing, array, place, number):
    """`array[place] = number`, rounded to what the array holds: float32, or 16-bit floats as their bits."""

    def code(context, builder, signature, arguments):
        array_, place_, number_ = arguments
        if array.dtype == types.uint16:
            bits = builder.bitcast(number_, WORD)
            odd = builder.and_(builder.lshr(bits, ir.Constant(WORD, 16)), ir.Constant(WORD, 1))
            near = builder.add(bits, builder.add(odd, ir.Constant(WORD, 0x7FFF)))
            is_nan = builder.fcmp_unordered("uno", number_, number_)
            near = builder.select(is_nan, ir.Constant(WORD, 0x7FC00000), near)
            number_ = builder.trunc(builder.lshr(near, ir.Constant(WORD, 16)), ir.IntType(16))
        elif array.dtype == types.int16:
            number_ = builder.bitcast(builder.fptrunc(number_, ir.HalfType()), ir.IntType(16))
        builder.store(number_, place_in(context, builder, array, array_, place_))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), code


@njit
def _page_logits(paired, cache, key, step, size, page, asked, served, out, o, wide):
    """Logits of a page whose keys begin at `cache[key:]`, for `served` queries."""
    row = 0
    if paired:
        while row + 2 * LANES <= page:
            _logits(True, 2, served, cache, key + row * size, step, size, asked, 0, out, o + row, wide)
            row += 2 * LANES
        if row < page:
            _logits(True, 1, served, cache, key + row * size, step, size, asked, 0, out, o + row, wide)
    else:
        while row + 2 * LANES <= page:
            _logits(False, 2, served, cache, key + row, step, size, asked, 0, out, o + row, wide)
            row += 2 * LANES
        if row < page:
            _logits(False, 1, served, cache, key + row, step, size, asked, 0, out, o + row, wide)


@njit
def _page_values(paired, cache, value, block, size, rows, weights, w, wide, served, acc):
    """Adds the weighted `rows` values that begin at `cache[value:]` to `served` sums."""
    d = 0
    if paired:
        step = block * LANES
        while d + 2 * LANES <= size:
            _values(True, 2, served, cache, value + d * block, step, rows, weights, w, wide, acc, d, size)
            d += 2 * LANES
        if d < size:
            _values(True, 1, served, cache, value + d * block, step, rows, weights, w, wide, acc, d, size)
    else:
        while d + 2 * LANES <= size:
            _values(False, 2, served, cache, value + d, size, rows, weights, w, wide, acc, d, size)
            d += 2 * LANES
        if d < size:
            _values(False, 1, served, cache, value + d, size, rows, weights, w, wide, acc, d, size)


@njit
def _ask_for_keys(paired, cache, key, block, size, page):
    """Asks for the lines of a page's keys ahead of their use: pages lie anywhere."""
    line = LINE // cache.itemsize
    if paired:
        for at in range(0, page * size, line):
            _prefetch(cache, key + at)
    else:
        for d in range(size):
            for at in range(0, page, line):
                _prefetch(cache, key + d * block + at)


@njit
def _ask_for_values(paired, cache, value, block, size, page):
    """The same for its values."""
    line = LINE // cache.itemsize
    if paired:
        for d in range(0, size, LANES):
            for at in range(0, page * LANES, line):
                _prefetch(cache, value + d * block + at)
    else:
        for at in range(0, page * size, line):
            _prefetch(cache, value + at)


@njit  # not fastmath, under which `powers` may not be reordered
def _part(
    paired, query, q, share, size, scale, cache, block_step, base, block, page, per, always, tail, table, ids, split,
    splits, acc, peak, total,
):  # fmt: skip
    """Attention of a list's `share` query heads `query[q:]` over one part of its pages: acc `[share*D]`, peak and total
    `[share]`."""
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    pages = 0
    for i in range(always.shape[0]):
        pages += always[i] >= 0
    late = pages - 1  # the last of them is the sequence's last, of which `tail` rows are there
    for i in range(ids.shape[0]):
        pages += ids[i] >= 0
    begin, stop = pages * split // splits, pages * (split + 1) // splits
    held = stop - begin
    if held == 0:
        return
    places, rows = np.empty(held, np.int64), np.empty(held, np.int64)
    n, filled = 0, 0
    for i in range(always.shape[0]):
        if always[i] >= 0:
            if begin <= n < stop:
                places[filled], rows[filled] = always[i], tail if n == late else page
                filled += 1
            n += 1
    for i in range(ids.shape[0]):
        if ids[i] >= 0:
            if begin <= n < stop:
                places[filled] = np.int64(table[ids[i] // per]) * per + ids[i] % per
                rows[filled] = page
                filled += 1
            n += 1
    in_block = block // page
    wide = held * page
    weights, asked = np.empty(SERVED * wide, np.float32), np.empty(SERVED * size, np.float32)
    for first in range(0, share, SERVED):
        served = min(SERVED, share - first)
        for d in range(served * size):
            asked[d] = _read(query, q + first * size + d) * scale
        for i in range(held):
            if i + 1 < held and first == 0:
                at = places[i + 1] // in_block * block_step + base
                row = places[i + 1] % in_block * page
                _ask_for_keys(paired, cache, at + (row * size if paired else row), block, size, page)
            at = places[i] // in_block * block_step + base
            row = places[i] % in_block * page
            key = at + (row * size if paired else row)
            _page_logits(paired, cache, key, block, size, page, asked, served, weights, i * page, wide)
            for k in range(served):
                for r in range(rows[i], page):
                    weights[k * wide + i * page + r] = -np.inf
        for k in range(served):
            highest = _peak(weights, k * wide, wide)
            peak[first + k] = highest
            total[first + k] = _exponentials(weights, k * wide, wide, highest)
        for i in range(held):
            if i + 1 < held and first == 0:
                at = places[i + 1] // in_block * block_step + base + block * size
                row = places[i + 1] % in_block * page
                _ask_for_values(paired, cache, at + row * (LANES if paired else size), block, size, page)
            at = places[i] // in_block * block_step + base + block * size
            row = places[i] % in_block * page
            value = at + row * (LANES if paired else size)
            _page_values(
                paired, cache, value, block, size, rows[i], weights, i * page, wide, served, acc[first * size :]
            )


@entry(parallel=True, cache=True, nogil=True)
def _attend(
    query, query_step, share, size, scale, cache, block_step, head_step, heads, block, page, per, paired, always, tails,
    table, scores, ids, tokens, acc, peak, total, out, out_step,
):  # fmt: skip
    """query, out: flat, with the step from token to token; always `[R,F]`, tails `[R]`, table `[R,E]`; scores
    `[R*Hs,P]`; ids `[R*Hs,S]`, to be filled; tokens `[R]`; acc `[R*Hs,splits,share*D]`, peak, total `[..,share]`."""
    lists, splits = total.shape[:2]
    chosen = lists // tokens.shape[0]
    if scores.size < FEW:
        for which in range(lists):
            best(scores[which], ids[which])
    else:
        for which in prange(lists):
            best(scores[which], ids[which])
    units = lists * splits
    for unit in prange(units):
        which, split = unit // splits, unit % splits
        r, s = which // chosen, which % chosen
        _part(
            paired, query, tokens[r] * query_step + s * share * size, share, size, scale, cache, block_step,
            s * heads // chosen * head_step, block, page, per, always[r], tails[r], table[r], ids[which], split, splits,
            acc[which, split], peak[which, split], total[which, split],
        )  # fmt: skip
    for which in range(lists):
        r, s = which // chosen, which % chosen
        for k in range(share):
            _join(acc[which], peak[which], total[which], k, size, out, tokens[r] * out_step + (s * share + k) * size)


@njit(fastmath=set(FAST))
def _join(acc, peak, total, k, size, out, o):
    """Joins the parts of query head k, acc `[splits,share*D]`, into `out[o:]`; 0 where there is no row."""
    splits = acc.shape[0]
    highest, whole = np.float32(-np.inf), np.float32(0)
    for split in range(splits):
        highest = max(highest, peak[split, k])
    sums = np.zeros(size, np.float32)
    for split in range(splits):
        if total[split, k] != 0:
            shrink = _exp2(peak[split, k] - highest)
            whole += total[split, k] * shrink
            for d in range(size):
                sums[d] += shrink * acc[split, k * size + d]
    by = np.float32(1) / whole if whole != 0 else np.float32(0)
    for d in range(size):
        _store(out, o + d, sums[d] * by)


def attend(
    query: Tensor,
    out: Tensor,
    cache: Tensor,
    packing: str,
    page: int,
    unit: int,
    always: Tensor,
    tails: Tensor,
    table: Tensor,
    scores: Tensor,
    count: int,
    tokens: Tensor,
    scale: float,
) -> None:
    """As `sparseattn.kernels.attend_vllm_blocks.reference.attend`."""
    served, chosen, pages = scores.shape
    heads, block, double = cache.shape[1:]
    size, share = double // 2, query.shape[1] // chosen
    lists, count = served * chosen, min(count, pages)
    rows = (count + always.shape[1]) * page
    with ONE_AT_A_TIME:
        threads = use_threads(4 * rows * lists * share * size, STEP)
        splits = max(1, min(-(-PARTS * threads // lists), rows // PART_ROWS))
        acc: Any = np.empty((lists, splits, share * size), np.float32)
        more: Any = np.empty((2, lists, splits, share), np.float32)  # peaks and totals
        ids: Any = np.empty((lists, count), np.int32)
        _attend(
            _whole(query), query.stride(0), share, size, np.float32(scale) * LOG2E, _whole(cache), cache.stride(0),
            cache.stride(1), heads, block, page, unit // page, packing == "pairs", always.numpy(), tails.numpy(),
            table.numpy(), scores.numpy().reshape(lists, pages), ids, tokens.numpy(), acc, more[0], more[1],
            _whole(out), out.stride(0),
        )  # fmt: skip


@entry(cache=True, nogil=True)
def _tables(rows, blocks, page, unit, block, first, window, table, always, tails):
    """table `[R,E]`, always `[R,F]` and tails `[R]` of `Zones`, filled in."""
    held, in_block = block // unit, block // page
    for r in range(rows.shape[0]):
        sealed = max((rows[r] - window) // unit, first)
        at, part = first // held, first % held
        for e in range(table.shape[1]):
            table[r, e] = blocks[r, at] * held + part if first + e < sealed else -1
            part += 1
            if part == held:
                at, part = at + 1, 0
        pages, early = (rows[r] + page - 1) // page, first * (unit // page)
        late = sealed * (unit // page)
        for i in range(always.shape[1]):
            at = i if i < early else late + i - early
            always[r, i] = blocks[r, at // in_block] * in_block + at % in_block if at < pages else -1
        tails[r] = rows[r] - (pages - 1) * page


def tables(
    rows: Any, blocks: Any, page: int, unit: int, block: int, first: int, window: int, most: int, recent: int
) -> tuple[Any, Any, Any]:
    """What sequences may choose from and what they always read, for `attend`: table, always and tails, of numpy.

    Args:
        rows: `[R]` int32 of each sequence, and
        blocks: `[R,M]` int32, the engine's block table, both numpy's.
        page, unit, block: rows of a page, of an entry and of a block.
        first: entries of the sink.
        window: last rows that are always read.
        most: rows of the longest sequence.
        recent: pages behind the entries to choose from, at most.
    """
    table: Any = np.empty((len(rows), max((most - window) // unit - first, 0)), np.int32)
    always: Any = np.empty((len(rows), first * (unit // page) + recent), np.int32)
    tails: Any = np.empty(len(rows), np.int32)
    _tables(rows, blocks, page, unit, block, first, window, table, always, tails)
    return table, always, tails


@entry(cache=True, nogil=True)
def _due(rows, blocks, above, unit, block, made, out):
    held, count = block // unit, 0
    for r in range(rows.shape[0]):
        if rows[r] <= above:
            continue
        at, part = 0, 0
        for _ in range(rows[r] // unit):
            place = np.int64(blocks[r, at]) * held + part
            if not made[place]:
                made[place] = True
                out[count] = place
                count += 1
            part += 1
            if part == held:
                at, part = at + 1, 0
    return count


def due(rows: Any, blocks: Any, above: int, unit: int, block: int, made: Any) -> Any:
    """Entries of sequences of more than `above` rows that are whole and not made yet: `[n]` int64, marked as made.

    Args:
        rows, blocks, unit, block: see `tables`.
        made: `[places]` bool, which entries hold what the cache holds.
    """
    most = int((np.where(rows > above, rows, 0) // unit).sum())
    out: Any = np.empty(most, np.int64)
    return out[: _due(rows, blocks, above, unit, block, made, out)]
