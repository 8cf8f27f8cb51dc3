"""Products of codes with queries rounded to 8 bits, in compiled code: 64 bytes of codes at a time.

A register takes a word of 16 rows (`packing`), of each four codes at adjacent channels once it is shifted and masked.
They meet four numbers of a query, times the group's steps, which is rounded to 8 bits with one factor for each group
and query head: four products and their sum are one instruction where there is AVX-512 VNNI, two with AVX2, and
vectors of plain integers elsewhere; `instructions` says which. One unpacking serves up to four query heads.

Rounding the query moves a logit by at most `D last top / (508 sqrt(D))`, `last` the largest code and `top` the largest
|q_i step_i|: half of 1/127 of `top` in each channel, times a code's distance from the middle one, because the product
with the levels of the middle code is not rounded: it is the base, less what the rounded query makes of that code.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST, put, read, scope
from sparseattn.kernels.numba_vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    MAGIC,
    MARKS,
    WORD,
    WORDS,
    ask_for,
    call,
    every,
    larger,
    place_in,
    splat,
    times_plus,
)

SERVED = 4  # query heads whose sums for two tiles of rows stay in registers
LEAST = 1e-30  # of a query's numbers times steps, below which all are taken for zero
SIXTEENS, EIGHTS, BYTES = ir.VectorType(ir.IntType(16), 16), ir.VectorType(WORD, 8), ir.VectorType(BYTE, 32)
MOST_SIXTEENS = (2**15 - 1) // (2 * 127)  # pairs of products of a byte with codes of 1 whose sum 16 bits hold
ONE, NONE = np.float32(1), np.float32(-0.0)  # what is multiplied with and added where it shall change nothing


def instructions() -> str:
    """Return what multiplies codes: "vnni", "avx2" or "plain", of what numba compiles for (`NUMBA_CPU_FEATURES`, or the
    machine's)."""
    features = numba.config.CPU_FEATURES
    there = set((get_host_cpu_features() if features is None else features).split(","))
    if {"+avx512bw", "+avx512vnni"} <= there:
        return "vnni"
    return "avx2" if "+avx2" in there else "plain"


PAIRS = instructions() == "vnni"  # two tiles at a time: an addition takes longer than those of one; 32 registers
# Registers of codes asked for before their turn, 3 and 8 kB: rounding a group's query does not hold them up.
LINES_AHEAD = 48 if PAIRS else 128


class _Sums:
    """Of each lane, the sum of the products of its four unsigned codes with four signed bytes, over several words.

    On AVX2 two products and their sum have 16 bits. So have the sums of as many words as fit: `begin` and `end` stand
    around at most `words_at_once` of them. Elsewhere sums have 32 bits at once.
    """

    def __init__(self, builder):
        self.builder = builder
        self.total = cgutils.alloca_once(builder, WORDS)
        self.halves = [cgutils.alloca_once(builder, SIXTEENS) for _ in range(2 if instructions() == "avx2" else 0)]
        builder.store(every(WORDS, 0), self.total)

    def begin(self):
        for half in self.halves:
            self.builder.store(every(SIXTEENS, 0), half)

    def add(self, codes, rounded):
        builder = self.builder
        for half, sums in enumerate(self.halves):
            a, b = (builder.bitcast(self._half(x, half), BYTES) for x in (codes, rounded))
            twos = call(builder, "llvm.x86.avx2.pmadd.ub.sw", SIXTEENS, a, b)
            builder.store(builder.add(builder.load(sums), twos), sums)
        if self.halves:
            return
        total = builder.load(self.total)
        if instructions() == "vnni":
            total = call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, codes, rounded)
        else:
            for byte in range(4):
                code = builder.and_(builder.lshr(codes, every(WORDS, 8 * byte)), every(WORDS, 255))
                signed = builder.ashr(builder.shl(rounded, every(WORDS, 24 - 8 * byte)), every(WORDS, 24))
                total = builder.add(total, builder.mul(code, signed))
        builder.store(total, self.total)

    def end(self):
        if self.halves:
            builder = self.builder
            fours = [
                call(builder, "llvm.x86.avx2.pmadd.wd", EIGHTS, builder.load(sums), every(SIXTEENS, 1))
                for sums in self.halves
            ]
            both = builder.shuffle_vector(*fours, ir.Constant(WORDS, list(range(LANES))))
            builder.store(builder.add(builder.load(self.total), both), self.total)

    def _half(self, x, half):
        lanes = ir.Constant(EIGHTS, [8 * half + lane for lane in range(8)])
        return self.builder.shuffle_vector(x, x, lanes)


