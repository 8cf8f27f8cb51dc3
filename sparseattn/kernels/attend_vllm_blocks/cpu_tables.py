"""Which pages of an engine's blocks a step may choose, always reads and has to index, in compiled code."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np

from sparseattn.kernels.numba_entry import entry


@entry(cache=True, nogil=True)
def _tables(rows, blocks, sizes, first, window, table, always, tails):
    """table `[R,E]`, always `[R,F]` and tails `[R]` of `Zones`, filled in; sizes: rows of a page, an entry, a block."""
    page, unit, block = sizes
    entries, in_block = block // unit, block // page
    for r in range(rows.shape[0]):
        sealed = max((rows[r] - window) // unit, first)
        at, part = first // entries, first % entries
        for e in range(table.shape[1]):
            table[r, e] = blocks[r, at] * entries + part if first + e < sealed else -1
            part += 1
            if part == entries:
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
    """Return what sequences may choose from and what they always read, for `attend`: table, always and tails, of numpy.

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
    _tables(rows, blocks, (page, unit, block), first, window, table, always, tails)
    return table, always, tails


@entry(cache=True, nogil=True)
def _due(rows, blocks, above, unit, block, made, out):
    entries, count = block // unit, 0
    for r in range(rows.shape[0]):
        if rows[r] <= above:
            continue
        at, part = 0, 0
        for _ in range(rows[r] // unit):
            place = np.int64(blocks[r, at]) * entries + part
            if not made[place]:
                made[place] = True
                out[0, count], out[1, count] = place, (at * entries + part) * unit
                count += 1
            part += 1
            if part == entries:
                at, part = at + 1, 0
    return count


def due(rows: Any, blocks: Any, above: int, unit: int, block: int, made: Any) -> Any:
    """Return the entries of sequences of more than `above` rows that are whole and not made yet, marked as made from
    now on, and how many rows of the sequence lie before each: `[2,n]` int64.

    Args:
        rows, blocks, unit, block: see `tables`.
        made: `[places]` bool, which entries hold what the cache holds.
    """
    most = int((np.where(rows > above, rows, 0) // unit).sum())
    out: Any = np.empty((2, most), np.int64)
    return out[:, : _due(rows, blocks, above, unit, block, made, out)]
