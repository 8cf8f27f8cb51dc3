"""Keys of a few bits, compiled by numba for the CPU: codes are multiplied as the integers they are, 64 bytes at a time.

A register takes a word of 16 rows (`kernels.quantized_keys.reference`), of each four codes at adjacent channels once it
is shifted and masked. They meet four numbers of a query, times the group's steps, which is rounded to 8 bits with one
factor for each
group and query head: four products and their sum are one instruction where there is AVX-512 VNNI, three with AVX2, and
vectors of plain integers elsewhere; `instructions` says which. One unpacking serves up to four query heads.

Rounding the query moves a logit by at most `D last top / (508 sqrt(D))`, `last` the largest code and `top` the largest
|q_i step_i|: half of 1/127 of `top` in each channel, times a code's distance from the middle one, because the product
with the levels of the middle code is not rounded: it is the base, less what the rounded query makes of that code.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.attend.cpu import (  # fmt: skip
    ALONE,
    EXPONENTIAL,
    FAST,
    LN2,
    LOG2E,
    ONE_AT_A_TIME,
    STEP,
    _flat,
    _line,
    _read,
    _scope,
    fetch,
    use_threads,
)
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
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
    logarithms,
    place_in,
    powers,
    splat,
    times_plus,
)
from sparseattn.kernels.quantized_keys.level_grid import NUMBERS
from sparseattn.kernels.topk.cpu import best

SERVED = 4  # query heads whose sums for two tiles of rows stay in registers
PART_ROWS = 2048  # of one part: the logits of four query heads stay in the cache of a core
AHEAD = 4  # listed pages asked for before their turn: they lie anywhere in memory
LINES_AHEAD = 48  # codes asked for before their turn: 3 kB, so that rounding a group's query does not hold them up
LEAST = 1e-30  # of a query's numbers times steps, below which all are taken for zero
LOWEST = float(np.float32(-3e38))  # taken from -inf: -inf less itself is no number
ONE, NONE = np.float32(1), np.float32(-0.0)  # what is multiplied with and added where it shall change nothing


# -- vectors of 16 ---------------------------------------------------------------------------------------------------


def instructions() -> str:
    """What multiplies codes: "vnni", "avx2" or "plain", of what numba compiles for (`NUMBA_CPU_FEATURES`, or the
    machine's)."""
    told = numba.config.CPU_FEATURES
    there = set((get_host_cpu_features() if told is None else told).split(","))
    if {"+avx512bw", "+avx512vnni"} <= there:
        return "vnni"
    return "avx2" if "+avx2" in there else "plain"


PAIRS = instructions() == "vnni"  # two tiles at a time: an addition takes longer than those of one; 32 registers


def _plus_products(builder, total, codes, asked):
    """Of each lane, `total` and the products of its four unsigned codes with four signed bytes."""
    how = instructions()
    if how == "vnni":
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, codes, asked)
    if how == "avx2":
        eights, sixteens = ir.VectorType(BYTE, 32), ir.VectorType(ir.IntType(16), 16)
        sums = []
        for half in (0, 1):  # codes to 15 times two bytes do not saturate 16 bits
            lanes = ir.Constant(ir.VectorType(WORD, 8), [8 * half + lane for lane in range(8)])
            a, b = (builder.bitcast(builder.shuffle_vector(x, x, lanes), eights) for x in (codes, asked))
            twos = call(builder, "llvm.x86.avx2.pmadd.ub.sw", sixteens, a, b)
            sums.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(WORD, 8), twos, every(sixteens, 1)))
        return builder.add(total, builder.shuffle_vector(*sums, ir.Constant(WORDS, list(range(LANES)))))
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, every(WORDS, 8 * byte)), every(WORDS, 255))
        signed = builder.ashr(builder.shl(asked, every(WORDS, 24 - 8 * byte)), every(WORDS, 24))
        total = builder.add(total, builder.mul(code, signed))
    return total


# -- logits ----------------------------------------------------------------------------------------------------------


@intrinsic
def _round(typing, served, query, q, low, step, padded, middle, numbers, asked, a, wide, scale, base, g):
    """Rounds the queries of `served` (1 to 4) heads, one after the other in `query[q:]`, times `step` to bytes
    `asked[a:]`, `wide` from head to head; `scale[g:]` is what 1 of them stands for, and `base[g:]` the product with
    the levels of the `middle` code, less what the bytes make of it. All float32; `padded`, a query's numbers, is a
    multiple of 16."""

    def code(context, builder, signature, arguments):
        served_, query_, q_, low_, step_, padded_, middle_, numbers_, asked_, a_, wide_, scale_, base_, g_ = arguments
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
            for held in (*totals, *tops):
                builder.store(every(FLOATS, 0.0), held)
            for held in sums:
                builder.store(every(WORDS, 0), held)
            with cgutils.for_range_slice(builder, none, padded_, sixteen, intp=padded_.type) as (d, _):
                steps = load(step, step_, d)
                centres = times_plus(builder, steps, middles, load(low, low_, d))
                for k, (total, top) in enumerate(zip(totals, tops, strict=True)):
                    x = load(query, query_, builder.add(place_of(q_, padded_, k), d))
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
                for k, held in enumerate(sums):
                    x = load(numbers, numbers_, builder.add(place_of(none, padded_, k), d))
                    moved = builder.bitcast(times_plus(builder, x, factors[k], every(FLOATS, MAGIC)), WORDS)
                    to = place_in(context, builder, asked, asked_, builder.add(place_of(a_, wide_, k), d), MARKS)
                    builder.store(builder.trunc(moved, MARKS), to, align=1)
                    builder.store(builder.add(moved, builder.load(held)), held)
            extra = builder.mul(builder.trunc(padded_, WORD), magic)
            for k, (total, held) in enumerate(zip(totals, sums, strict=True)):
                bytes_ = call(builder, "llvm.vector.reduce.add.v16i32", WORD, builder.load(held))
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
        place, query, place, low, step, place, types.float32, numbers, asked, place, place, scale, base, place
    ), code  # fmt: skip


