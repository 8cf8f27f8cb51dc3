"""Pages chosen by Quest's bounds and attended to in one compiled call a layer, https://arxiv.org/abs/2406.10774.

Between two layers of a model the processor's caches hold weights, so that every line of Python costs several times what
it costs in a loop of its own. What is the same in all layers of a step is put down once, in an array of numbers
(`Form`); a layer adds the addresses of what it reads and writes.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BoundedPages, StepPages
from sparseattn.kernels.attend_vllm_blocks.cpu_byte_floats import factors, kind_of
from sparseattn.kernels.attend_vllm_blocks.cpu_part import PART_ROWS, PARTS, best_within, packed_as, page_part
from sparseattn.kernels.attend_vllm_blocks.cpu_softmax import joined
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, LOG2E, array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.page_bounds.cpu import PAGES, _halves, _pages

FEW = 1 << 18  # multiplications of bounds that one thread makes in less time than it takes to wake another
MANY = 1 << 48  # numbers of an array whose end nobody asks for


class Form:
    """What the layers of a step have in common, of one shape and budget.

    Attributes:
        numbers: int64, in the order in which `_attend_bounded` reads them.
        lists: of pages, of all tokens.
        rows: that a list has at most.
        work, scoring: multiplications of the attention, and of the scores.
    """

    def __init__(self, pages: StepPages, layer: BoundedPages, group: int, count: Any) -> None:
        """Put the numbers down; `group`: query heads of a KV head; `count`: pages of a list, or `[R]`."""
        heads, size, each = layer.cache.packed.shape[1], layer.cache.size, layer.voted.group == "each"
        if pages.unit != pages.page:
            raise ValueError(f"an entry of bounds is a page of {pages.page} rows, got {pages.unit}")
        served, (listed, nearby) = len(pages.tokens), (pages.table.shape[1], pages.always.shape[1])
        limits: Any = np.minimum(np.broadcast_to(np.asarray(count, np.int64), served), listed).copy()
        tables = tuple(part.contiguous() for part in (pages.table, pages.always, pages.tails, pages.tokens))
        self.held = limits, tables  # addresses hold nothing
        most = int(limits.max(initial=0))
        if [part.dtype for part in tables] != [torch.int32, torch.int32, torch.int32, torch.int64]:
            raise ValueError(f"tables are of int32 and tokens of int64, got {[part.dtype for part in tables]}")
        self.lists, self.rows = served * heads * (group if each else 1), (most + nearby) * pages.page
        self.work = 4 * self.rows * served * heads * group * size
        self.scoring = 2 * served * heads * (1 if layer.voted.group == "sum" else group) * size * listed
        self.numbers = np.array(
            [
                served, heads, group, size, layer.cache.block, pages.page, listed, nearby, most,
                packed_as(layer.cache), each, layer.voted.group == "sum",
                limits.ctypes.data, *(part.data_ptr() for part in tables),
            ],
            np.int64,
        )  # fmt: skip


@njit
def _halved(query, query_step, tokens, group, root, summed, halves):
    """Fill in `_halves` of each token, `[2,R*H,..]`."""
    served, size = tokens.shape[0], halves.shape[3]
    heads = halves.shape[1] // served
    for r in range(served):
        first, begin = r * heads, tokens[r] * query_step
        own = query[begin : begin + heads * group * size]
        _halves(own, root, summed, halves[0, first : first + heads], halves[1, first : first + heads])


@njit
def _scored(form, halves, bounds, table, unit, scores):
    """Score up to `PAGES` pages of a KV head.

    form: KV heads, query heads of each, pages listed, and whether each query head has a list; halves: of each
    KV head, `[2,R*H,..]`; bounds: those of the layer with their steps; unit: KV head and chunk in one number; scores:
    of all lists.
    """
    (heads, group, listed, each), (low, high, layer) = form, bounds
    chunks = (listed + PAGES - 1) // PAGES
    which, first = unit // chunks, unit % chunks * PAGES
    r, h = which // heads, which % heads
    lows, highs = (low, h * layer[5], layer[6]), (high, h * layer[7], layer[8])
    names, outs = (table, r * listed, True), (scores, which * (group if each else 1) * listed, listed)
    up_down = halves[0, which], halves[1, which]
    _pages(up_down, lows, highs, names, first, min(listed, first + PAGES), each, outs)


@njit
def _attended(packing, queries, blocks, heads, per, names, ids, unit, sums):
    """One part of a list; queries: flat, with the step from token to token, how many share a list, their size and the
    factor of logits; blocks: flat, with the steps of block and head, rows of a block and of a page; heads, per: KV
    heads, and lists of each; names: always, tails, table and tokens, flat; unit: list and part in one number; sums:
    see `cpu._attend`."""
    (query, query_step, share, size, scale), (cache, block_step, head_step, block, page) = queries, blocks
    (always, tails, table, tokens), (acc, peak, total) = names, sums
    splits = total.shape[1]
    which, split = unit // splits, unit % splits
    r, s = which // (heads * per), which % (heads * per)
    nearby, listed = always.shape[0] // tokens.shape[0], table.shape[0] // tokens.shape[0]
    page_part(
        packing, (query, tokens[r] * query_step + s * share * size, share, size, scale),
        (cache, block_step, s // per * head_step), (block, page, 1),
        (always[r * nearby : (r + 1) * nearby], tails[r], table[r * listed : (r + 1) * listed], ids[which]),
        (split, splits), (acc[which, split], peak[which, split], total[which, split]),
    )  # fmt: skip


@entry(parallel=True, cache=True, nogil=True)
def _attend_bounded(kind, packed, query_at, query_step, out_at, out_step, layer, scale, factor, root, splits, form):
    """Attend to pages chosen by bounds; kind: what queries and bounds are; packed: what rows are; ..._at, ..._step:
    where tokens lie; layer: `Place.numbers`; scale, factor: of logits and values; root: what bounds are divided by;
    splits: of a list; form: see `Form`."""
    served, heads, group, size, block, page = form[0], form[1], form[2], form[3], form[4], form[5]
    listed, nearby, most, packing, each, summed = form[6], form[7], form[8], form[9], form[10] != 0, form[11] != 0
    # One by one, since numba's analysis of parallel code takes a line of several arrays for one (0.68).
    limits = array_at(np.int64, form[12], served)
    table = array_at(np.int32, form[13], served * listed)
    always = array_at(np.int32, form[14], served * nearby)
    tails = array_at(np.int32, form[15], served)
    tokens = array_at(np.int64, form[16], served)
    query = array_at(kind, query_at, MANY)
    out = array_at(kind, out_at, MANY)
    cache = array_at(packed, layer[0], MANY)
    low = array_at(kind, layer[1], MANY)
    high = array_at(kind, layer[2], MANY)
    block_step, head_step = layer[3], layer[4]
    per = group if each else 1  # lists of a KV head
    lists, share, many = served * heads * per, group // per, served * heads
    halves = np.empty((2, many, 1 if summed else group, size), np.float32)
    scores = np.empty(lists * listed, np.float32)
    ids = np.empty((lists, most), np.int32)
    _halved(query, query_step, tokens, group, root, summed, halves)
    bounds = low, high, layer
    told = heads, group, listed, each
    units = many * ((listed + PAGES - 1) // PAGES)
    if 2 * many * (1 if summed else group) * size * listed < FEW:
        for unit in range(units):
            _scored(told, halves, bounds, table, unit, scores)
        for which in range(lists):
            best_within(scores[which * listed : (which + 1) * listed], ids[which], limits[which // (heads * per)])
    else:
        for unit in prange(units):
            _scored(told, halves, bounds, table, unit, scores)
        for which in prange(lists):
            best_within(scores[which * listed : (which + 1) * listed], ids[which], limits[which // (heads * per)])
    acc = np.empty((lists, splits, share * size), np.float32)
    peak = np.empty((lists, splits, share), np.float32)
    total = np.empty((lists, splits, share), np.float32)
    sums = acc, peak, total
    queries = query, query_step, share, size, scale
    blocks = cache, block_step, head_step, block, page
    names = always, tails, table, tokens
    for unit in prange(lists * splits):
        _attended(packing, queries, blocks, heads, per, names, ids, unit, sums)
    joined(sums, tokens, heads * per, size, out, out_step, factor)


class Place:
    """Where a layer's rows and bounds lie, and what they are.

    Attributes:
        numbers: addresses of rows, minima and maxima, then the steps of block and head, and of head and page in both
            bounds, int64.
        kind, packed: of queries and bounds, and of rows, see `array_at`.
        scale, factor: of logits and values.
        group: query heads of a KV head.
        key: what else a form depends on, beside the step and the budget.
    """

    def __init__(self, layer: BoundedPages, scale: float, queries: int) -> None:
        """Look a layer up; `queries`: query heads."""
        packed, voted = layer.cache.packed, layer.voted
        heads, size, block = packed.shape[1], layer.cache.size, layer.cache.block
        self.group, self.key = queries // heads, (queries, heads, size, block, layer.cache.packing, voted.group)
        low, high = voted.bounds.minimum, voted.bounds.maximum
        dtype = packed.dtype if layer.cache.dtype is None else layer.cache.dtype
        if not dtype == low.dtype == high.dtype:
            raise ValueError(f"bounds are of the rows' dtype {dtype}, got {low.dtype} and {high.dtype}")
        if low.stride(2) != 1 or high.stride(2) != 1:
            raise ValueError("the numbers of a bound are adjacent")
        steps = [part.stride(dim) for part, dims in ((packed, (0, 1)), (low, (1, 0)), (high, (1, 0))) for dim in dims]
        self.numbers = np.array([packed.data_ptr(), low.data_ptr(), high.data_ptr(), *steps], np.int64)
        of_keys, of_values = factors(layer.cache)
        self.kind, self.packed, self.root = KINDS[dtype], kind_of(packed), np.float32(voted.temperature)
        self.scale, self.factor = np.float32(scale) * LOG2E * of_keys, of_values


def attend_bounded(query: Tensor, out: Tensor, layer: BoundedPages, pages: StepPages, count: Any, scale: float) -> None:
    """As `dispatch.attend_bounded`."""
    if (place := layer.prepared.get((scale, query.shape[1]))) is None:
        place = layer.prepared[scale, query.shape[1]] = Place(layer, scale, query.shape[1])
    key = (count if isinstance(count, int) else count.tobytes()), place.key
    if (form := pages.forms.get(key)) is None:
        form = pages.forms[key] = Form(pages, layer, place.group, count)
    with ONE_AT_A_TIME:
        threads = use_threads(max(form.work, form.scoring), STEP)
        splits = max(1, min(-(-PARTS * threads // form.lists), form.rows // PART_ROWS))
        _attend_bounded(
            place.kind, place.packed, query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0), place.numbers,
            place.scale, place.factor, place.root, splits, form.numbers,
        )  # fmt: skip
