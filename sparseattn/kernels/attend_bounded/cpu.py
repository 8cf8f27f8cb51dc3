"""Pages scored, chosen and attended to in one compiled call.

numba looks at every argument of a call: three calls with all that they need take as long as what they compute for a
small model.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Chosen
from sparseattn.kernels.attend.cpu_prepared import attend_prepared, prepared
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, LOG2E, all_finite, array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.page_bounds.bounds import VotedBounds
from sparseattn.kernels.page_bounds.cpu import score_pages
from sparseattn.kernels.topk.cpu import list_best_pages

FLAGS = KINDS[torch.bool]


@entry(cache=True, nogil=True)
def _attend_bounded(kind, flag, numbers, rows, temperature, scale, query_at, chosen_at, out_at):
    """kind, flag: what queries, bounds and rows are, and what says which pages are there; numbers: see `_Step`; rows:
    see `attend_prepared`; temperature, scale: what bounds are divided by, and the factor of logits of base 2; ..._at:
    where queries, start and length of the spans, and outputs lie. Return whether the query is finite."""
    batch, heads, group, size, listed, slots, page, summed, each = numbers[:9]
    low_at, low_b, low_h, low_p, high_at, high_b, high_h, high_p, valid_at, valid_step = numbers[9:19]
    scores_at, lse_at, tabled = numbers[19:22]
    if not all_finite(array_at(kind, query_at, batch * heads * group * size), batch * heads * group * size):
        return False
    per = group if each else 1
    score_pages(
        (kind, query_at, group, size, temperature), (kind, low_at, (low_b, low_h, low_p)),
        (kind, high_at, (high_b, high_h, high_p)), (flag, valid_at, valid_step, tabled != 0), (summed != 0, each != 0),
        (scores_at, (batch, heads, per, listed)),
    )  # fmt: skip
    list_best_pages(scores_at, (batch * heads * per, listed, slots), page, chosen_at)
    attend_prepared(kind, rows, query_at, scale, chosen_at, (out_at, lse_at))
    return True


class _Step:
    """What steps have in common: numbers for compiled code, and room for scores and sums that nobody asks for."""

    def __init__(
        self, query: Tensor, voted: VotedBounds, count: int, page: int, keys: Tensor, values: Tensor, bounds: Bounds,
        scale: float,
    ) -> None:  # fmt: skip
        low, high, valid = voted.bounds.minimum, voted.bounds.maximum, voted.bounds.valid
        assert valid is not None
        (batch, heads, group, size), listed = query.shape, low.shape[2]
        each, summed = voted.group == "each", voted.group == "sum"
        lists = batch * heads * group if each else batch * heads
        self.page, slots = page, min(count, listed)
        self.chosen = 2, batch, lists // batch, slots
        self.like = torch.empty(self.chosen, dtype=torch.int32)  # what is like it is made in half the time
        self.kind, scores, lse = KINDS[query.dtype], torch.empty(lists * listed), torch.empty(query.shape[:3])
        self.held = voted, keys, values, bounds, scores, lse  # addresses hold nothing
        self.numbers = np.array(
            [
                batch, heads, group, size, listed, slots, page, summed, each,
                low.data_ptr(), *low.stride()[:3], high.data_ptr(), *high.stride()[:3],
                valid.data_ptr(), valid.stride(0), scores.data_ptr(), lse.data_ptr(), False,
            ],
            np.int64,
        )  # fmt: skip
        self.rows = np.array(prepared(query, keys, values, bounds, lists, slots, page), np.int64)
        self.factors = np.float32(voted.temperature), np.float32(scale) * LOG2E
        # Multiplications of scores and attention, and those of a recent row.
        self.row = 2 * size * batch * heads * group
        self.work = 2 * size * listed * batch * heads * (1 if summed else group) + self.row * (
            slots * page + bounds.base
        )

    def __call__(self, query: Tensor, recent: int) -> tuple[Tensor, Chosen] | None:
        query, chosen, out = query.contiguous(), torch.empty_like(self.like), torch.empty_like(query)
        with ONE_AT_A_TIME:
            use_threads(self.work + self.row * recent)
            finite = _attend_bounded(
                self.kind, FLAGS, self.numbers, self.rows, *self.factors, query.data_ptr(), chosen.data_ptr(),
                out.data_ptr(),
            )  # fmt: skip
        return (out, Chosen(chosen, self.chosen, self.page)) if finite else None


def bounded_step(
    query: Tensor, voted: VotedBounds, count: int, page: int, keys: Tensor, values: Tensor, bounds: Bounds, scale: float
) -> _Step:
    """As `dispatch.bounded_step`."""
    return _Step(query, voted, count, page, keys, values, bounds, scale)