@intrinsic(prefer_literal=True)
def _tiles(typing, tiles, served, packed, at, words, bits, asked, a, wide, scale, base, g, real, r, out, o, step):
    """Logits of `tiles` (1 or 2) times 16 rows for `served` (1 to 4) query heads.

    Codes are `packed[at:]`; of query head k from g on the rounded query is `asked[a + k * wide:]` and the logits go to
    `out[o + k * step:]`. -inf where `real[r:]` is 0.
    """
    if not isinstance(tiles, types.IntegerLiteral):
        return None
    many = tiles.literal_value

    def code(context, builder, signature, arguments):
        (
            _, served_, packed_, at_, words_, bits_, asked_, a_, wide_, scale_, base_, g_, real_, r_, out_, o_, step_,
        ) = arguments  # fmt: skip

        def number(n):
            return ir.Constant(at_.type, n)

        planes = builder.sdiv(number(8), bits_)
        gap = builder.sdiv(wide_, number(4))
        shift = splat(builder, builder.trunc(bits_, WORD), WORDS)
        last = builder.sub(builder.shl(number(1), bits_), number(1))
        mask = splat(builder, builder.mul(builder.trunc(last, WORD), ir.Constant(WORD, 0x01010101)), WORDS)
        codes_at = place_in(context, builder, packed, packed_, at_, WORDS)
        asked_at = place_in(context, builder, asked, asked_, a_, WORD)
        held = [cgutils.alloca_once(builder, WORDS) for _ in range(many)]

        def products(heads):
            totals = [[cgutils.alloca_once(builder, WORDS) for _ in range(heads)] for _ in range(many)]
            for total in (total for of_tile in totals for total in of_tile):
                builder.store(every(WORDS, 0), total)
            with cgutils.for_range(builder, words_) as word:
                for t in range(many):
                    place = builder.add(builder.mul(words_, number(t)), word.index)
                    builder.store(builder.load(builder.gep(codes_at, [place]), align=1), held[t])
                    ask_for(builder, builder.gep(codes_at, [builder.add(place, number(LINES_AHEAD))]))
                with cgutils.for_range(builder, planes) as plane:
                    place = builder.add(builder.mul(plane.index, words_), word.index)
                    asks = []
                    for k in range(heads):
                        of_head = builder.gep(asked_at, [builder.add(place, builder.mul(gap, number(k)))])
                        asks.append(splat(builder, builder.load(of_head, align=1), WORDS))
                    for t in range(many):
                        codes = builder.load(held[t])
                        builder.store(builder.lshr(codes, shift), held[t])
                        codes = builder.and_(codes, mask)
                        for k in range(heads):
                            total = totals[t][k]
                            builder.store(_plus_products(builder, builder.load(total), codes, asks[k]), total)
            known = place_in(context, builder, real, real_, r_, MARKS)
            for t in range(many):
                there = builder.load(builder.gep(known, [number(t)]), align=1)
                there = builder.icmp_unsigned("!=", there, every(MARKS, 0))
                for k in range(heads):
                    of_head = builder.add(g_, number(k))
                    by = splat(builder, builder.load(place_in(context, builder, scale, scale_, of_head)), FLOATS)
                    plus = splat(builder, builder.load(place_in(context, builder, base, base_, of_head)), FLOATS)
                    logit = times_plus(builder, builder.sitofp(builder.load(totals[t][k]), FLOATS), by, plus)
                    place = builder.add(builder.add(o_, number(t * LANES)), builder.mul(step_, number(k)))
                    to = place_in(context, builder, out, out_, place, FLOATS)
                    builder.store(builder.select(there, logit, every(FLOATS, -math.inf)), to, align=4)

        for heads in range(1, SERVED + 1):
            with builder.if_then(builder.icmp_signed("==", served_, number(heads))):
                products(heads)
        return context.get_dummy_value()

    place = types.intp
    return types.void(
        tiles, place, packed, place, place, place, asked, place, place, scale, base, place, real, place, out, place,
        place,
    ), code  # fmt: skip


@intrinsic
def _put(typing, array, place, number):
    """`array[place] = number` of a flat array that no `_read` in the loop touches."""

    def code(context, builder, signature, arguments):
        at = place_in(context, builder, array, arguments[0], arguments[1])
        builder.store(arguments[2], at).set_metadata("noalias", _scope(builder))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), code


@intrinsic
def _of_grid(typing, levels, grid, place, other):
    """`grid[place]` where `levels` are of 8 bits, else `other`."""
    eight = levels.dtype in (types.int8, types.uint8)

    def code(context, builder, signature, arguments):
        if not eight:
            return arguments[3]
        value = builder.load(place_in(context, builder, grid, arguments[1], arguments[2]))
        value.set_metadata("alias.scope", _scope(builder))
        return value

    return types.float32(levels, grid, types.intp, types.float32), code


@njit(inline="always")
def _ask(
    query, h, share, padded, size, bits, wide, low, low_at, step, step_at, grid, grid_at, lows, steps, numbers, asked,
    scale, base,
):  # fmt: skip
    """The query heads of KV head h, rounded for one group, whose levels are `low[low_at:]` and `step[step_at:]`, on the
    grid `grid[grid_at:]` (`kernels.quantized_keys.level_grid`) if they are of 8 bits."""
    unit_at, pace_at = grid_at + size, grid_at + 2 * size
    for d in range(size):
        unit, anchor = _of_grid(low, grid, unit_at + d, ONE), _of_grid(low, grid, grid_at + d, NONE)
        _put(lows, d, _read(low, low_at + d) * unit + anchor)
        _put(steps, d, _read(step, step_at + d) * _of_grid(step, grid, pace_at + d, ONE))
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    for g in range(0, share, SERVED):
        served, q = min(SERVED, share - g), (h * share + g) * padded
        _round(served, query, q, lows, steps, padded, middle, numbers, asked, g * wide, wide, scale, base, g)


