"""Logits of the rows of listed pages from keys of a few bits, in compiled code."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import fetch
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import LANES
from sparseattn.kernels.quantized_keys.cpu_products import SERVED, round_group, rounded_bytes, scratch, tile_logits
from sparseattn.kernels.quantized_keys.cpu_rows import AHEAD, head_of, stored_inputs, work_of
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys


@njit
def _pages(queries, head, form, count, pages, page, out_of):
    """Logits of listed pages for some query heads of a KV head.

    queries: see `round_group`; head, form, out_of: see `score_part`; count: rows of the sequence; pages: `[P]`.
    """
    (packed, packed_at, group_step), (low, low_at, low_step), (step, step_at, step_step), grid_of, validity = head
    (size, rows, words, bits), (valid, valid_at), (out, out_at, out_step) = form, validity, out_of
    served, padded = queries[2], queries[3]
    wide = rounded_bytes(words, bits, padded)
    room = scratch(served, padded, wide, 1)
    rounded, scale, base, rounding = room[3], room[4], room[5], (size, bits, wide)
    known, part = -1, np.empty(SERVED * LANES, np.float32)
    for p in range(pages.shape[0]):
        first = pages[p] * page
        if p + AHEAD < pages.shape[0] and pages[p + AHEAD] >= 0:
            row = pages[p + AHEAD] * page
            group = row // rows
            fetch(
                packed, packed_at + group * group_step + (row - group * rows) * 4 * words, min(page, rows) * 4 * words
            )
            fetch(low, low_at + group * low_step, size)
            fetch(step, step_at + group * step_step, size)
        for row in range(first, first + page, LANES):
            to, inside = out_at + p * page + row - first, row % LANES
            if first < 0 or row >= count:
                for k in range(served):
                    out[to + k * out_step : to + k * out_step + min(page, LANES)] = -np.inf
                continue
            group, row = row // rows, row - inside
            if group != known:
                at, by_at = low_at + group * low_step, step_at + group * step_step
                round_group(queries, rounding, (low, at), (step, by_at), grid_of, room, 0)
                known = group
            codes = packed_at + group * group_step + (row - group * rows) * 4 * words
            for g in range(0, served, SERVED):
                many, rounded_at = min(SERVED, served - g), g * wide
                if page >= LANES:
                    tile_logits(
                        1, many, packed, codes, words, bits, rounded, rounded_at, wide, scale, base, g, valid,
                        valid_at + row, out, to + g * out_step, out_step, np.intp(0),
                    )  # fmt: skip
                    continue
                tile_logits(  # its numbers have one type, whether they are said or computed
                    1, many, packed, codes, words, bits, rounded, rounded_at, wide, scale, base, g, valid,
                    valid_at + row, part, np.intp(0), np.intp(LANES), np.intp(0),
                )  # fmt: skip
                for k in range(many):
                    for i in range(page):
                        out[to + (g + k) * out_step + i] = part[k * LANES + inside + i]


@entry(parallel=True, cache=True, nogil=True)
def _listed(query, keys, form, sizes, pages, out):
    """query, keys, form: see `_masses`; sizes: rows of a sequence, KV heads, rows of a page, and parts of a list;
    pages: `[B*H,lists,P]`, lists 1 or G; out: `[B*H,G,P*page]`."""
    # What the loop over parts reads stands loose, or in tuples of one level: numba takes no others into it.
    (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step) = keys
    (share, padded), lists, named = query.shape[1:], pages.shape[1], pages.shape[2]
    (count, heads, page, parts), flat = sizes, query.reshape(-1)
    line, served, each = out.reshape(-1), share // lists, (named + parts - 1) // parts
    for unit in prange(query.shape[0] * lists * parts):
        which, part = unit // parts, unit % parts
        head, which = which % lists, which // lists
        b, h = which // heads, which % heads
        first = min(named, part * each)
        keys_of = (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step)
        _pages(
            (flat, (which * share + head * served) * padded, served, padded), head_of(keys_of, b, h, which * grid_step),
            form, count, pages[which, head, first : min(named, first + each)], page,
            (line, ((which * share + head * served) * named + first) * page, named * page),
        )  # fmt: skip


def logits_of_listed(query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int, factor: float = 1.0) -> Tensor:
    """Return what `dispatch.listed_logits` does, times `factor`."""
    batch, heads, share, size = query.shape
    count, named = keys.mask.shape[1], pages.shape[2]
    out = torch.empty(batch, heads, share, named * page)
    if not named:
        return out
    rows = count // keys.groups if count else LANES
    inputs = stored_inputs(query, keys, rows, factor * size**-0.5)
    listed = pages.int().contiguous().numpy().reshape(batch * heads, -1, named)
    with ONE_AT_A_TIME:
        threads = use_threads(2 * work_of(query, named * page))  # a group's query may be rounded for one page alone
        sizes = count, heads, page, 4 * threads
        _listed(*inputs, sizes, listed, out.numpy().reshape(batch * heads, share, -1))
    return out
