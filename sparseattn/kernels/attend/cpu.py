"""`attend` and what selectors compute, compiled by numba for the CPU: rows are read in place, once for a query group.

Numbers of 16 bits are widened in registers, so that memory is read at its stored size; sums are float32. The list of
rows of each head is cut into parts of one length, whatever the lengths of its spans, and the parts are merged in their
order: the result does not depend on how many threads there are.

Each task has a headline. Functions may stand in any file: compiled code is kept by all of them (`numba_cache`).
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
import math
import operator
import threading
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry

ONE_AT_A_TIME = threading.RLock()  # numba's plainest threads, all it has on some machines, abort where two callers meet
LET = threading.local()  # `threads`: what numba was last told in this thread, as telling it takes long (`use_threads`)
MOST_THREADS = numba.config.NUMBA_NUM_THREADS
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}  # how compiled code is told of 16-bit floats
TILE = 32  # rows whose logits are known before their values are read
PARTS = 32  # parts in all, at least, where there are rows for them: enough for any number of threads
PART_ROWS = 128  # rows for which a part of its own pays
PAGES = 512  # scored by one part
LINE = 64  # bytes of a cache line
OUTPUTS = 128  # of a linear layer, computed by one part
EXPONENTIAL = 20  # multiplications that take as long as the exponentials and logarithms of one score's vote
ALONE = 2_000_000  # multiplications for which waking a thread more pays: it takes 50 to 60 us (docs/log, 2026-11-22)
STEP = 150_000  # the same amid an engine's step, whose threads are awake still
LOG2E, LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
# Sums may be reordered, which vector instructions need, and rounded once; NaN and infinity keep their meaning.
FAST = ("reassoc", "contract", "nsz")


def use_threads(work: float = math.inf, alone: int = ALONE) -> int:
    """Lets numba's loops run on torch's threads, or on as many of them as pay for `work` multiplications, one more for
    each `alone`.

    numba is told only what it was not told before: amid a model, with cold caches, telling takes 15 to 40 us
    (docs/log, 2026-11-22).
    """
    threads = int(min(torch.get_num_threads(), MOST_THREADS, 1 + work / alone))
    if getattr(LET, "threads", None) != threads:
        numba.set_num_threads(threads)
        LET.threads = threads
    return threads


def parts() -> int:
    """Parts that parallel loops are cut into, a few for each thread, as keys differ in work."""
    return 4 * use_threads()


def _widened(builder, value, number):
    if number == types.uint16:
        bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())
    if number == types.int16:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
    if number == types.float64:
        return builder.fptrunc(value, ir.FloatType())
    if number == types.int8:
        return builder.sitofp(value, ir.FloatType())
    if number == types.uint8:
        return builder.uitofp(value, ir.FloatType())
    return value


@intrinsic
def widen(typing, number):
    """A stored number as float32: float32 as it is, uint16 holds the bits of a bfloat16, int16 those of a float16."""

    def code(context, builder, signature, arguments):
        return _widened(builder, arguments[0], number)

    return types.float32(number), code


def _scope(builder):
    """Says that rows read and sums written never overlap, without which no loop over both is vectorised."""
    module = builder.module
    domain = module.add_metadata([ir.MetaDataString(module, "sparseattn")])
    return module.add_metadata([module.add_metadata([ir.MetaDataString(module, "rows"), domain])])


@intrinsic
def _read(typing, array, place):
    """`widen(array[place])` of a flat array, without numba's check for negative places, which no vector code has."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        value = builder.load(builder.gep(data, [arguments[1]]))
        value.set_metadata("alias.scope", _scope(builder))
        return _widened(builder, value, array.dtype)

    return types.float32(array, types.intp), code


@intrinsic
def _add(typing, array, place, number):
    """`array[place] += number` of a flat float32 array that no `_read` in the loop touches."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        at = builder.gep(data, [arguments[1]])
        held = builder.load(at)
        held.set_metadata("noalias", _scope(builder))
        builder.store(builder.fadd(held, arguments[2], flags=FAST), at).set_metadata("noalias", _scope(builder))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), code


@intrinsic
def _prefetch(typing, array, place):
    """Asks for the cache line of the element at `place` of an array, counted in its storage, ahead of its use."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read_often = [ir.Constant(word, number) for number in (0, 3, 1)]
        builder.call(ask, [builder.bitcast(builder.gep(data, [arguments[1]]), byte), *read_often])
        return context.get_dummy_value()

    return types.void(array, types.intp), code


