"""Attention over pages packed in pairs, by the matrix tiles for which vLLM packs them so, in compiled code.

A tile of keys is 32 channels of 16 rows as they lie. One of values is 32 rows, or 16 where a page is no multiple of 32,
of 16 channels. Weights are float32; each is multiplied as the sum of two bfloat16 numbers, within 2^-16 of it, in a row
of its own.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from sparseattn.kernels.attend_vllm_blocks.cpu_products import SERVED, _page_values
from sparseattn.kernels.attend_vllm_blocks.cpu_softmax import weigh
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import fetch
from sparseattn.kernels.numba_tiles import (
    CHANNELS,
    PAIR,
    TILE_QUERIES,
    TILE_ROWS,
    begin,
    halved,
    loaded,
    multiplied,
    released,
    shaped,
    stored,
    sums_grown,
    sums_stored,
    sums_zeroed,
    zeroed,
)
from sparseattn.kernels.numba_vectors import LANES

ASKED = 16  # lines of a page's keys or values that are asked for ahead: the processor then goes on by itself


@njit
def _ask(cache, at, step, stretches):
    """Ask for the first lines of stretches of a page that lie `step` apart."""
    for stretch in range(stretches):
        fetch(cache, at + stretch * step, ASKED // stretches * PAIR)


@njit
def _tile_logits(keys, queries, outs):
    """Logits of a page for some queries, before they are scaled; see `_page_logits`. Queries are the stored ones."""
    (cache, key, page), (query, q, size), (out, o, wide) = keys, queries, outs
    row = 0
    while row < page:
        two = row + PAIR <= page
        zeroed(0)
        zeroed(1)
        at = key + row * size
        for d in range(0, size, PAIR):
            loaded(2, query, q + d, size)
            loaded(3, cache, at + d * TILE_ROWS, PAIR)
            multiplied(0, 2, 3)
            if two:
                loaded(4, cache, at + TILE_ROWS * size + d * TILE_ROWS, PAIR)
                multiplied(1, 2, 4)
        stored(0, out, o + row, wide)
        if two:
            stored(1, out, o + row + TILE_ROWS, wide)
        row += PAIR if two else TILE_ROWS


@njit
def _tile_values(cache, value, block, page, halves, w, wide):
    """Add a page's values, weighted by two rows of `halves` each, to 4 tiles of 16 channels."""
    rows = PAIR if page % PAIR == 0 else TILE_ROWS
    step = block * LANES
    for row in range(0, page, rows):
        sums_grown(halves, w + row, wide, cache, value + row * LANES, step)


@njit  # not fastmath, under which `powers` may not be reordered
def tile_part(queries, blocks, form, listed, sums):
    """`cpu_part.page_part` of pages that are known: their places and how many rows of them there are. A row has a
    multiple of 64 channels."""
    (query, q, share, size, scale), (cache, block_step, base), (block, page) = queries, blocks, form
    (places, rows), (acc, peak, total) = listed, sums
    count = places.shape[0]
    in_block = block // page
    wide = count * page
    most = min(TILE_QUERIES, share)
    weights, halves = np.empty(most * wide, np.float32), np.empty(2 * most * wide, np.uint16)
    parts, shapes = np.empty(2 * TILE_QUERIES * CHANNELS, np.float32), np.zeros(64, np.uint8)
    for first in range(0, share, TILE_QUERIES):
        served = min(TILE_QUERIES, share - first)
        for tile in range(3):
            shaped(shapes, tile, served, 64)
        for tile in range(3, 7):
            shaped(shapes, tile, TILE_ROWS, 64)
        begin(shapes)
        for i in range(count):
            if i + 1 < count and first == 0:
                at = places[i + 1] // in_block * block_step + base + places[i + 1] % in_block * page * size
                _ask(cache, at, 0, 1)
            key = places[i] // in_block * block_step + base + places[i] % in_block * page * size
            _tile_logits((cache, key, page), (query, q + first * size, size), (weights, i * page, wide))
        for i in range(served * wide):
            weights[i] *= scale
        weigh(weights, served, rows, page, peak[first:], total[first:])
        for k in range(served):
            halved(weights, k * wide, wide, halves, k * wide, (served + k) * wide)
        for tile in range(4):
            shaped(shapes, tile, 2 * served, 64)
        rows_at_once = PAIR if page % PAIR == 0 else TILE_ROWS
        shaped(shapes, 4, 2 * served, 2 * rows_at_once)
        shaped(shapes, 5, rows_at_once // 2, 64)
        shaped(shapes, 6, rows_at_once // 2, 64)
        begin(shapes)
        for d in range(0, size, CHANNELS):
            for i in range(count):
                if i + 1 < count and first == 0:
                    at = places[i + 1] // in_block * block_step + base + block * size
                    at += places[i + 1] % in_block * page * LANES + d * block
                    _ask(cache, at, block * LANES, CHANNELS // LANES)
                if rows[i] == page:
                    at = places[i] // in_block * block_step + base + block * size
                    at += places[i] % in_block * page * LANES + d * block
                    _tile_values(cache, at, block, page, halves, i * page, wide)
            sums_stored(parts, LANES, CHANNELS)
            sums_zeroed()
            for k in range(served):
                for c in range(CHANNELS):
                    acc[(first + k) * size + d + c] = parts[k * CHANNELS + c] + parts[(served + k) * CHANNELS + c]
        released()
        for i in range(count):
            if rows[i] < page:  # behind its last row may lie what is no number
                value = places[i] // in_block * block_step + base + block * size
                value += places[i] % in_block * page * LANES
                for k in range(0, served, SERVED):
                    weighed, sums_at = (weights, k * wide + i * page, wide), (first + k) * size
                    few = min(SERVED, served - k)
                    _page_values(True, (cache, value, block, rows[i]), weighed, (acc[sums_at:], size, few))