def words_at_once(builder, words, planes, last):
    """Return how many words of a row may be added up before 16 bits could overflow; all where sums have 32 bits."""
    if instructions() != "avx2":
        return words
    most = builder.sdiv(ir.Constant(last.type, MOST_SIXTEENS), builder.mul(last, planes))
    return builder.select(builder.icmp_signed("<", most, words), most, words)


@intrinsic
def _round_queries(
    typing, served, query, query_at, low, step, padded, middle, numbers, rounded, rounded_at, wide, scale, base, g
):
    """Round the queries of `served` (1 to 4) heads, one after the other in `query[query_at:]`, times `step` to bytes
    `rounded[rounded_at:]`, `wide` from head to head; `scale[g:]` is what 1 of them stands for, and `base[g:]` the
    product with the levels of the `middle` code, less what the bytes make of it. All float32; `padded`, the numbers of
    a query, is a multiple of 16."""

    def code(context, builder, signature, arguments):
        (
            served_, query_, query_at_, low_, step_, padded_, middle_, numbers_, rounded_, rounded_at_, wide_, scale_,
            base_, g_,
        ) = arguments  # fmt: skip
        none, sixteen = ir.Constant(padded_.type, 0), ir.Constant(padded_.type, LANES)
        middles = splat(builder, middle_, FLOATS)
        magic = ir.Constant(WORD, int(np.float32(MAGIC).view(np.int32)))  # in what is cut to bytes
        most, start = ir.Constant(FLOAT, 127.0), ir.Constant(FLOAT, 0.0)

        def load(array, value, place):
            return builder.load(place_in(context, builder, array, value, place, FLOATS), align=4)

        def place_of(first, each, k):
            return builder.add(first, builder.mul(each, ir.Constant(each.type, k)))

        def heads(many):
            totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            tops = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            sums = [cgutils.alloca_once(builder, WORDS) for _ in range(many)]
            for slot in (*totals, *tops):
                builder.store(every(FLOATS, 0.0), slot)
            for slot in sums:
                builder.store(every(WORDS, 0), slot)
            with cgutils.for_range_slice(builder, none, padded_, sixteen, intp=padded_.type) as (d, _):
                steps = load(step, step_, d)
                centres = times_plus(builder, steps, middles, load(low, low_, d))
                for k, (total, top) in enumerate(zip(totals, tops, strict=True)):
                    x = load(query, query_, builder.add(place_of(query_at_, padded_, k), d))
                    builder.store(times_plus(builder, x, centres, builder.load(total)), total)
                    x = builder.fmul(x, steps)
                    to = builder.add(place_of(none, padded_, k), d)
                    builder.store(x, place_in(context, builder, numbers, numbers_, to, FLOATS), align=4)
                    size = call(builder, "llvm.fabs.v16f32", FLOATS, x)
                    builder.store(larger(builder, size, builder.load(top)), top)
            factors, units = [], []
            for k, top in enumerate(tops):
                largest = call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, builder.load(top), flags=("nnan",))
                there = builder.fcmp_ordered(">", largest, ir.Constant(FLOAT, LEAST))
                factor = builder.select(there, builder.fdiv(most, largest), start)
                by = builder.select(there, builder.fmul(largest, ir.Constant(FLOAT, 1 / 127)), start)
                builder.store(by, place_in(context, builder, scale, scale_, builder.add(g_, ir.Constant(g_.type, k))))
                factors.append(splat(builder, factor, FLOATS))
                units.append(by)
            with cgutils.for_range_slice(builder, none, padded_, sixteen, intp=padded_.type) as (d, _):
                for k, slot in enumerate(sums):
                    x = load(numbers, numbers_, builder.add(place_of(none, padded_, k), d))
                    moved = builder.bitcast(times_plus(builder, x, factors[k], every(FLOATS, MAGIC)), WORDS)
                    to = place_in(
                        context, builder, rounded, rounded_, builder.add(place_of(rounded_at_, wide_, k), d), MARKS
                    )
                    builder.store(builder.trunc(moved, MARKS), to, align=1)
                    builder.store(builder.add(moved, builder.load(slot)), slot)
            extra = builder.mul(builder.trunc(padded_, WORD), magic)
            for k, (total, slot) in enumerate(zip(totals, sums, strict=True)):
                bytes_ = call(builder, "llvm.vector.reduce.add.v16i32", WORD, builder.load(slot))
                bytes_ = builder.sitofp(builder.sub(bytes_, extra), FLOAT)
                of_middle = builder.fmul(builder.fmul(units[k], middle_), bytes_)
                whole = call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, start, builder.load(total), flags=FAST)
                whole = builder.fsub(whole, of_middle)
                builder.store(whole, place_in(context, builder, base, base_, builder.add(g_, ir.Constant(g_.type, k))))

        for many in range(1, SERVED + 1):
            with builder.if_then(builder.icmp_signed("==", served_, ir.Constant(served_.type, many))):
                heads(many)
        return context.get_dummy_value()

    place = types.intp
    return types.void(
        place, query, place, low, step, place, types.float32, numbers, rounded, place, place, scale, base, place
    ), code  # fmt: skip