@njit
def _wide(words, bits, padded):
    """Bytes from one rounded query to the next: what a row's codes meet, and what `_round` writes, 16 at a time."""
    return (max(4 * words * (8 // bits), padded) + LANES - 1) & -LANES


@njit
def _scratch(share, padded, wide):
    """What `_ask` fills: levels and products `[padded]`, rounded queries of `wide` bytes, factors and bases `[G]`."""
    lows, steps, numbers = (
        np.zeros(padded, np.float32),
        np.zeros(padded, np.float32),
        np.empty(SERVED * padded, np.float32),
    )
    asked = np.zeros(share * wide, np.uint8)
    return lows, steps, numbers, asked, np.empty(share, np.float32), np.empty(share, np.float32)


@intrinsic
def _page_masses(typing, numbers, at, page, out):
    """Of the pages of `page` rows, a power of two, that the register `numbers[at:]` holds, or of the one that begins
    there: the logarithms of base 2 of their sums of 2 to the power of each, the one of lane i at `out[i]`."""

    def code(context, builder, signature, arguments):
        numbers_, at_, page_, out_ = arguments
        none, sixteen = ir.Constant(page_.type, 0), ir.Constant(page_.type, LANES)
        top = cgutils.alloca_once(builder, FLOATS)
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(every(FLOATS, -math.inf), top)
        builder.store(every(FLOATS, 0.0), total)

        def load(n):
            place = builder.add(at_, n)
            return builder.load(place_in(context, builder, numbers, numbers_, place, FLOATS), align=4)

        def over_page(held, joined):
            for apart in (1, 2, 4, 8):
                with builder.if_then(builder.icmp_signed(">", page_, ir.Constant(page_.type, apart))):
                    x = builder.load(held)
                    other = ir.Constant(WORDS, [lane ^ apart for lane in range(LANES)])
                    builder.store(joined(x, builder.shuffle_vector(x, x, other)), held)

        with cgutils.for_range_slice(builder, none, page_, sixteen, intp=page_.type) as (n, _):
            builder.store(larger(builder, load(n), builder.load(top)), top)
        over_page(top, lambda a, b: larger(builder, a, b))
        peak = builder.load(top)
        less = larger(builder, peak, every(FLOATS, LOWEST))
        with cgutils.for_range_slice(builder, none, page_, sixteen, intp=page_.type) as (n, _):
            builder.store(builder.fadd(powers(builder, builder.fsub(load(n), less)), builder.load(total)), total)
        over_page(total, builder.fadd)
        mass = builder.fadd(peak, logarithms(builder, builder.load(total)))
        builder.store(mass, place_in(context, builder, out, out_, none, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp, out), code


@njit
def _part(query, h, size, packed, at, group_step, low, low_at, low_step, step, step_at, step_step, grid, grid_step,
          real, r, places, rows, words, bits, first, last, page, unit, out, o, out_step):  # fmt: skip
    """What the pages of the groups `first` to `last` of one KV head weigh, as `out[o:]` and so on for each query head:
    for pages of 1 row their logits, else `unit` times the logarithms of base 2 of their sums of 2 to the power of each.

    places: `[n]`, where in a store that sequences share a group lies, negative: nowhere; `real[r:]` is then of any one
    group. `[0]`: the groups are the sequence's own. The logits of a page's rows are kept for one group at a time.
    """
    share, padded = query.shape[1:]
    wide = _wide(words, bits, padded)
    lows, steps, numbers, asked, scale, base = _scratch(share, padded, wide)
    flat, tiles, pages = query.reshape(-1), rows // LANES, rows // page
    paired = tiles & -2 if PAIRS else 0
    shared, alone = len(places) > 0, page == 1
    held = np.empty(1 if alone else SERVED * rows, np.float32)
    masses = np.empty(LANES, np.float32)
    for group in range(first, last):
        place, row, to = np.intp(group), r + group * rows, o + (group - first) * pages
        if shared:
            place, row = np.intp(places[group]), r
            ahead = np.intp(places[group + AHEAD]) if group + AHEAD < last else np.intp(-1)
            if ahead >= 0:
                fetch(packed, at + ahead * group_step, rows * 4 * words)
                fetch(low, low_at + ahead * low_step, size)
                fetch(step, step_at + ahead * step_step, size)
            if place < 0:
                for g in range(share):
                    out[to + g * out_step : to + g * out_step + pages] = -np.inf
                continue
        _ask(flat, h, share, padded, size, bits, wide, low, low_at + place * low_step,
             step, step_at + place * step_step, grid, h * grid_step,
             lows, steps, numbers, asked, scale, base)  # fmt: skip
        codes = at + place * group_step
        for g in range(0, share, SERVED):
            served, a = min(SERVED, share - g), g * wide
            into, put, pace = (out, to + g * out_step, out_step) if alone else (held, np.intp(0), np.intp(rows))
            for t in range(0, paired, 2):
                _tiles(2, served, packed, codes + t * 64 * words, words, bits, asked, a, wide, scale, base, g, real,
                       row + t * LANES, into, put + t * LANES, pace)  # fmt: skip
            for t in range(paired, tiles):
                _tiles(1, served, packed, codes + t * 64 * words, words, bits, asked, a, wide, scale, base, g, real,
                       row + t * LANES, into, put + t * LANES, pace)  # fmt: skip
            if alone:
                continue
            for k in range(served):
                p = to + (g + k) * out_step
                for of in range(k * rows, (k + 1) * rows, max(page, LANES)):
                    _page_masses(held, of, page, masses)
                    for lane in range(0, LANES, page):
                        out[p] = masses[lane] * unit
                        p += 1


@entry(parallel=True, cache=True, nogil=True)
def _masses(query, size, packed, packed_steps, low, low_steps, step, step_steps, grid, grid_step, real, real_step,
            rows, words, places, bits, once, page, unit, out):  # fmt: skip
    """query: `[B*H,G,padded]`; places: `[B,n]` or `[B,0]`, see `_part`; out: `[B,H,G,N/page]`; `once`: groups of a
    part."""
    _, heads, share, count = out.shape
    pages = rows // page
    groups = count // pages
    parts = (groups + once - 1) // once
    line = out.reshape(-1)
    for work in prange(query.shape[0] * parts):
        which, first = work // parts, work % parts * once
        b, h = which // heads, which % heads
        _part(query, which, size, packed, b * packed_steps[0] + h * packed_steps[1], packed_steps[2],
              low, b * low_steps[0] + h * low_steps[1], low_steps[2],
              step, b * step_steps[0] + h * step_steps[1], step_steps[2], grid, grid_step,
              real, b * real_step, places[b], rows, words, bits, first, min(groups, first + once), page, unit,
              line, which * share * count + first * pages, count)  # fmt: skip


def _stored(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    grid: Tensor | None,
    real: Tensor,
    rows: int,
    factor: float,
) -> Any:
    """What a kernel takes of its inputs, the query padded and times `factor`."""
    size = query.shape[-1]
    padded = -(-size // LANES) * LANES
    asked = torch.nn.functional.pad(query.float().flatten(0, 1) * factor, (0, padded - size)).contiguous()
    units = torch.empty(0) if grid is None else grid
    real = real if real.stride(-1) == 1 else real.contiguous()  # one for all rows, expanded
    return (
        asked.numpy(), size, *_flat(packed), *_flat(low), *_flat(step),
        _line(units.contiguous()), 0 if grid is None else NUMBERS * size,
        _line(real.view(torch.uint8)), real.stride(0), rows, packed.shape[3] // (4 * rows),
    )  # fmt: skip


def _work(query: Tensor, rows: int) -> float:
    return query.numel() * rows / 8  # integer products: a register has four times as many of them, and two a cycle


def masses(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, page: int = 1,
    grid: Tensor | None = None, table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`[B,H,G,N/page]` float32: the masses of pages as of `dispatch.scores`, without the group's vote; the
    logit of a page of 1 row. The query times steps is rounded to 8 bits.

    With a `table` as of `dispatch.scores_at`, codes and levels `[B,H,entries,..]` are of a store, and `real`
    `[B,rows]` is of any of its entries.
    """
    batch, heads, share, size = query.shape
    groups = low.shape[2] if table is None else table.shape[1]
    rows = real.shape[1] // groups if table is None else real.shape[1]
    out = torch.empty(batch, heads, share, groups * rows // page)
    factor, unit = (1.0, 1.0) if page == 1 else (float(LOG2E), float(LN2))
    inputs = _stored(query, packed, low, step, grid, real, rows, factor * size**-0.5)
    with ONE_AT_A_TIME:
        use_threads(_work(query, groups * rows) + _exponentials(query, groups * rows, page), _alone(table))
        _masses(*inputs, _places(table, batch), bits, max(PART_ROWS // rows, 1), page, np.float32(unit), out.numpy())
    return out


def _places(table: Tensor | None, batch: int) -> Any:
    """What a kernel takes of a table."""
    return np.empty((batch, 0), np.int32) if table is None else table.int().contiguous().numpy()


def _alone(table: Tensor | None) -> int:
    """Work for which a thread more pays: a store is an engine's, in whose steps threads are awake."""
    return ALONE if table is None else STEP


def _exponentials(query: Tensor, rows: int, page: int) -> float:
    """Work of a page's sum over its rows; none for pages of 1."""
    return 0.0 if page == 1 else EXPONENTIAL * query.shape[:3].numel() * rows / 8


# -- listed pages ----------------------------------------------------------------------------------------------------


@njit
def _pages(query, h, g, served, size, packed, at, group_step, low, low_at, low_step, step, step_at, step_step, grid,
           grid_at, real, r, rows, words, bits, count, pages, page, out, o, out_step):  # fmt: skip
    """Logits of listed pages for `served` query heads from g on of KV head h; pages: `[P]`."""
    padded = query.shape[2]
    wide = _wide(words, bits, padded)
    lows, steps, numbers, asked, scale, base = _scratch(served, padded, wide)
    flat, known, part = query.reshape(-1)[g * padded :], -1, np.empty(SERVED * LANES, np.float32)
    for p in range(pages.shape[0]):
        first = pages[p] * page
        if p + AHEAD < pages.shape[0] and pages[p + AHEAD] >= 0:
            row = pages[p + AHEAD] * page
            group = row // rows
            fetch(packed, at + group * group_step + (row - group * rows) * 4 * words, min(page, rows) * 4 * words)
            fetch(low, low_at + group * low_step, size)
            fetch(step, step_at + group * step_step, size)
        for row in range(first, first + page, LANES):
            to, inside = o + p * page + row - first, row % LANES
            if first < 0 or row >= count:
                for k in range(served):
                    out[to + k * out_step : to + k * out_step + min(page, LANES)] = -np.inf
                continue
            group, row = row // rows, row - inside
            if group != known:
                _ask(flat, 0, served, padded, size, bits, wide, low, low_at + group * low_step,
                     step, step_at + group * step_step, grid, grid_at,
                     lows, steps, numbers, asked, scale, base)  # fmt: skip
                known = group
            codes = at + group * group_step + (row - group * rows) * 4 * words
            for g in range(0, served, SERVED):
                many, a = min(SERVED, served - g), g * wide
                if page >= LANES:
                    _tiles(1, many, packed, codes, words, bits, asked, a, wide, scale, base, g, real, r + row,
                           out, to + g * out_step, out_step)  # fmt: skip
                    continue
                _tiles(1, many, packed, codes, words, bits, asked, a, wide, scale, base, g, real, r + row,
                       part, 0, LANES)  # fmt: skip
                for k in range(many):
                    for i in range(page):
                        out[to + (g + k) * out_step + i] = part[k * LANES + inside + i]


@entry(parallel=True, cache=True, nogil=True)
def _listed(query, size, packed, packed_steps, low, low_steps, step, step_steps, grid, grid_step, real, real_step,
            rows, words, bits, count, heads, pages, page, parts, out):  # fmt: skip
    """pages: `[B*H,lists,P]`, lists 1 or G; out: `[B*H,G,P*page]`."""
    share, lists, named = query.shape[1], pages.shape[1], pages.shape[2]
    line, served, each = out.reshape(-1), share // lists, (named + parts - 1) // parts
    for unit in prange(query.shape[0] * lists * parts):
        which, part = unit // parts, unit % parts
        head, which = which % lists, which // lists
        b, h = which // heads, which % heads
        first = min(named, part * each)
        _pages(query[which : which + 1], 0, head * served, served, size,
               packed, b * packed_steps[0] + h * packed_steps[1], packed_steps[2],
               low, b * low_steps[0] + h * low_steps[1], low_steps[2],
               step, b * step_steps[0] + h * step_steps[1], step_steps[2], grid, which * grid_step,
               real, b * real_step, rows, words, bits, count, pages[which, head, first : min(named, first + each)],
               page, line, ((which * share + head * served) * named + first) * page, named * page)  # fmt: skip


def listed_logits(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, pages: Tensor, page: int,
    grid: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `sparseattn.kernels.quantized_keys.dispatch.listed_logits`."""
    return _listed_logits(query, packed, low, step, real, bits, pages, page, grid, 1.0)


def _listed_logits(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, pages: Tensor, page: int,
    grid: Tensor | None, factor: float,
) -> Tensor:  # fmt: skip
    """Logits of the rows of listed pages, times `factor`."""
    batch, heads, share, size = query.shape
    count, named = real.shape[1], pages.shape[2]
    rows = count // low.shape[2] if count else LANES
    out = torch.empty(batch, heads, share, named * page)
    inputs = _stored(query, packed, low, step, grid, real, rows, factor * size**-0.5)
    listed = pages.int().contiguous().numpy().reshape(batch * heads, -1, named)
    with ONE_AT_A_TIME:
        threads = use_threads(2 * _work(query, named * page))  # a group's query may be rounded for one page alone
        _listed(*inputs, bits, count, heads, listed, page, 4 * threads, out.numpy().reshape(batch * heads, share, -1))
    return out


# -- the vote of a query group ---------------------------------------------------------------------------------------


@intrinsic
def _highest(typing, numbers, at, count):
    """The largest of `numbers[at:at + count]`, `count` a multiple of 16."""

    def code(context, builder, signature, arguments):
        numbers_, at_, count_ = arguments
        top = cgutils.alloca_once_value(builder, every(FLOATS, -math.inf))
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            x = builder.load(place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS), align=4)
            builder.store(larger(builder, x, builder.load(top)), top)
        return call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, builder.load(top), flags=("nnan",))

    return types.float32(numbers, types.intp, types.intp), code


@intrinsic
def _weights(typing, numbers, at, count, highest, out, o):
    """`out[o:o + count]`, a multiple of 16: 2 to the power of `numbers[at:] - highest`, 0 for -inf; returns the sum."""

    def code(context, builder, signature, arguments):
        numbers_, at_, count_, highest_, out_, o_ = arguments
        total, less = cgutils.alloca_once(builder, FLOATS), splat(builder, highest_, FLOATS)
        builder.store(every(FLOATS, 0.0), total)
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            x = builder.load(place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS), align=4)
            there = builder.fcmp_unordered("!=", x, every(FLOATS, -math.inf))
            power = builder.select(there, powers(builder, builder.fsub(x, less)), every(FLOATS, 0.0))
            builder.store(power, place_in(context, builder, out, out_, builder.add(o_, n), FLOATS), align=4)
            builder.store(builder.fadd(power, builder.load(total)), total)
        start = ir.Constant(FLOAT, 0.0)
        return call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, start, builder.load(total), flags=FAST)

    place = types.intp
    return types.float32(numbers, place, place, types.float32, out, place), code


@intrinsic
def _voted(typing, numbers, at, step, share, factor, w, most, out, o, count):
    """`out[o:o + count]`, a multiple of 16: the natural logarithm of the sum over `share` query heads of
    `numbers[at + g * step:] * factor[w + g]`, times 2 to the power of `most`; -inf where the sum is 0."""

    def code(context, builder, signature, arguments):
        numbers_, at_, step_, share_, factor_, w_, most_, out_, o_, count_ = arguments
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        total, plus = cgutils.alloca_once(builder, FLOATS), splat(builder, most_, FLOATS)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            builder.store(every(FLOATS, 0.0), total)
            with cgutils.for_range(builder, share_) as loop:
                place = builder.add(builder.add(at_, n), builder.mul(loop.index, step_))
                x = builder.load(place_in(context, builder, numbers, numbers_, place, FLOATS), align=4)
                by = builder.load(place_in(context, builder, factor, factor_, builder.add(w_, loop.index)))
                builder.store(times_plus(builder, x, splat(builder, by, FLOATS), builder.load(total)), total)
            whole = builder.load(total)
            vote = builder.fmul(builder.fadd(logarithms(builder, whole), plus), every(FLOATS, float(LN2)))
            there = builder.fcmp_unordered("!=", whole, every(FLOATS, 0.0))
            vote = builder.select(there, vote, every(FLOATS, -math.inf))
            builder.store(vote, place_in(context, builder, out, out_, builder.add(o_, n), FLOATS), align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(numbers, place, place, place, factor, place, types.float32, out, place, place), code


@njit
def _factors(peak, total, most):
    """What weights are multiplied with, in place of `total`; peak, total: `[parts,G]`; most: `[parts]`.

    The share of a query head's probability in a weight of a part is `2^(peak - norm)`, `norm` the logarithm of its
    total. Of that each part takes out the largest, as `most`: parts that weigh next to nothing still rank.
    """
    parts, share = peak.shape
    norm = np.empty(share, np.float32)
    for g in range(share):
        highest, whole = np.float32(-np.inf), np.float32(0)
        for part in range(parts):
            highest = max(highest, peak[part, g])
        for part in range(parts):
            if peak[part, g] > -np.inf:
                whole += total[part, g] * np.exp2(peak[part, g] - highest)
        norm[g] = highest + np.log2(whole) if highest > -np.inf else np.float32(0)
    for part in range(parts):
        most[part] = LOWEST
        for g in range(share):
            most[part] = max(most[part], peak[part, g] - norm[g])
        for g in range(share):
            total[part, g] = np.exp2(peak[part, g] - norm[g] - most[part]) if peak[part, g] > -np.inf else np.float32(0)


@njit
def _weigh(query, which, size, packed, at, group_step, low, low_at, low_step, step, step_at, step_step, grid, grid_step,
           real, r, places, rows, words, bits, first, last, page, each, held, to, wide, peak, total):  # fmt: skip
    """The weights of a part, groups `first` to `last`, as `held[to:]` and so on for each query head, `wide` from one to
    the next; of each head the largest score and the sum of the weights as `peak` and `total` `[G]`.
    """
    share = query.shape[1]
    scores = np.empty(share * each, np.float32)
    _part(query, which, size, packed, at, group_step, low, low_at, low_step, step, step_at, step_step, grid, grid_step,
          real, r, places, rows, words, bits, first, last, page, np.float32(1), scores, 0, each)  # fmt: skip
    pages = (last - first) * rows // page
    count = (pages + LANES - 1) & -LANES
    for g in range(share):
        begin = g * each
        scores[begin + pages : begin + count] = -np.inf
        highest = _highest(scores, begin, count)
        peak[g], total[g] = highest, 0
        if highest > -np.inf:
            total[g] = _weights(scores, begin, count, highest, held, to)
        else:
            held[to : to + count] = 0
        held[to + count : to + each] = 0
        to += wide


@entry(parallel=True, cache=True, nogil=True)
def _softmax(query, size, packed, packed_steps, low, low_steps, step, step_steps, grid, grid_step, real, real_step,
             rows, words, table, bits, groups, once, heads, page, each, held, out, ids):  # fmt: skip
    """table: as `_masses` has `places`; held: `[L,G,parts*each]`, for weights; out: `[B*H,parts*each]`; ids: `[B*H,S]`,
    the best places of each, or S 0; `once`: groups of a part, of which `each` is the number of pages, up to a multiple
    of 16.

    A weight is 2 to the power of the score, in units of log 2, less the part's largest; of rows that all query heads
    weigh at less than 2^-126 of that no order is kept. Where L divides B*H, L threads each take whole KV heads, one
    after the other, so that the weights of one stay in the cache, and the votes too where `out` is `[L,parts*each]`;
    with L = B*H all threads share each of them.
    """
    lists, (workers, share, places) = len(ids), held.shape
    parts, own = places // each, len(out) == lists
    line, votes = held.reshape(-1), out.reshape(-1)
    peak, total = np.empty((lists, parts, share), np.float32), np.empty((lists, parts, share), np.float32)
    most, factors = np.empty((lists, parts), np.float32), total.reshape(-1)
    shared = workers == lists
    units = workers * parts if shared else workers  # named first: numba takes no choice inside prange for parallel
    for unit in prange(units):
        worker = unit // parts if shared else unit
        for which in range(worker * lists // workers, (worker + 1) * lists // workers):
            b, h = which // heads, which % heads
            begin = unit % parts if shared else 0
            for part in range(begin, begin + 1 if shared else parts):
                first = part * once
                _weigh(query, which, size, packed, b * packed_steps[0] + h * packed_steps[1], packed_steps[2],
                       low, b * low_steps[0] + h * low_steps[1], low_steps[2],
                       step, b * step_steps[0] + h * step_steps[1], step_steps[2], grid, grid_step,
                       real, b * real_step, table[b], rows, words, bits, first, min(groups, first + once), page, each,
                       line, worker * share * places + part * each, places,
                       peak[which, part], total[which, part])  # fmt: skip
            if not shared:
                to = np.intp(which if own else worker)
                _factors(peak[which], total[which], most[which])
                for part in range(parts):
                    _voted(line, worker * share * places + part * each, places, share,
                           factors, (which * parts + part) * share, most[which, part],
                           votes, to * places + part * each, each)  # fmt: skip
                best(out[to], ids[which])
    if shared:
        for which in range(lists):
            _factors(peak[which], total[which], most[which])
        for unit in prange(lists * parts):
            which, part = unit // parts, unit % parts
            _voted(line, which * share * places + part * each, places, share, factors, unit * share, most[which, part],
                   votes, which * places + part * each, each)  # fmt: skip
        for which in prange(lists):
            best(out[which], ids[which])


def _vote(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, page: int, count: int | None,
    grid: Tensor | None, table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Votes `[B,H,parts,each]`, of which as many of a part as it has pages are said; for a `count`, which reads single
    rows, the best rows `[B,H,S]` int32 instead. See `masses` for a table."""
    batch, heads, share, size = query.shape
    groups = low.shape[2] if table is None else table.shape[1]
    rows = real.shape[1] // groups if table is None else real.shape[1]
    stored, lists = groups * rows, batch * heads
    once = max(PART_ROWS // rows, 1)
    parts, inside = -(-groups // once), once * rows // page
    each = -(-inside // LANES) * LANES
    ids = torch.empty(batch, heads, min(count or 0, stored), dtype=torch.int32)
    inputs = _stored(query, packed, low, step, grid, real, rows, float(LOG2E) * size**-0.5)
    with ONE_AT_A_TIME:
        work = _work(query, stored) + _exponentials(query, stored, page)
        threads = use_threads(work + EXPONENTIAL * lists * share * parts * each / 8, _alone(table))
        workers = lists if lists % threads else threads
        out = torch.empty(lists if count is None else workers, parts, each)
        _softmax(
            *inputs, _places(table, batch), bits, groups, once, heads, page, each,
            torch.empty(workers, share, parts * each).numpy(),
            out.numpy().reshape(-1, parts * each), ids.numpy().reshape(lists, -1),
        )  # fmt: skip
    return out.view(batch, heads, parts, each)[..., :inside] if count is None else out, ids


def scores(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, page: int,
    grid: Tensor | None = None, table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `sparseattn.kernels.quantized_keys.dispatch.scores` by "softmax"; see `masses` for a table."""
    votes, _ = _vote(query, packed, low, step, real, bits, page, None, grid, table)
    stored = real.shape[1] if table is None else real.shape[1] * table.shape[1]
    return votes.flatten(2)[..., : stored // page]


def chosen_rows(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, count: int,
    grid: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `dispatch.best` by "softmax"; of votes, a thread keeps those of one KV head."""
    return _vote(query, packed, low, step, real, bits, 1, count, grid)[1]


@entry(parallel=True, cache=True, nogil=True)
def _voted_rows(logits, pages, page, rows, held, votes, marked, ids, groups):
    """logits: `[L,G,M]`, M a multiple of 16; pages: `[L,P]`; held, votes, marked: `[T,G,M]`, `[T,M]` and `[T,n]`, of T
    threads; ids: `[L,S]`, the best rows; groups: `[L]`, in how many of n groups, of `rows` rows, a listed one lies."""
    lists, share, count = logits.shape
    workers = len(held)
    line, weights, out = logits.reshape(-1), held.reshape(-1), votes.reshape(-1)
    for worker in prange(workers):
        peak, total = np.empty((1, share), np.float32), np.empty((1, share), np.float32)
        most = np.empty(1, np.float32)
        for which in range(worker * lists // workers, (worker + 1) * lists // workers):
            for g in range(share):
                at, to = (which * share + g) * count, (worker * share + g) * count
                peak[0, g], total[0, g] = _highest(line, at, count), 0
                if peak[0, g] > -np.inf:
                    total[0, g] = _weights(line, at, count, peak[0, g], weights, to)
                else:
                    weights[to : to + count] = 0
            _factors(peak, total, most)
            _voted(weights, worker * share * count, count, share, total.reshape(-1), 0, most[0], out, worker * count,
                   count)  # fmt: skip
            listed, chosen = pages[which], ids[which]
            best(votes[worker], chosen)
            for i in range(len(chosen)):
                if chosen[i] >= 0:
                    chosen[i] = listed[chosen[i] // page] * page + chosen[i] % page
            groups[which] = _touched(listed, page, rows, marked[worker])


@njit
def _touched(pages, page, rows, marked):
    """How many groups of `rows` rows listed pages reach into; marked: `[n]`, of each group."""
    marked[:] = 0
    for p in range(len(pages)):
        if pages[p] >= 0:
            first = pages[p] * page // rows
            for group in range(first, min((pages[p] * page + page - 1) // rows + 1, len(marked))):
                marked[group] = 1
    found = 0
    for group in range(len(marked)):
        found += marked[group]
    return found


def chosen_listed(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, pages: Tensor, page: int,
    count: int, grid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `sparseattn.kernels.quantized_keys.dispatch.best_listed` by "softmax", of pages `[B,H,P]`."""
    pages = pages.int().contiguous()
    logits = _listed_logits(query, packed, low, step, real, bits, pages, page, grid, float(LOG2E))
    batch, heads, share, listed = logits.shape
    lists, held = batch * heads, low.shape[2]
    ids = torch.empty(batch, heads, min(count, listed), dtype=torch.int32)
    groups = torch.empty(batch, heads, dtype=torch.int64)
    if listed % LANES:
        logits = torch.nn.functional.pad(logits, (0, -listed % LANES), value=-math.inf)
    full = logits.shape[3]
    with ONE_AT_A_TIME:
        threads = min(use_threads(EXPONENTIAL * logits.numel() / 4), lists)
        _voted_rows(
            logits.numpy().reshape(lists, share, full), pages.numpy().reshape(lists, -1), page,
            real.shape[1] // max(held, 1), np.empty((threads, share, full), np.float32),
            np.empty((threads, full), np.float32), np.empty((threads, held), np.uint8),
            ids.numpy().reshape(lists, -1), groups.numpy().reshape(-1),
        )  # fmt: skip
    return ids, groups


# -- coding keys -----------------------------------------------------------------------------------------------------


@njit
def _bounds(keys, at, step, rows, size, least, most):
    for d in range(size):
        least[d] = most[d] = _read(keys, at + d)
    for row in range(1, rows):
        first = at + row * step
        for d in range(size):
            x = _read(keys, first + d)
            least[d] = x if x < least[d] else least[d]
            most[d] = x if x > most[d] else most[d]


@entry(parallel=True, cache=True, nogil=True)
def _extents(keys, steps, rows, least, most):
    """least, most: `[B,H,n/rows,D]`."""
    batch, heads, groups, size = least.shape
    for unit in prange(batch * heads * groups):
        which, group = unit // groups, unit % groups
        b, h = which // heads, which % heads
        at = b * steps[0] + h * steps[1] + group * rows * steps[2]
        _bounds(keys, at, steps[2], rows, size, least[b, h, group], most[b, h, group])


def extents(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each channel of keys `[B,H,n,D]` in groups of `rows`: `[B,H,n/rows,D]`."""
    batch, heads, new, size = keys.shape
    least, most = torch.empty(2, batch, heads, new // rows, size)
    with ONE_AT_A_TIME:
        use_threads(keys.numel())
        _extents(*_flat(keys), rows, least.numpy(), most.numpy())
    return least, most


@njit(fastmath=set(FAST))
def _sides(keys, at, step, rows, size, below, above, held):
    """below, above: `[D]`, replaced by the means of the numbers below and above the middle of what they reach over;
    both the one below where none is above."""
    for d in range(size):
        held[d] = (below[d] + above[d]) / np.float32(2)
        below[d] = above[d] = held[size + d] = 0
    for row in range(rows):
        first = at + row * step
        for d in range(size):
            x = _read(keys, first + d)
            upper = x > held[d]
            above[d] += x if upper else np.float32(0)
            below[d] += np.float32(0) if upper else x
            held[size + d] += np.float32(1) if upper else np.float32(0)
    for d in range(size):
        many = held[size + d]
        below[d] /= rows - many
        above[d] = above[d] / many if many > 0 else below[d]


@entry(parallel=True, cache=True, nogil=True)
def _means(keys, steps, rows, below, above):
    """below, above: `[B,H,n/rows,D]`."""
    batch, heads, groups, size = below.shape
    for unit in prange(batch * heads * groups):
        which, group = unit // groups, unit % groups
        b, h = which // heads, which % heads
        at = b * steps[0] + h * steps[1] + group * rows * steps[2]
        low, high = below[b, h, group], above[b, h, group]
        _bounds(keys, at, steps[2], rows, size, low, high)
        _sides(keys, at, steps[2], rows, size, low, high, np.empty(2 * size, np.float32))


def means(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The means of each channel's numbers below and above the middle of what they reach over, as `extents`."""
    batch, heads, new, size = keys.shape
    below, above = torch.empty(2, batch, heads, new // rows, size)
    with ONE_AT_A_TIME:
        use_threads(2 * keys.numel())
        _means(*_flat(keys), rows, below.numpy(), above.numpy())
    return below, above


@intrinsic
def _byte(typing, number):
    """A float32 from 0 to 255 rounded to an integer, to even where two are as near."""

    def code(context, builder, signature, arguments):
        moved = builder.fadd(arguments[0], ir.Constant(FLOAT, MAGIC))
        return builder.trunc(builder.bitcast(moved, WORD), BYTE)

    return types.uint8(types.float32), code


@njit
def _coded(keys, at, step, rows, size, low, low_at, by, by_at, last, bits, words, lows, steps, codes, packed, p):
    """One group: codes of each row, packed into words `packed[p:]` of int32."""
    planes = 8 // bits
    for d in range(size):
        lows[d], held = _read(low, low_at + d), _read(by, by_at + d)
        steps[d] = held if held > 0 else np.float32(1)
    for row in range(rows):
        first = at + row * step
        for d in range(size):
            code = (_read(keys, first + d) - lows[d]) / steps[d]
            code = code if code > 0 else np.float32(0)
            _put(codes, d, _byte(code if code < last else last))
        for plane in range(1, planes):
            for j in range(4 * words):
                codes[j] |= codes[plane * 4 * words + j] << np.uint8(plane * bits)
        row_words = codes.view(np.uint32)
        to = p + (row // LANES) * LANES * words + row % LANES
        for word in range(words):
            packed[to + word * LANES] = row_words[word]


@entry(parallel=True, cache=True, nogil=True)
def _encode(keys, steps, rows, size, heads, low, by, bits, words, packed):
    """low, by: flat `[B,H,n/rows,D]`; packed: `[B*H,n/rows,rows*W]` words."""
    lists, groups = packed.shape[:2]
    line, last = packed.reshape(-1), np.float32((1 << bits) - 1)
    for unit in prange(lists * groups):
        which, group = unit // groups, unit % groups
        b, h = which // heads, which % heads
        lows, held = np.empty(size, np.float32), np.empty(size, np.float32)
        codes = np.zeros(4 * words * (8 // bits), np.uint8)
        at = b * steps[0] + h * steps[1] + group * rows * steps[2]
        _coded(keys, at, steps[2], rows, size, low, unit * size, by, unit * size, last, bits, words, lows, held, codes,
               line, unit * rows * words)  # fmt: skip


def encode(keys: Tensor, low: Tensor, step: Tensor, rows: int, bits: int, words: int) -> Tensor:
    """Keys `[B,H,n,D]` by their levels, packed as `sparseattn.kernels.quantized_keys.reference.pack` packs them."""
    batch, heads, new, size = keys.shape
    packed = torch.empty(batch, heads, new // rows, rows * 4 * words, dtype=torch.uint8)
    with ONE_AT_A_TIME:
        use_threads(8 * keys.numel())
        _encode(
            *_flat(keys), rows, size, heads, _line(low.contiguous()), _line(step.contiguous()), bits, words,
            packed.view(torch.int32).numpy().view(np.uint32).reshape(batch * heads, -1, rows * words),
        )  # fmt: skip
    return packed
