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
from sparseattn.kernels.quantized_keys.cpu_rows import AHEAD, stored_inputs, work_of
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys


@njit
def _pages(
    query, h, g, served, size, packed, packed_at, group_step, low, low_at, low_step, step, step_at, step_step, grid,
    grid_at, valid, valid_at, rows, words, bits, count, pages, page, out, out_at, out_step,
):  # fmt: skip
    """Logits of listed pages for `served` query heads from g on of KV head h; pages: `[P]`."""
    padded = query.shape[2]
    wide = rounded_bytes(words, bits, padded)
    lows, steps, numbers, rounded, scale, base = scratch(served, padded, wide)
    flat, known, part = query.reshape(-1)[g * padded :], -1, np.empty(SERVED * LANES, np.float32)
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
                round_group(flat, 0, served, padded, size, bits, wide, low, low_at + group * low_step,
                     step, step_at + group * step_step, grid, grid_at,
                     lows, steps, numbers, rounded, scale, base)  # fmt: skip
                known = group
            codes = packed_at + group * group_step + (row - group * rows) * 4 * words
            for g in range(0, served, SERVED):
                many, rounded_at = min(SERVED, served - g), g * wide
                if page >= LANES:
                    tile_logits(
                        1, many, packed, codes, words, bits, rounded, rounded_at, wide, scale, base, g, valid,
                        valid_at + row, out, to + g * out_step, out_step,
                    )  # fmt: skip
                    continue
                tile_logits(
                    1, many, packed, codes, words, bits, rounded, rounded_at, wide, scale, base, g, valid,
                    valid_at + row, part, 0, LANES,
                )  # fmt: skip
                for k in range(many):
                    for i in range(page):
                        out[to + (g + k) * out_step + i] = part[k * LANES + inside + i]


@entry(parallel=True, cache=True, nogil=True)
def _listed(query, size, packed, packed_steps, low, low_steps, step, step_steps, grid, grid_step, valid, valid_step,
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
               valid, b * valid_step, rows, words, bits, count, pages[which, head, first : min(named, first + each)],
               page, line, ((which * share + head * served) * named + first) * page, named * page)  # fmt: skip


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
        _listed(
            *inputs, keys.bits, count, heads, listed, page, 4 * threads, out.numpy().reshape(batch * heads, share, -1)
        )  # fmt: skip
    return out
