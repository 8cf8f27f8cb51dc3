"""The rows of buckets as spans, compiled by numba for the CPU."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import storage_of


@njit
def _cut(ids, edges, at, step, segments, span, budget, start, length):
    """Return the spans of the buckets `ids` `[P]` of one head; edges: flat from `at` on, `step` from segment to
    segment."""
    slot, slots = 0, start.shape[0]
    for i in range(ids.shape[0]):
        for r in range(segments):
            edge = at + r * step + ids[i]
            row, end = edges[edge], edges[edge + 1]
            end = min(end, row + budget)
            budget -= max(end - row, 0)
            while row < end and slot < slots:
                start[slot], length[slot] = row, min(end - row, span)
                row += span
                slot += 1
    start[slot:], length[slot:] = 0, 0


@entry(cache=True, nogil=True)
def _bucket_spans(ids, edges, steps, segments, each, span, budget, start, length):
    batch, chosen = ids.shape[:2]
    for b in range(batch):
        for s in range(chosen):
            at = b * steps[0] + s // each * steps[1]
            _cut(ids[b, s], edges, at, steps[2], segments, span, budget, start[b, s], length[b, s])


def spans(ids: Tensor, edges: Tensor, span: int, budget: int, slots: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.bucket_spans`."""
    start, length = torch.empty(2, *ids.shape[:2], slots, dtype=torch.int32)
    each = ids.shape[1] // edges.shape[1]
    _bucket_spans(
        ids.contiguous().numpy(), storage_of(edges), edges.stride()[:3], edges.shape[2], each, span, budget,
        start.numpy(), length.numpy(),
    )  # fmt: skip
    return start, length
