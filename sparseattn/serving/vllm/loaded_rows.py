"""Rows that a KV connector put into blocks: no step of this engine wrote them, which is how they are recognised.

A builder sees where every row goes that its engine computes, and undoes the entry of the index that holds it. A
connector loads rows from a disk or another engine into blocks that another request may have filled before. Neither
scheduler nor connector tells a builder so. But a request that comes with rows had them loaded, or shares a cached
prefix with others. The entries of these rows are undone, and made anew from what lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class LoadedRows:
    """What is known of the rows of each running request.

    Args:
        unit, block: rows of an entry of the index, and of a block.

    Attributes:
        known: by request, how many of its rows were written by steps, or were found to be loaded, and their blocks.
    """

    def __init__(self, unit: int, block: int) -> None:
        self.unit, self.block = unit, block
        self.known: dict[str, tuple[int, Any]] = {}

    def places(self, names: Sequence[str], new: Any, rows: Any, blocks: Any) -> Any:
        """Return the entries that hold rows which came from elsewhere, `[n]` int64, counted over all blocks.

        A request that is missing from one step, as one that was preempted, is taken for a new one when it comes back.

        Args:
            names: of a step's R requests, in the order of what follows, all of numpy and of whole numbers.
            new: `[R]`, how many rows the step writes of each.
            rows: `[R]`, how many each has with them.
            blocks: `[R,M]`, the block table.
        """
        before, self.known, found = self.known, {}, []
        for name, written, count, table in zip(names, new.tolist(), rows.tolist(), blocks, strict=True):
            known, own = before.get(name, (0, table[:0]))
            if len(own) > len(table) or (own != table[: len(own)]).any():
                known = 0
            self.known[name] = count, table[: -(-count // self.block)].copy()
            if count - written > known:
                found.append(self._between(known, count - written, table))
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _between(self, first: int, end: int, table: Any) -> Any:
        """`[n]`: the entries of rows `first` to `end` of a sequence in the blocks `table`."""
        entries = np.arange(first // self.unit, -(-end // self.unit))
        per = self.block // self.unit
        return table[entries // per].astype(np.int64) * per + entries % per
