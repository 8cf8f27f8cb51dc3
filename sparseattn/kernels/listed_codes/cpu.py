"""Logits of listed rows by product codes, compiled by numba for the CPU: a list is one thread's work."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.product_codes.codes import ProductCodes
from sparseattn.kernels.product_codes.cpu import logits_of, padded, stored

PART = 2048  # rows of a list that a thread looks up at a time


@entry(parallel=True, cache=True, nogil=True)
def _listed(codes, steps, count, bits, tables, lists, each, valid, valid_step, total, rows, out):
    """tables: `[B*L,1 or G,M,K]`; rows: `[B*L,C]` int32; out: `[B*L,1 or G,C]`."""
    many = rows.shape[1]
    parts = (many + PART - 1) // PART
    for work in prange(len(rows) * parts):
        which, first = work // parts, work % parts * PART
        b, h = which // lists, which % lists // each
        ids = np.empty(min(PART, many - first), np.int32)
        for i in range(len(ids)):
            row = rows[which, first + i]
            known = 0 <= row < total
            ids[i] = row if known and valid[b * valid_step + row] else -1
        logits_of(codes, b * steps[0] + h * steps[1], steps[2], count, bits, tables[which], ids,
                   out[which, :, first : first + len(ids)])  # fmt: skip


def logits(tables: Tensor, keys: ProductCodes, rows: Tensor) -> Tensor:
    """As `dispatch.logits`."""
    (batch, heads, group), (lists, many) = tables.shape[:3], rows.shape[1:]
    out = torch.empty(batch * lists, heads * group // lists, many)
    codes, valid = stored(keys)
    laid = padded(tables, keys)  # [B*H,G,M,K]
    laid = laid.view(batch * lists, -1, *laid.shape[2:])
    with ONE_AT_A_TIME:
        use_threads(tables.shape[:4].numel() * many)
        _listed(
            *codes, laid.numpy(), lists, lists // heads, *valid, keys.codes.shape[3],
            rows.int().flatten(0, 1).contiguous().numpy(), out.numpy(),
        )  # fmt: skip
    return out.view(batch, heads, group, many)
