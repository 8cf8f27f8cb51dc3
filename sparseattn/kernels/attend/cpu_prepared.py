"""Attention of a step for which all but the query and the choice was looked up before, in compiled code.

numba looks at every argument of a call, and at every number of a tuple: so numbers come in one array.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
from torch import Tensor

from sparseattn.core.selection import Bounds
from sparseattn.kernels.attend.cpu import attend_lists, parts_of
from sparseattn.kernels.attend.cpu_many import products_for
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import rows_at


def prepared(
    query: Tensor, keys: Tensor, values: Tensor, bounds: Bounds, lists: int, slots: int, span: int
) -> tuple[int, ...]:
    """Return the numbers that `attend_prepared` takes. They hold no storage.

    Args:
        query: `[B,H,G,D]`.
        keys, values: `[B,H,N,D]`.
        bounds: of tensors that hold at each step what is to be read.
        lists: of spans, B*H or B*H*G.
        slots: spans of a list.
        span: rows of one at most.

    Raises:
        ValueError: keys or values whose elements of one row are not adjacent.
    """
    batch, heads, group, size = query.shape
    share = batch * heads * group // lists
    (_, key_at, key_steps), (_, value_at, value_steps) = rows_at(keys), rows_at(values)
    return (
        batch, heads, share, size, lists, slots, span, key_at, *key_steps, value_at, *value_steps, keys.shape[2],
        bounds.sink.data_ptr(), bounds.sealed.data_ptr(), bounds.rows.data_ptr(), bounds.base,
        parts_of(lists, slots * span), products_for(share, query.dtype, size),
    )  # fmt: skip


@njit
def attend_prepared(kind, numbers, query_at, scale, chosen_at, outs):
    """kind: of queries and rows; numbers: see `prepared`; scale: factor of logits of base 2; query_at, chosen_at: where
    queries, and start and length of spans `[2,lists,S]`, lie; outs: see `attend_lists`."""
    batch, heads, share, size, lists, slots, span = numbers[:7]
    key_at, key_b, key_h, key_n, value_at, value_b, value_h, value_n, rows = numbers[7:16]
    sink_at, sealed_at, end_at, base, splits, products = numbers[16:22]
    blocks = np.empty((batch, 1), np.int32)
    for b in range(batch):
        blocks[b, 0] = b
    attend_lists(
        (kind, query_at, (lists, share, size), heads, scale), (kind, key_at, (key_b, key_h, key_n)),
        (kind, value_at, (value_b, value_h, value_n)), (blocks, rows),
        (chosen_at, chosen_at + 4 * lists * slots, np.empty((lists, 0), np.float32), slots, span),
        (sink_at, sealed_at, end_at, base), splits, products, outs,
    )  # fmt: skip
