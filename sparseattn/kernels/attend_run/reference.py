"""By torch, which is the specification."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparseattn.kernels.attend_run.dispatch import RunStep


def run_step(query: Tensor, keys: Tensor, values: Tensor, rows: int, scale: float) -> RunStep:
    """As `dispatch.run_step`."""

    def step(query: Tensor, first: int, end: int) -> Tensor:
        read = slice(first, end)
        return F.scaled_dot_product_attention(query, keys[:, :, read], values[:, :, read], scale=scale)

    return step
