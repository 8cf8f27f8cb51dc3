"""Products with keys and sums of values in the packings of vLLM's CPU cache, in compiled code.

vLLM's CPU backend packs a block of keys and values for the instructions of its own kernel. Two packings are read here,
16 rows or 16 channels to a register:

- "columns": keys `[D,rows]`, values `[rows,D]`, for vector instructions of any machine and dtype;
- "pairs": bfloat16 for matrix tiles (AMX), two numbers in a word of 32 bits, or 8-bit floats in one of 16. Keys
  `[rows/16,D/2,16,2]`, two channels of 16 rows; values `[D/16,rows/2,16,2]`, two rows of 16 channels.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.attend_vllm_blocks.cpu_byte_floats import HALVES, SHORTS, widened_bytes
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import LINE, prefetch
from sparseattn.kernels.numba_vectors import FLOATS, LANES, WORDS, every, place_in, splat, times_plus

BYTE_FLOATS = (types.uint8, types.int8)  # see `cpu_byte_floats`
PAIRED = (types.uint16, *BYTE_FLOATS)  # what pairs are of
SERVED = 4  # query heads whose sums for two registers of rows or channels stay in registers


def _widened(builder, pointer, number):
    """16 numbers of a dtype from a pointer to the first, as floats."""
    if number == types.float32:
        return builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
    if number in BYTE_FLOATS:
        loaded = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(8), LANES).as_pointer()), align=1)
        return widened_bytes(builder, builder.zext(loaded, SHORTS), number)
    loaded = builder.load(builder.bitcast(pointer, SHORTS.as_pointer()), align=2)
    if number == types.uint16:  # the bits of bfloat16
        return builder.bitcast(builder.shl(builder.zext(loaded, WORDS), every(WORDS, 16)), FLOATS)
    return builder.fpext(builder.bitcast(loaded, HALVES), FLOATS)


def _halves(builder, pointer, number):
    """Return the first and the second numbers of 16 pairs of bfloat16 or of 8-bit floats, as floats."""
    if number in BYTE_FLOATS:
        loaded = builder.load(builder.bitcast(pointer, SHORTS.as_pointer()), align=1)
        second = builder.lshr(loaded, every(SHORTS, 8))
        return widened_bytes(builder, loaded, number), widened_bytes(builder, second, number)
    loaded = builder.load(builder.bitcast(pointer, WORDS.as_pointer()), align=2)
    first = builder.shl(loaded, every(WORDS, 16))
    second = builder.and_(loaded, every(WORDS, 0xFFFF0000))
    return builder.bitcast(first, FLOATS), builder.bitcast(second, FLOATS)


def _for_heads(builder, served, kind, body):
    """`body(many)` for the number of query heads that `served` is."""
    for many in range(1, SERVED + 1):
        with builder.if_then(builder.icmp_signed("==", served, ir.Constant(kind, many))):
            body(many)


@intrinsic(prefer_literal=True)
def _logits(typing, pairs, tiles, served, cache, at, step, size, queries, a, out, o, wide):
    """Products of `tiles` (1 or 2) times 16 rows' keys with `served` (1 to 4) queries `queries[a + k * size:]`, to
    `out[o + k * wide:]`. Keys begin at `cache[at:]`; in columns, a channel is `step` from the next."""
    if not (isinstance(tiles, types.IntegerLiteral) and isinstance(pairs, types.BooleanLiteral)):
        return None
    many_tiles, paired = tiles.literal_value, pairs.literal_value
    if paired and cache.dtype not in PAIRED:
        return types.void(pairs, tiles, served, cache, at, step, size, queries, a, out, o, wide), _nothing

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
                    x = splat(builder, builder.load(place_in(context, builder, queries, asked_, place)), FLOATS)
                    for t in range(many_tiles):
                        total = totals[t][k]
                        builder.store(times_plus(builder, rows[t], x, builder.load(total)), total)

            if paired:
                with cgutils.for_range(builder, builder.lshr(size_, number(1))) as loop:
                    first, second = [], []
                    for t in range(many_tiles):
                        place = builder.add(at_, builder.mul(size_, number(t * LANES)))
                        place = builder.add(place, builder.mul(loop.index, number(2 * LANES)))
                        lower, other = _halves(builder, place_in(context, builder, cache, cache_, place), cache.dtype)
                        first.append(lower)
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
    return types.void(pairs, tiles, place, cache, place, place, place, queries, place, out, place, place), code


@intrinsic(prefer_literal=True)
def _values(typing, pairs, tiles, served, cache, at, step, rows, weights, w, wide, acc, a, size):
    """Add `rows` rows' values, weighted by `weights[w + k * wide:]`, to `tiles` (1 or 2) times 16 channels of `served`
    sums `acc[a + k * size:]`. Values begin at `cache[at:]`. In columns a row is `step` from the next; in pairs, 16
    channels are `step` from the next."""
    if not (isinstance(tiles, types.IntegerLiteral) and isinstance(pairs, types.BooleanLiteral)):
        return None
    many_tiles, paired = tiles.literal_value, pairs.literal_value
    if paired and cache.dtype not in PAIRED:
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
                halves = []
                for t in range(many_tiles):
                    place = builder.add(at_, builder.mul(step_, number(t)))
                    place = builder.add(place, builder.mul(pair, number(2 * LANES)))
                    halves.append(_halves(builder, place_in(context, builder, cache, cache_, place), cache.dtype))
                return [list(part) for part in zip(*halves, strict=True)]

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


@njit
def _page_logits(paired, keys, queries, outs):
    """Logits of a page for some queries.

    keys: flat, the place of the page's first, the step from channel to channel, and rows of the page; queries: flat,
    their size, and how many; outs: flat, the place of the first query's, and the step to the next.
    """
    (cache, key, step, page), (query, size, served), (out, o, wide) = keys, queries, outs
    row = 0
    if paired:
        while row + 2 * LANES <= page:
            _logits(True, 2, served, cache, key + row * size, step, size, query, 0, out, o + row, wide)
            row += 2 * LANES
        if row < page:
            _logits(True, 1, served, cache, key + row * size, step, size, query, 0, out, o + row, wide)
    else:
        while row + 2 * LANES <= page:
            _logits(False, 2, served, cache, key + row, step, size, query, 0, out, o + row, wide)
            row += 2 * LANES
        if row < page:
            _logits(False, 1, served, cache, key + row, step, size, query, 0, out, o + row, wide)


@njit
def _page_values(paired, values, weighed, sums):
    """Add a page's weighted values to the sums of some queries.

    values: flat, the place of the page's first, rows of a block, and rows to add; weighed: weights flat, the place of
    the first query's, and the step to the next; sums: flat, their size, and how many.
    """
    (cache, value, block, rows), (weights, w, wide), (acc, size, served) = values, weighed, sums
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
            prefetch(cache, key + at)
    else:
        for d in range(size):
            for at in range(0, page, line):
                prefetch(cache, key + d * block + at)


@njit
def _ask_for_values(paired, cache, value, block, size, page):
    """Return the same for its values."""
    line = LINE // cache.itemsize
    if paired:
        for d in range(0, size, LANES):
            for at in range(0, page * LANES, line):
                prefetch(cache, value + d * block + at)
    else:
        for at in range(0, page * size, line):
            prefetch(cache, value + at)
