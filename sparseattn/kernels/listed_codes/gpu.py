"""Logits of listed rows by product codes as a Triton launch: `product_codes.gpu.sum_rows` over the lists."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.product_codes.codes import ProductCodes
from sparseattn.kernels.product_codes.gpu import sums_of_listed


def logits(tables: Tensor, keys: ProductCodes, rows: Tensor) -> Tensor:
    """As `dispatch.logits`."""
    (batch, heads, group), lists = tables.shape[:3], rows.shape[1]
    rows = torch.where(rows < keys.codes.shape[3], rows, -1).int()
    own = tables.reshape(batch, lists, heads * group // lists, *tables.shape[3:])
    return sums_of_listed(own, keys, rows)[0].view(batch, heads, group, -1)