@njit
def fetch(rows, at, size):
    """Asks for the `size` numbers from place `at` on of an array's storage, so that many rows come at once."""
    for d in range(0, size, LINE // rows.itemsize):
        _prefetch(rows, at + d)


@intrinsic
def _power_of_two(typing, exponent):
    """2 to the int32 `exponent`, -126 to 127."""

    def code(context, builder, signature, arguments):
        word = ir.IntType(32)
        bits = builder.shl(builder.add(arguments[0], ir.Constant(word, 127)), ir.Constant(word, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), code


@njit(fastmath=set(FAST))
def _exp2(x):
    """2 to the float32 x <= 0, within 2 units in the last place; below 2^-126 that."""
    x = np.float32(-126) if x < np.float32(-126) else x  # NaN stays
    whole = np.floor(x + np.float32(0.5))
    f = x - whole  # the series of 2^f, whose next term is below 6e-9
    p = np.float32(1.5252733e-05)
    p = p * f + np.float32(1.5403530e-04)
    p = p * f + np.float32(1.3333558e-03)
    p = p * f + np.float32(9.6181291e-03)
    p = p * f + np.float32(5.5504109e-02)
    p = p * f + np.float32(2.4022651e-01)
    p = p * f + np.float32(6.9314718e-01)
    p = p * f + np.float32(1)
    return p * _power_of_two(np.int32(whole))


@njit(fastmath=set(FAST))
def _dot(query, q, rows, at, size):
    total = np.float32(0)
    for d in range(size):
        total += _read(query, q + d) * _read(rows, at + d)
    return total


@njit(fastmath=set(FAST))
def _dot4(query, q, rows, at, size):
    """The products of one row with four query heads, for which it is widened once."""
    a, b, c, e = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for d in range(size):
        x = _read(rows, at + d)
        a += _read(query, q + d) * x
        b += _read(query, q + size + d) * x
        c += _read(query, q + 2 * size + d) * x
        e += _read(query, q + 3 * size + d) * x
    return a, b, c, e


@njit(fastmath=set(FAST))
def _sum4(acc, a, rows, at, t, weights, w, size):
    """Adds four weighted rows to the sums of one query head."""
    first, second, third, fourth = at[t], at[t + 1], at[t + 2], at[t + 3]
    w0, w1, w2, w3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    for d in range(size):
        x, y = w0 * _read(rows, first + d), w1 * _read(rows, second + d)
        z, u = w2 * _read(rows, third + d), w3 * _read(rows, fourth + d)
        _add(acc, a + d, (x + y) + (z + u))


@njit(fastmath=set(FAST))
def _sum4x4(acc, a, rows, at, t, weights, w, size):
    """Adds four weighted rows to the sums of four query heads: each row is widened once, each sum stored once."""
    first, second, third, fourth = at[t], at[t + 1], at[t + 2], at[t + 3]
    a0, a1, a2, a3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    w += TILE
    b0, b1, b2, b3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    w += TILE
    c0, c1, c2, c3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    w += TILE
    e0, e1, e2, e3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    for d in range(size):
        x, y = _read(rows, first + d), _read(rows, second + d)
        z, u = _read(rows, third + d), _read(rows, fourth + d)
        _add(acc, a + d, (a0 * x + a1 * y) + (a2 * z + a3 * u))
        _add(acc, a + size + d, (b0 * x + b1 * y) + (b2 * z + b3 * u))
        _add(acc, a + 2 * size + d, (c0 * x + c1 * y) + (c2 * z + c3 * u))
        _add(acc, a + 3 * size + d, (e0 * x + e1 * y) + (e2 * z + e3 * u))


@njit(fastmath=set(FAST))
def _tile(asked, share, size, keys, values, key_at, value_at, more, count, weights, peak, total, acc):
    """One step of the online softmax: `count` rows join `peak`, `total` `[share]` and `acc` `[share*size]`.

    `more` `[TILE]`: what comes to the logits of each row.
    """
    fours = share & ~3
    for t in range(count):
        for g in range(0, fours, 4):
            a, b, c, e = _dot4(asked, g * size, keys, key_at[t], size)
            at = g * TILE + t
            weights[at], weights[at + TILE], weights[at + 2 * TILE], weights[at + 3 * TILE] = a, b, c, e
        for g in range(fours, share):
            weights[g * TILE + t] = _dot(asked, g * size, keys, key_at[t], size)
    whole = (count + 3) & ~3
    for t in range(count, whole):  # a row to make up four weighs nothing
        value_at[t] = value_at[0]
    for g in range(share):
        w, highest = g * TILE, peak[g]
        for t in range(count):  # always: where the sum depended on a flag, bfloat16 took 2 % longer
            weights[w + t] += more[t]
        for t in range(count):
            highest = max(highest, weights[w + t])
        if highest == -np.inf:  # so far logits of -inf alone, which weigh nothing; -inf - -inf would be NaN
            for t in range(whole):  # but what is NaN stays
                weights[w + t] = weights[w + t] if t < count and weights[w + t] != -np.inf else np.float32(0)
                total[g] += weights[w + t]
            continue
        shrink = _exp2(peak[g] - highest) if peak[g] > -np.inf else np.float32(0)
        added = np.float32(0)
        for t in range(count):
            weight = _exp2(weights[w + t] - highest)
            weights[w + t] = weight
            added += weight
        for t in range(count, whole):
            weights[w + t] = 0
        if shrink != 1:
            for d in range(size):
                acc[g * size + d] *= shrink
        peak[g], total[g] = highest, total[g] * shrink + added
    for t in range(0, count, 4):
        for g in range(0, fours, 4):
            _sum4x4(acc, g * size, values, value_at, t, weights, g * TILE + t, size)
        for g in range(fours, share):
            _sum4(acc, g * size, values, value_at, t, weights, g * TILE + t, size)


@njit(fastmath=set(FAST))
def _part(
    query, scale, keys, key_steps, values, value_steps, h, table, block_rows, start, length, bias, span,
    sink, base, sealed, end, split, splits, acc, peak, total,
):  # fmt: skip
    """Attention of a list's query heads `[share,D]` over one part: `acc` `[share*D]`, `peak` and `total` `[share]`."""
    share, size = query.shape
    slots, zone = start.shape[0], min(sealed, block_rows * table.shape[0]) - base
    recent = max(end - sealed, 0)
    rows = sink + recent
    for s in range(slots):
        low = max(start[s], 0)
        rows += max(min(start[s] + min(length[s], span), zone) - low, 0)
    begin, stop = rows * split // splits, rows * (split + 1) // splits
    asked, flat = np.empty(share * size, np.float32), query.reshape(-1)
    for d in range(share * size):
        asked[d] = _read(flat, d) * scale
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    key_at, value_at = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    weights = np.empty(share * TILE, np.float32)
    more, extra = np.zeros(TILE, np.float32), np.float32(0)
    filled, passed = 0, 0
    for s in range(slots + 2):
        if s < slots:
            low = max(start[s], 0) + base
            high = min(start[s] + min(length[s], span), zone) + base
            extra = bias[s] * LOG2E if bias.shape[0] else np.float32(0)
        elif s == slots:
            low, high, extra = 0, sink, np.float32(0)
        else:
            low, high = sealed, sealed + recent
        if high <= low:
            continue
        first, last = max(low, low + begin - passed), min(high, low + stop - passed)
        passed += high - low
        block, row = first // block_rows, first % block_rows
        for _ in range(first, last):
            if row == block_rows:
                block, row = block + 1, 0
            held = np.int64(table[block])
            key_at[filled] = held * key_steps[0] + h * key_steps[1] + row * key_steps[2]
            value_at[filled] = held * value_steps[0] + h * value_steps[1] + row * value_steps[2]
            fetch(keys, key_at[filled], size)
            fetch(values, value_at[filled], size)
            more[filled] = extra
            row += 1
            filled += 1
            if filled == TILE:
                _tile(asked, share, size, keys, values, key_at, value_at, more, TILE, weights, peak, total, acc)
                filled = 0
        if passed >= stop:
            break
    if filled:
        _tile(asked, share, size, keys, values, key_at, value_at, more, filled, weights, peak, total, acc)


@njit(fastmath=set(FAST))
def _merge(acc, peak, total, g, out, lse):
    """Joins the parts `acc` `[splits,share,D]` of query head g into `out` `[share,D]` and `lse` `[share]`."""
    splits, _, size = acc.shape
    highest, whole = np.float32(-np.inf), np.float32(0)
    for split in range(splits):
        highest = max(highest, peak[split, g])
    for d in range(size):
        out[g, d] = 0
    for split in range(splits):
        if total[split, g] != 0:
            shrink = _exp2(peak[split, g] - highest)
            whole += total[split, g] * shrink
            for d in range(size):
                out[g, d] += shrink * acc[split, g, d]
    lse[g] = highest
    if whole != 0:
        lse[g] = (highest + np.log2(whole)) * LN2
        for d in range(size):
            out[g, d] /= whole


@entry(parallel=True, cache=True, nogil=True)
def _attend(
    query, scale, keys, key_steps, values, value_steps, heads, table, block_rows, start, length, bias, span,
    sink, base, sealed, end, acc, peak, total, out, lse,
):  # fmt: skip
    """query, out: `[B*Hs,share,D]`; keys, values: flat, with the steps of block, head and row; table: `[B,M]`, blocks
    of each sequence; start, length, bias: `[B*Hs,S]`, or a bias without slots; acc, peak and total:
    `[B*Hs,splits,share,..]`, the parts."""
    lists, splits = total.shape[:2]
    chosen = lists // sink.shape[0]
    for unit in prange(lists * splits):
        which, split = unit // splits, unit % splits
        b = which // chosen
        h = which % chosen * heads // chosen
        _part(
            query[which], scale, keys, key_steps, values, value_steps, h, table[b], block_rows,
            start[which], length[which], bias[which], span, sink[b], base, sealed[b], end[b], split, splits,
            acc[which, split].reshape(-1), peak[which, split], total[which, split],
        )  # fmt: skip
    for which in range(lists):
        for g in range(total.shape[2]):
            _merge(acc[which], peak[which], total[which], g, out[which], lse[which])


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend`, accumulated in float32; keys and values are views of any strides but the last.

    Raises:
        ValueError: keys or values whose elements of one row are not adjacent.
    """
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    lists = batch * chosen
    splits = max(1, min(-(-PARTS // max(lists, 1)), slots * selection.span // PART_ROWS + 1))
    k, key_steps = _flat(keys)
    v, value_steps = _flat(values)
    share = heads * group // chosen
    acc, total = torch.empty(lists, splits, share, size), torch.empty(2, lists, splits, share)
    out, lse = torch.empty(batch, heads, group, size), torch.empty(batch, heads, group)
    sealed, end = bounds.sealed.contiguous().numpy(), bounds.rows.contiguous().numpy()
    recent = max(map(operator.sub, end.tolist(), sealed.tolist()), default=0)
    rows = slots * selection.span + bounds.base + max(recent, 0)
    with ONE_AT_A_TIME:
        use_threads(2 * rows * lists * share * size)
        _attend(
            _bits(query).reshape(lists, share, size),
            np.float32(scale) * LOG2E,
            k,
            key_steps,
            v,
            value_steps,
            heads,
            _own_blocks(batch) if block_table is None else block_table.contiguous().numpy(),
            max(keys.shape[2], 1),
            selection.start.contiguous().numpy().reshape(lists, slots),  # a view of other steps would compile anew
            selection.length.contiguous().numpy().reshape(lists, slots),
            _no_bias(lists) if selection.bias is None else selection.bias.contiguous().numpy().reshape(lists, slots),
            selection.span,
            bounds.sink.contiguous().numpy(),
            bounds.base,
            sealed,
            end,
            acc.numpy(),
            *total.numpy(),
            out.numpy().reshape(lists, share, size),
            lse.numpy().reshape(lists, share),
        )
    return out.to(query.dtype), lse


@functools.cache
def _own_blocks(batch: int) -> Any:
    """The block table `[B,1]` of keys that are no paged store: each sequence is one block."""
    return np.arange(batch, dtype=np.int32)[:, None]


@functools.cache
def _no_bias(lists: int) -> Any:
    """What stands for no bias: an array of the same type, so that one compiled form serves both."""
    return np.empty((lists, 0), np.float32)


def _bits(part: Tensor) -> Any:
    """`part` as a contiguous numpy array, 16-bit floats as their bits."""
    part = part.contiguous()
    bits = BITS.get(part.dtype)
    return (part if bits is None else part.view(bits)).numpy()


def _flat(rows: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The storage of `[B,H,N,D]` from its first element to its last, a view, and the steps of b, h and n in it."""
    steps = rows.stride()
    if steps[3] != 1 and rows.shape[3] > 1:
        raise ValueError(
            f"the compiled CPU kernel reads rows whose elements are adjacent: the last stride is 1, got {steps[3]}"
        )
    return _line(rows), steps[:3]


def _whole(part: Tensor) -> Any:
    """As `_line`, quicker where the rows lie one after the other."""
    return _bits(part).reshape(-1) if part.is_contiguous() else _line(part)


def _line(part: Tensor) -> Any:
    """The storage of `part` from its first element to its last as a flat numpy array, a view."""
    shape, steps = part.shape, part.stride()
    last = 0 if 0 in shape else sum(map(operator.mul, shape, steps)) - sum(steps) + 1
    return _bits(part.as_strided((last,), (1,)))


# -- Quest's pages ---------------------------------------------------------------------------------------------------


@njit(fastmath=set(FAST))
def _bound(up, down, q, high, low, at, other, size):
    total = np.float32(0)
    for d in range(size):
        total += _read(up, q + d) * _read(high, at + d) + _read(down, q + d) * _read(low, other + d)
    return total


@njit(fastmath=set(FAST))
def _pages(
    up, down, low, low_base, low_step, high, high_base, high_step, real, real_base, tabled, first, last, each, scores
):  # fmt: skip
    """Scores `[G or 1,P]` of the pages from `first` to `last` of one KV head; up, down: `[G,D]`; real: whether there is
    such a page, or if `tabled` where it lies, below 0 for none."""
    group, size = up.shape
    ups, downs = up.reshape(-1), down.reshape(-1)
    for p in range(first, last):
        place = np.int64(real[real_base + p])
        if not tabled:
            place = p if place else -1
        if place < 0:
            scores[:, p] = -np.inf
            continue
        at, other = high_base + place * high_step, low_base + place * low_step
        best = np.float32(-np.inf)
        for g in range(group):
            bound = _bound(ups, downs, g * size, high, low, at, other, size)
            if each:
                scores[g, p] = bound
            best = max(best, bound)
        if not each:
            scores[0, p] = best


@njit
def _halves(query, root, summed, up, down):
    """Each head's query over `root`, cut at zero: query: `[A,G,D]`; up, down: `[A,G,D]`, or their sums `[A,1,D]`."""
    heads, group, size = query.shape
    flat = query.reshape(-1)
    up[:], down[:] = 0, 0
    for a in range(heads):
        for g in range(group):
            for d in range(size):
                x = _read(flat, (a * group + g) * size + d) / root
                up[a, 0 if summed else g, d] += np.float32(0) if x < 0 else x  # NaN stays
                down[a, 0 if summed else g, d] += np.float32(0) if x > 0 else x


@entry(parallel=True, cache=True, nogil=True)
def _page_scores(query, root, summed, low, low_steps, high, high_steps, real, real_step, tabled, each, scores):
    """query: `[B*H,G,D]`; low, high: flat, with steps of b, h, p; real: flat `[B,P]`, see `_pages`; scores: `[B,H,G or
    1,P]`."""
    batch, heads, _, pages = scores.shape
    halves = np.empty((2, batch * heads, 1 if summed else query.shape[1], query.shape[2]), np.float32)
    up, down = halves[0], halves[1]
    _halves(query, root, summed, up, down)
    chunks = (pages + PAGES - 1) // PAGES
    for unit in prange(batch * heads * chunks):
        which, chunk = unit // chunks, unit % chunks
        b, h = which // heads, which % heads
        _pages(
            up[which], down[which], low, b * low_steps[0] + h * low_steps[1], low_steps[2],
            high, b * high_steps[0] + h * high_steps[1], high_steps[2], real, b * real_step, tabled,
            chunk * PAGES, min(pages, (chunk + 1) * PAGES), each, scores[b, h],
        )  # fmt: skip


def page_scores(query: Tensor, low: Tensor, high: Tensor, real: Tensor, group: str, temperature: float) -> Tensor:
    """As `sparseattn.kernels.scoring.page_scores`, for `group` "sum", "max" and "each"; real: see `_pages`,
    int32 if it is a table."""
    batch, heads, served, size = query.shape
    pages, each, summed = real.shape[1], group == "each", group == "sum"  # the bound is linear in both halves
    held, steps = _flat(low)
    top, top_steps = _flat(high)
    scores = torch.empty(batch, heads * served if each else heads, pages)
    with ONE_AT_A_TIME:
        use_threads(2 * batch * heads * (1 if summed else served) * size * pages)
        _page_scores(
            _bits(query).reshape(batch * heads, served, size), np.float32(temperature), summed,
            held, steps, top, top_steps, _line(real), real.stride(0), real.dtype == torch.int32, each,
            scores.numpy().reshape(batch, heads, served if each else 1, pages),
        )  # fmt: skip
    return scores


def page_scores_at(query: Tensor, low: Tensor, high: Tensor, table: Tensor, group: str, temperature: float) -> Tensor:
    """As `sparseattn.kernels.scoring.page_scores_at`, for `group` "sum", "max" and "each"."""
    low, high = low.transpose(0, 1), high.transpose(0, 1)  # [H,pages,D]
    (batch, heads, served, size), pages = query.shape, table.shape[1]
    each, summed = group == "each", group == "sum"
    scores: Any = np.empty((batch, heads, served if each else 1, pages), np.float32)
    with ONE_AT_A_TIME:
        use_threads(2 * batch * heads * (1 if summed else served) * size * pages, STEP)
        _page_scores(
            _bits(query).reshape(batch * heads, served, size), np.float32(temperature), summed, _whole(low),
            (0, *low.stride()[:2]), _whole(high), (0, *high.stride()[:2]), table.numpy().reshape(-1), pages, True, each,
            scores,
        )  # fmt: skip
    return torch.from_numpy(scores).flatten(1, 2)


# -- the vote of a query group ---------------------------------------------------------------------------------------


@njit(fastmath={*FAST, "nnan"})
def _highest(numbers):
    highest = np.float32(-np.inf)
    for n in range(numbers.shape[0]):
        highest = max(highest, numbers[n])
    return highest


@njit(fastmath=set(FAST))
def _vote(scores, out, peak):
    """Of one KV head, scores: `[G,N]`, replaced by the logarithms of probabilities; out, peak: `[N]`."""
    group, count = scores.shape
    peak[:], out[:] = -np.inf, 0
    for g in range(group):
        one, total = scores[g], np.float32(0)
        highest = _highest(one)
        if highest == -np.inf:
            continue
        for n in range(count):
            total += _exp2((one[n] - highest) * LOG2E)
        norm = np.log2(total)
        for n in range(count):
            one[n] = (one[n] - highest) * LOG2E - norm  # nothing is lost where probabilities are near 1
            peak[n] = one[n] if one[n] > peak[n] else peak[n]
    for g in range(group):
        one = scores[g]
        for n in range(count):
            out[n] += _exp2(one[n] - peak[n])  # of -inf next to nothing; where all are, anything
    for n in range(count):
        out[n] = (peak[n] + np.log2(out[n])) * LN2 if peak[n] > -np.inf else -np.inf


@entry(parallel=True, cache=True, nogil=True)
def _vote_softmax(scores, out, peak):
    for which in prange(len(out)):
        _vote(scores[which], out[which], peak[which])


def vote_softmax(scores: Tensor) -> Tensor:
    """As `sparseattn.kernels.scoring.vote` by "softmax", of float32."""
    batch, heads, _, count = scores.shape
    held = scores.clone(memory_format=torch.contiguous_format)
    out, peak = torch.empty(2, batch, heads, count)
    with ONE_AT_A_TIME:
        use_threads(EXPONENTIAL * scores.numel())
        _vote_softmax(*(x.flatten(0, 1).numpy() for x in (held, out, peak)))
    return out


# -- SAAP's classifier and buckets -----------------------------------------------------------------------------------


@njit(fastmath=set(FAST))
def _outputs(x, weights, at, size, bias, relu, out, first, last):
    """Outputs from `first` to `last` of one head, x: `[n,D]`, weights: flat from `at` on; out: `[n,C]`."""
    count = x.shape[0]
    flat = x.reshape(-1)
    for c in range(first, last):
        row = at + c * size
        for i in range(0, count & ~3, 4):
            out[i, c], out[i + 1, c], out[i + 2, c], out[i + 3, c] = _dot4(flat, i * size, weights, row, size)
        for i in range(count & ~3, count):
            out[i, c] = _dot(flat, i * size, weights, row, size)
        for i in range(count):
            out[i, c] += bias[c]
            if relu and out[i, c] < 0:
                out[i, c] = 0


@entry(parallel=True, cache=True, nogil=True)
def _linear(x, weights, bias, relu, out):
    heads, outputs = bias.shape
    size = x.shape[2]
    chunks = (outputs + OUTPUTS - 1) // OUTPUTS
    for unit in prange(heads * chunks):
        a, chunk = unit // chunks, unit % chunks
        first = chunk * OUTPUTS
        _outputs(x[a], weights, a * outputs * size, size, bias[a], relu, out[a], first, min(outputs, first + OUTPUTS))


def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """As `sparseattn.kernels.scoring.linear`."""
    out = torch.empty(*x.shape[:2], weight.shape[1])
    with ONE_AT_A_TIME:
        use_threads(x.numel() * weight.shape[1])
        _linear(x.contiguous().numpy(), _line(weight.contiguous()), bias.contiguous().numpy(), relu, out.numpy())
    return out


@njit
def _cut(ids, edges, at, step, segments, span, budget, start, length):
    """The spans of the buckets `ids` `[P]` of one head; edges: flat from `at` on, `step` from segment to segment."""
    slot, slots = 0, start.shape[0]
    for i in range(ids.shape[0]):
        for r in range(segments):
            edge = at + r * step + ids[i]
            row, end = edges[edge], edges[edge + 1]
            end = min(end, row + budget)
            budget -= max(end - row, 0)
            while row < end and slot < slots:
                start[slot], length[slot] = row, min(end - row, span)
                row += span
                slot += 1
    start[slot:], length[slot:] = 0, 0


@entry(cache=True, nogil=True)
def _bucket_spans(ids, edges, steps, segments, each, span, budget, start, length):
    batch, chosen = ids.shape[:2]
    for b in range(batch):
        for s in range(chosen):
            at = b * steps[0] + s // each * steps[1]
            _cut(ids[b, s], edges, at, steps[2], segments, span, budget, start[b, s], length[b, s])


def bucket_spans(ids: Tensor, edges: Tensor, span: int, budget: int, slots: int) -> tuple[Tensor, Tensor]:
    """As `sparseattn.kernels.scoring.bucket_spans`."""
    start, length = torch.empty(2, *ids.shape[:2], slots, dtype=torch.int32)
    each = ids.shape[1] // edges.shape[1]
    _bucket_spans(
        ids.contiguous().numpy(), _line(edges), edges.stride()[:3], edges.shape[2], each, span, budget,
        start.numpy(), length.numpy(),
    )  # fmt: skip
    return start, length


# -- lists of keys ---------------------------------------------------------------------------------------------------


@njit(fastmath=set(FAST))
def _listed(query, keys, base, step, ids, out):
    size, listed = query.shape[0], ids.shape[0]
    for i in range(listed):
        if i + TILE < listed and ids[i + TILE] >= 0:
            fetch(keys, base + ids[i + TILE] * step, size)
        again = ids[i] < 0 or (i > 0 and ids[i] == ids[i - 1])
        out[i] = -np.inf if again else _dot(query, 0, keys, base + ids[i] * step, size)


@entry(parallel=True, cache=True, nogil=True)
def _listed_scores(query, keys, steps, ids, out):
    batch, heads, group = query.shape[:3]
    for unit in prange(batch * heads * group):
        b, s = unit // (heads * group), unit % (heads * group)
        h = s // group
        _listed(query[b, h, s % group], keys, b * steps[0] + h * steps[1], steps[2], ids[b, s], out[b, s])


def listed_scores(query: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """As `sparseattn.kernels.scoring.listed_scores`."""
    out = torch.empty(ids.shape)
    flat, steps = _flat(keys)
    with ONE_AT_A_TIME:
        use_threads(ids.numel() * query.shape[3])
        _listed_scores(query.float().contiguous().numpy(), flat, steps, ids.contiguous().numpy(), out.numpy())
    return out