@intrinsic(prefer_literal=True)
def tile_logits(
    typing, tiles, served, packed, packed_at, words, bits, rounded, rounded_at, wide, scale, base, g, valid, valid_at,
    out, out_at, head_step, lines_ahead,
):  # fmt: skip
    """Write the logits of `tiles` (1 or 2) times 16 rows for `served` (1 to 4) query heads.

    Codes are `packed[packed_at:]`; of query head k from g on the rounded query is `rounded[rounded_at + k * wide:]`,
    and the logits go to `out[out_at + k * head_step:]`. -inf where `valid[valid_at:]` is 0. Codes `lines_ahead`
    registers further on are asked for; with 0, where they lie anywhere, none but those that are read.
    """
    if not isinstance(tiles, types.IntegerLiteral):
        return None
    many = tiles.literal_value

    def code(context, builder, signature, arguments):
        (
            _, served_, packed_, packed_at_, words_, bits_, rounded_, rounded_at_, wide_, scale_, base_, g_, valid_,
            valid_at_, out_, out_at_, head_step_, lines_ahead_,
        ) = arguments  # fmt: skip

        def number(n):
            return ir.Constant(packed_at_.type, n)

        planes = builder.sdiv(number(8), bits_)
        gap = builder.sdiv(wide_, number(4))
        shift = splat(builder, builder.trunc(bits_, WORD), WORDS)
        last = builder.sub(builder.shl(number(1), bits_), number(1))
        mask = splat(builder, builder.mul(builder.trunc(last, WORD), ir.Constant(WORD, 0x01010101)), WORDS)
        codes_from = place_in(context, builder, packed, packed_, packed_at_, WORDS)
        rounded_from = place_in(context, builder, rounded, rounded_, rounded_at_, WORD)
        word_of = [cgutils.alloca_once(builder, WORDS) for _ in range(many)]
        at_once = words_at_once(builder, words_, planes, last)

        def products(heads):
            sums = [[_Sums(builder) for _ in range(heads)] for _ in range(many)]
            every_sum = [one for of_tile in sums for one in of_tile]

            def add_word(word):
                for t in range(many):
                    place = builder.add(builder.mul(words_, number(t)), word)
                    builder.store(builder.load(builder.gep(codes_from, [place]), align=1), word_of[t])
                    ask_for(builder, builder.gep(codes_from, [builder.add(place, lines_ahead_)]))
                with cgutils.for_range(builder, builder.lshr(planes, number(1))) as pair:
                    for odd in range(2):  # of 2, 4 or 8 planes
                        add_plane(word, builder.add(builder.shl(pair.index, number(1)), number(odd)))

            def add_plane(word, plane):
                place = builder.add(builder.mul(plane, words_), word)
                numbers = []
                for k in range(heads):
                    of_head = builder.gep(rounded_from, [builder.add(place, builder.mul(gap, number(k)))])
                    numbers.append(splat(builder, builder.load(of_head, align=1), WORDS))
                for t in range(many):
                    codes = builder.load(word_of[t])
                    builder.store(builder.lshr(codes, shift), word_of[t])
                    codes = builder.and_(codes, mask)
                    for k in range(heads):
                        sums[t][k].add(codes, numbers[k])

            with cgutils.for_range_slice(builder, number(0), words_, at_once, intp=words_.type) as (first, _):
                for one in every_sum:
                    one.begin()
                end = builder.add(first, at_once)
                end = builder.select(builder.icmp_signed("<", end, words_), end, words_)
                with cgutils.for_range_slice(builder, first, end, number(1), intp=words_.type) as (word, _):
                    add_word(word)
                for one in every_sum:
                    one.end()
            known = place_in(context, builder, valid, valid_, valid_at_, MARKS)
            for t in range(many):
                there = builder.load(builder.gep(known, [number(t)]), align=1)
                there = builder.icmp_unsigned("!=", there, every(MARKS, 0))
                for k in range(heads):
                    of_head = builder.add(g_, number(k))
                    by = splat(builder, builder.load(place_in(context, builder, scale, scale_, of_head)), FLOATS)
                    plus = splat(builder, builder.load(place_in(context, builder, base, base_, of_head)), FLOATS)
                    logit = times_plus(builder, builder.sitofp(builder.load(sums[t][k].total), FLOATS), by, plus)
                    place = builder.add(builder.add(out_at_, number(t * LANES)), builder.mul(head_step_, number(k)))
                    to = place_in(context, builder, out, out_, place, FLOATS)
                    builder.store(builder.select(there, logit, every(FLOATS, -math.inf)), to, align=4)

        for heads in range(1, SERVED + 1):
            with builder.if_then(builder.icmp_signed("==", served_, number(heads))):
                products(heads)
        return context.get_dummy_value()

    place = types.intp
    return types.void(
        tiles, place, packed, place, place, place, rounded, place, place, scale, base, place, valid, place, out, place,
        place, place,
    ), code  # fmt: skip


