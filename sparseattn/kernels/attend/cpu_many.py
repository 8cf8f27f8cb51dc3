"""The online softmax for many queries of one KV head: a check of drafts, or wide query groups.

The products of 16 rows with 16 queries are made by matrix tiles or by pairs, whichever the processor has.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools

import numpy as np
import torch

from sparseattn.kernels.attend.cpu_pairs import logits_by_pairs, values_in_registers
from sparseattn.kernels.attend.cpu_sixteens import ROWS
from sparseattn.kernels.attend.cpu_tiles import logits_by_tiles, values_by_tiles
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_pairs import pairs
from sparseattn.kernels.numba_rows import array_at, exp2
from sparseattn.kernels.numba_softmax import exponentials, peak_of
from sparseattn.kernels.numba_tiles import CHANNELS, PAIR, TILE_QUERIES, TILE_ROWS, TILE_SHAPES, shaped, tiles

BY_ROWS, BY_TILES, BY_PAIRS = 0, 1, 2  # how products are made; by rows: one row with one query, see `cpu_softmax`
FEWEST = 5  # queries from which on either pays: 12 take 9 ms, by rows 16; 4 take 8 and 8 (the log, 2026-11-29)
FEWEST_OF_FEW_CHANNELS = 3  # where a row has 64 channels: 6 ms, by rows 8; by tiles 11 and 14


@functools.cache  # each layer asks at every step
def products_for(share: int, dtype: torch.dtype, size: int) -> int:
    """Return how rows of a dtype and size are multiplied here with `share` queries of a KV head."""
    if dtype != torch.bfloat16 or size % CHANNELS:
        return BY_ROWS
    if share < (FEWEST_OF_FEW_CHANNELS if size == CHANNELS else FEWEST):
        return BY_ROWS
    if tiles():
        return BY_TILES
    return BY_PAIRS if pairs() else BY_ROWS


@njit
def room_for(share, size):
    """Return how many bytes `add_rows` works in."""
    tiles_of, groups = (share + TILE_ROWS - 1) // TILE_ROWS, (share + TILE_QUERIES - 1) // TILE_QUERIES
    numbers = tiles_of * TILE_ROWS * ROWS + TILE_ROWS * CHANNELS + groups * TILE_QUERIES
    shorts = (tiles_of + 1) * TILE_ROWS * size + ROWS * size + 2 * groups * TILE_QUERIES * ROWS
    return 4 * numbers + 2 * shorts + TILE_SHAPES


@njit
def _view(kind, at, count):
    """Return an array of `count` numbers at an address, and the address behind it."""
    array = array_at(kind, at, count)
    return array, at + array.itemsize * count


@njit
def _views(room, share, size):
    """Return what there is in the room: weights, sums of values, what sums weigh less once a larger logit is found, the
    queries as tiles, a copy of rows, interleaved values, halves of weights, and the shapes of tiles. Of one array, as
    making one takes longer than a view: parts by rows have an empty room."""
    tiles_of, groups = (share + TILE_ROWS - 1) // TILE_ROWS, (share + TILE_QUERIES - 1) // TILE_QUERIES
    weights, at = _view(np.float32, room.ctypes.data, tiles_of * TILE_ROWS * ROWS)
    parts, at = _view(np.float32, at, TILE_ROWS * CHANNELS)
    shrinks, at = _view(np.float32, at, groups * TILE_QUERIES)
    tiled, at = _view(np.uint16, at, tiles_of * TILE_ROWS * size)
    held, at = _view(np.uint16, at, TILE_ROWS * size)
    interleaved, at = _view(np.uint16, at, ROWS * size)
    halves, at = _view(np.uint16, at, 2 * groups * TILE_QUERIES * ROWS)
    return weights, parts, shrinks, tiled, held, interleaved, halves, array_at(np.uint8, at, TILE_SHAPES)


@njit
def prepare(room, query, share, size):
    """Put a group's queries, flat as they are stored, into the room as tiles: 32 channels of 16 queries, two to a
    word; and the shapes of tiles."""
    _, _, _, tiled, _, _, _, shapes = _views(room, share, size)
    shapes[:] = 0
    for tile in range(8):
        shaped(shapes, tile, TILE_ROWS, 2 * PAIR)
    tiled[:] = 0
    for g in range(share):
        base = g // TILE_ROWS * TILE_ROWS * size + g % TILE_ROWS * 2
        for d in range(size):
            tiled[base + d // 2 * PAIR + d % 2] = query[g * size + d]


@njit
def logits(asked, keys, count, coming, out):
    """Logits `[share,ROWS]`, flat, of up to `ROWS` rows, rounded up to whole 16s; asked and keys as of `add_rows`,
    coming: as many rows that are read next."""
    products, room, share, size, scale = asked
    _, parts, _, tiled, held, _, _, shapes = _views(room, share, size)
    if products == BY_TILES:
        logits_by_tiles((tiled, share, size, scale), keys, count, (parts, held, shapes), out)
    else:
        logits_by_pairs((tiled, share, size, scale), keys, count, coming, (parts, held, shapes), out)


@njit  # not fastmath, under which `powers` may not be reordered
def _softmax(weights, w, biased, more, count, whole, peak, total, g):
    """Make weights of the logits of `whole` rows, of which `count` are there, `more` added to them if they are biased;
    return the factor of what was summed before."""
    if biased:
        for t in range(count):
            weights[w + t] += more[t]
    for t in range(count, whole):
        weights[w + t] = -np.inf
    highest = max(peak[g], peak_of(weights, w, whole))
    if highest == -np.inf:  # so far logits of -inf alone, or what is no number and stays so
        total[g] += exponentials(weights, w, whole, np.float32(0))
        return np.float32(1)
    shrink = exp2(peak[g] - highest) if peak[g] > -np.inf else np.float32(0)
    total[g] = total[g] * shrink + exponentials(weights, w, whole, highest)
    peak[g] = highest
    return shrink


@njit
def add_rows(asked, keys, values, added, sums):
    """As `cpu_softmax.add_rows`; asked: how products are made, the room (`prepare`), share, size and the factor of
    logits; added: what comes to logits, whether anything does, and how many rows there are."""
    (products, room, share, size), (keys, key_at), (values, value_at) = asked[:4], keys, values
    (more, biased, count), (peak, total, acc) = added, sums
    if count == 0:
        return
    weights, parts, shrinks, _, _, interleaved, halves, shapes = _views(room, share, size)
    for first in range(0, count, ROWS):
        many = min(ROWS, count - first)
        whole, last = (many + PAIR - 1) // PAIR * PAIR, first + 2 * ROWS > count
        of_rows = values, value_at[first:]
        logits(asked, (keys, key_at[first:]), many, of_rows, weights)
        for g in range(share):
            shrinks[g] = _softmax(weights, g * ROWS, biased, more[first:], many, whole, peak, total, g)
        if products == BY_TILES:
            values_by_tiles(weights, shrinks, of_rows, many, (parts, interleaved, halves, shapes), share, size, acc)
        else:  # the keys behind the last rows of a batch are guessed to follow at the same step
            ahead = ROWS * (key_at[first + 1] - key_at[first]) if last and many == ROWS else 0
            coming = keys, key_at[first:] if last else key_at[first + ROWS :], ahead
            values_in_registers(weights, shrinks, of_rows, many, share, size, acc, coming)
