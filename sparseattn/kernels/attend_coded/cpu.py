"""Rows ranked by keys of few bits or by product codes, chosen and attended to in one compiled call."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Chosen, Selection
from sparseattn.kernels.attend.cpu import attend
from sparseattn.kernels.attend.cpu_prepared import attend_prepared, prepared
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, all_finite, array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, scratch, use_threads
from sparseattn.kernels.product_codes.codes import RankedCodes
from sparseattn.kernels.product_codes.cpu import BestRows, best_by_codes
from sparseattn.kernels.quantized_keys.cpu_choice import LikelyRows, best_of_likely
from sparseattn.kernels.quantized_keys.cpu_vote import best_of_all
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys

KNOWN, UNSURE, NOT_FINITE = 0, 1, 2  # the rows are the best; some that were not listed may be better; the query is not


@entry(cache=True, nogil=True)
def _attend_coded(kinds, numbers, rows, factor, scale, query_at, arenas_at, chosen_at, outs):
    """kinds, numbers, factor, query_at, arenas_at, chosen_at: see `best_of_likely`; rows, scale, outs: see
    `attend_prepared`. Return `KNOWN` or why there is no output."""
    lists, slots, many = numbers[0], numbers[13], numbers[0] * numbers[2] * numbers[3]
    if not all_finite(array_at(kinds[0], query_at, many), many):
        return NOT_FINITE
    best_of_likely(kinds, numbers, factor, query_at, arenas_at, chosen_at)
    known = array_at(np.int32, chosen_at + 8 * lists * slots, lists)
    for which in range(lists):
        if not known[which]:
            return UNSURE
    attend_prepared(kinds[0], rows, query_at, scale, chosen_at, outs)
    return KNOWN


@entry(cache=True, nogil=True)
def _attend_named(kinds, numbers, rows, root, scale, query_at, arenas_at, chosen_at, outs):
    """kinds, numbers, root, query_at, arenas_at, chosen_at: see `best_by_codes`; rows, scale, outs: see
    `attend_prepared`. Return `KNOWN` or why there is no output."""
    many = numbers[0] * numbers[7] * numbers[23]
    if not all_finite(array_at(kinds[0], query_at, many), many):
        return NOT_FINITE
    best_by_codes(kinds, numbers, root, query_at, arenas_at, chosen_at)
    attend_prepared(kinds[0], rows, query_at, scale, chosen_at, outs)
    return KNOWN


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
        # What is like it is made in half the time that an empty tensor takes.
        self.like = torch.empty(self.choice.lists * (2 * count + 1), dtype=torch.int32)
        self.keys, self.values, self.bounds, self.lse, self.factor = keys, values, bounds, lse, scale
        self.rows = np.array(prepared(query, keys, values, bounds, batch * heads, count, 1), np.int64)
        self.scale, self.lse_at = np.float32(scale) * LOG2E, lse.data_ptr()
        self.row = 2 * size * batch * heads * group
        self.work = self.choice.work + self.row * (count + bounds.base)

    def __call__(self, query: Tensor, recent: int) -> tuple[Tensor, Chosen] | None:
        choice, query = self.choice, query.contiguous()
        chosen, out = torch.empty_like(self.like), torch.empty_like(query)
        with ONE_AT_A_TIME:
            use_threads(self.work + self.row * recent)
            state = self.run(
                choice.kinds, choice.numbers, self.rows, choice.factor, self.scale, query.data_ptr(),
                scratch(choice.arenas).data_ptr(), chosen.data_ptr(), (out.data_ptr(), self.lse_at),
            )  # fmt: skip
        if state == NOT_FINITE:
            return None
        if state == UNSURE and self.unsure is not None:
            selection = Selection.pages(best_of_all(query, self.unsure, choice.count), 1)
            return attend(query, self.keys, self.values, selection, self.bounds, self.factor)[0], Chosen.of(selection)
        return out, Chosen(chosen, self.chosen, 1)


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