@intrinsic
def _of_grid(typing, levels, grid, place, other):
    """`grid[place]` where `levels` are of 8 bits, else `other`."""
    eight = levels.dtype in (types.int8, types.uint8)

    def code(context, builder, signature, arguments):
        if not eight:
            return arguments[3]
        value = builder.load(place_in(context, builder, grid, arguments[1], arguments[2]))
        value.set_metadata("alias.scope", scope(builder))
        return value

    return types.float32(levels, grid, types.intp, types.float32), code


@njit(inline="always")
def round_group(queries, form, low_of, step_of, grid_of, room, slot):
    """Query heads, rounded for one group, whose levels are on a grid (`kernels.quantized_keys.level_grid`) if they are
    of 8 bits.

    queries: flat, the place of the first, how many, and the numbers of one; form: channels, bits, and bytes of a
    rounded query; low_of, step_of, grid_of: each flat, with a place; room, slot: see `scratch`.
    """
    (query, first, share, padded), (size, bits, wide), (low, low_at) = queries, form, low_of
    (step, step_at), (grid, grid_at), (lows, steps, numbers, rounded, scale, base) = step_of, grid_of, room
    unit_at, pace_at = grid_at + size, grid_at + 2 * size
    for d in range(size):
        unit, anchor = _of_grid(low, grid, unit_at + d, ONE), _of_grid(low, grid, grid_at + d, NONE)
        put(lows, d, read(low, low_at + d) * unit + anchor)
        put(steps, d, read(step, step_at + d) * _of_grid(step, grid, pace_at + d, ONE))
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    for g in range(0, share, SERVED):
        served, q, to = min(SERVED, share - g), first + g * padded, slot * share + g
        _round_queries(
            served, query, q, lows, steps, padded, middle, numbers, rounded, to * wide, wide, scale, base, to
        )


@njit
def rounded_bytes(words, bits, padded):
    """Bytes from one rounded query to the next: what a row's codes meet, and what `_round` writes, 16 at a time."""
    return (max(4 * words * (8 // bits), padded) + LANES - 1) & -LANES


@njit
def scratch(share, padded, wide, slots):
    """Return what `round_group` fills: levels and products `[padded]`, rounded queries of `wide` bytes, factors and
    bases `[slots,G]`, of as many groups."""
    lows, steps, numbers = (
        np.zeros(padded, np.float32),
        np.zeros(padded, np.float32),
        np.empty(SERVED * padded, np.float32),
    )
    rounded, count = np.zeros(slots * share * wide, np.uint8), slots * share
    return lows, steps, numbers, rounded, np.empty(count, np.float32), np.empty(count, np.float32)
