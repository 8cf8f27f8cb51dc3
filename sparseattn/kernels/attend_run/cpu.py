"""Attention over one run of rows in one compiled call."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseattn.core.selection import Bounds
from sparseattn.kernels.attend.cpu_prepared import attend_prepared, prepared
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, LOG2E, array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads


@entry(cache=True, nogil=True)
def _attend_run(kind, numbers, scale, first, end, query_at, notes_at, outs):
    """kind, numbers, scale, query_at, outs: see `attend_prepared`; first, end: of the run; notes_at: where its start
    and length lie, `[2,B*H]` int32, and behind these the ends of what is sealed and of all, `[2,B]`."""
    batch, heads = numbers[:2]
    lists = batch * heads
    notes = array_at(np.int32, notes_at, 2 * (lists + batch))
    for which in range(lists):
        notes[which], notes[lists + which] = first, end - first
    for b in range(2 * batch):
        notes[2 * lists + b] = end
    attend_prepared(kind, numbers, query_at, scale, notes_at, outs)


class _Step:
    """What steps have in common: numbers for compiled code, and room for sums that nobody asks for."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, rows: int, scale: float) -> None:
        batch, heads, group, size = query.shape
        lists, lse = batch * heads, torch.empty(query.shape[:3])
        notes, sink = torch.zeros(2 * (lists + batch), dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        bounds = Bounds(sink, 0, *notes[2 * lists :].view(2, batch).unbind())
        self.held = keys, values, bounds, notes, lse  # addresses hold nothing
        self.kind, self.notes_at, self.lse_at = KINDS[query.dtype], notes.data_ptr(), lse.data_ptr()
        span = 1 << (rows - 1).bit_length()
        self.numbers = np.array(prepared(query, keys, values, bounds, lists, 1, span), np.int64)
        self.scale, self.row = np.float32(scale) * LOG2E, 2 * size * lists * group

    def __call__(self, query: Tensor, first: int, end: int) -> Tensor:
        query, out = query.contiguous(), torch.empty_like(query)
        with ONE_AT_A_TIME:
            use_threads(self.row * (end - first))
            _attend_run(
                self.kind, self.numbers, self.scale, first, end, query.data_ptr(), self.notes_at,
                (out.data_ptr(), self.lse_at),
            )  # fmt: skip
        return out


def run_step(query: Tensor, keys: Tensor, values: Tensor, rows: int, scale: float) -> _Step:
    """As `dispatch.run_step`."""
    return _Step(query, keys, values, rows, scale)
