"""Keys rounded to a few bits in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.encode_keys.levels import levels_of_16_bits
from sparseattn.kernels.quantized_keys import packing


def quantise(keys: Tensor, rows: int, bits: int, levels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and levels of keys.

    Args:
        keys: `[B,H,n,D]`, n a multiple of `rows`.
        rows: of a group.
        bits: a channel, 1 to 8; what is packed has 1, 2 or 4.
        levels: "bins": in the middle of equal parts of the distance from the least to the largest number of a channel
            in the group, so that none is farther than half a step from its level. "ends": the least, the largest and
            equal steps between them, as KIVI and FIER have it. "means", for one bit: the means of the numbers below and
            above the middle of that distance, which keep a few large numbers apart from the many small ones.
        dtype: of the levels, 16 bits; steps are rounded up.

    Returns:
        codes `[B,H,n,D]` uint8; low, the level of code 0, and step `[B,H,n/rows,D]`.
    """
    low, step = levels_of_16_bits(*extremes(keys, rows, levels), bits, levels, dtype)
    return codes_of(keys, low.float(), step.float(), bits), low, step


def extremes(keys: Tensor, rows: int, levels: str) -> tuple[Tensor, Tensor]:
    """As `dispatch.extremes`."""
    grouped = keys.float().unflatten(2, (-1, rows))  # [B,H,n/rows,rows,D]
    least, most = grouped.amin(3), grouped.amax(3)
    if levels != "means":
        return least, most
    upper = grouped > ((least + most) / 2)[:, :, :, None]
    above = upper.sum(3)
    total, high = grouped.sum(3), torch.where(upper, grouped, 0.0).sum(3)
    below = (total - high) / (rows - above)  # the least number is never above the middle
    return below, torch.where(above > 0, high / above.clamp(min=1), below)


def packed_codes(keys: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """As `dispatch.packed_codes`, of levels without a grid."""
    return packing.pack(codes_of(keys, low.float(), step.float(), bits), keys.shape[2] // low.shape[2], bits)


def codes_of(keys: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return the codes `[B,H,n,D]` uint8 of the nearest levels, which are `[B,H,n/rows,D]` float32."""
    grouped = keys.float().unflatten(2, (low.shape[2], -1))
    codes = (grouped - low[:, :, :, None]) / torch.where(step > 0, step, 1.0)[:, :, :, None]
    return codes.round_().clamp_(0, (1 << bits) - 1).to(torch.uint8).flatten(2, 3)
