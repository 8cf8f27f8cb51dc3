"""A linear layer for each of several heads, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation

LINEAR = Operation(__package__, "torch", "numba")
# Bytes of a weight -> vectors up to which reading the weights is what a linear layer costs. More of them torch
# multiplies faster, once it has turned weights of 16 bits into float32 ones.
FEW = {2: 64, 4: 16}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, impl: str | None = None
) -> Tensor:
    """Return `x @ weight.mT + bias` for each of A heads, summed in float32.

    Args:
        x: `[A,n,D]` float32.
        weight: `[A,C,D]`, float32 or of 16 bits.
        bias: `[A,C]` float32, or None.
        relu: whether negative outputs become 0.
        impl: "torch" or "numba", see `implementations`.

    Returns:
        `[A,n,C]` float32.
    """
    torch_only = x.shape[1] > FEW[weight.itemsize] or x.is_cuda or x.requires_grad or weight.requires_grad
    if bias is None:
        bias = weight.new_zeros(weight.shape[:2], dtype=torch.float32)
    return LINEAR.pick(impl, x.device, weight.dtype, torch_only).linear(x, weight, bias, relu)
