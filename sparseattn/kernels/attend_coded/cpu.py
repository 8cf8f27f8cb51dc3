"""Rows ranked by keys of few bits or by product codes, chosen and attended to in one compiled call."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend.cpu import attend
from sparseattn.kernels.attend.cpu_prepared import attend_prepared, prepared
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, scratch, use_threads
from sparseattn.kernels.product_codes.codes import RankedCodes
from sparseattn.kernels.product_codes.cpu import BestRows, best_by_codes
from sparseattn.kernels.quantized_keys.cpu_choice import LikelyRows, best_of_likely
from sparseattn.kernels.quantized_keys.cpu_vote import best_of_all
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys


@entry(cache=True, nogil=True)
def _attend_coded(kinds, numbers, rows, factor, scale, query_at, arenas_at, chosen_at, outs):
    """kinds, numbers, factor, query_at, arenas_at, chosen_at: see `best_of_likely`; rows, scale, outs: see
    `attend_prepared`. Return whether the rows that it attended to are surely the best."""
    best_of_likely(kinds, numbers, factor, query_at, arenas_at, chosen_at)
    lists, slots = numbers[0], numbers[13]
    known = array_at(np.int32, chosen_at + 8 * lists * slots, lists)
    for which in range(lists):
        if not known[which]:
            return False
    attend_prepared(kinds[0], rows, query_at, scale, chosen_at, outs)
    return True


@entry(cache=True, nogil=True)
def _attend_named(kinds, numbers, rows, root, scale, query_at, arenas_at, chosen_at, outs):
    """kinds, numbers, root, query_at, arenas_at, chosen_at: see `best_by_codes`; rows, scale, outs: see
    `attend_prepared`. Return that the rows are the best."""
    best_by_codes(kinds, numbers, root, query_at, arenas_at, chosen_at)
    attend_prepared(kinds[0], rows, query_at, scale, chosen_at, outs)
    return True


class _Step:
    """What steps have in common: numbers for compiled code, and room for sums that nobody asks for."""

    choice: BestRows | LikelyRows
    unsure: QuantizedKeys | None

    def __init__(
        self, query: Tensor, coded: QuantizedKeys | RankedCodes, count: int, keys: Tensor, values: Tensor,
        bounds: Bounds, scale: float,
    ) -> None:  # fmt: skip
        if isinstance(coded, RankedCodes):
            self.choice, self.run, self.unsure = BestRows(query, coded, count), _attend_named, None
        else:  # where rows that were not listed may be better, the votes of all choose
            self.choice, self.run, self.unsure = LikelyRows(query, coded, count), _attend_coded, coded
        (batch, heads, group, size), lse = query.shape, torch.empty(query.shape[:3])
        self.chosen = 2, batch, heads, count
        self.keys, self.values, self.bounds, self.lse, self.factor = keys, values, bounds, lse, scale
        self.rows = np.array(prepared(query, keys, values, bounds, batch * heads, count, 1), np.int64)
        self.scale, self.lse_at = np.float32(scale) * LOG2E, lse.data_ptr()
        self.row = 2 * size * batch * heads * group
        self.attending = self.row * (count + bounds.base)

    def __call__(self, query: Tensor, recent: int) -> tuple[Tensor, Selection]:
        choice, query = self.choice, query.contiguous()
        chosen, out = torch.empty(choice.lists * (2 * choice.count + 1), dtype=torch.int32), torch.empty_like(query)
        with ONE_AT_A_TIME:
            use_threads(max(choice.work, self.attending + self.row * recent))
            known = self.run(
                choice.kinds, choice.numbers, self.rows, choice.factor, self.scale, query.data_ptr(),
                scratch(choice.arenas).data_ptr(), chosen.data_ptr(), (out.data_ptr(), self.lse_at),
            )  # fmt: skip
        if not known and self.unsure is not None:
            selection = Selection.pages(best_of_all(query, self.unsure, choice.count), 1)
            return attend(query, self.keys, self.values, selection, self.bounds, self.factor)[0], selection
        start, length = chosen[: 2 * choice.lists * choice.count].view(self.chosen).unbind()
        return out, Selection(start, length, 1, whole=True)


def coded_step(
    query: Tensor, coded: QuantizedKeys | RankedCodes, count: int, keys: Tensor, values: Tensor, bounds: Bounds,
    scale: float,
) -> _Step | None:  # fmt: skip
    """As `dispatch.coded_step`."""
    if isinstance(coded, RankedCodes):
        if not 0 < count <= coded.keys.codes.shape[3]:
            return None
    elif not LikelyRows.serves(coded, count):
        return None
    return _Step(query, coded, count, keys, values, bounds, scale)
