"""Levels of a group of keys: zero point and scale from the least and the largest number of each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.quantized_keys import level_grid


def nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 `numbers` as the nearest finite ones of a 16-bit `dtype`."""
    most = torch.finfo(dtype).max
    return numbers.clamp(-most, most).to(dtype)


def rounded(numbers: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """Return float32 `numbers` as the nearest of a 16-bit `dtype` not below (`up`) or not above them; finite."""
    close, most = nearest(numbers, dtype), torch.finfo(dtype).max
    wrong = close.float() < numbers if up else close.float() > numbers
    bits = close.view(torch.int16)
    away_from_zero = (bits >= 0) == up  # the next number has the next bits
    neighbour = torch.where(away_from_zero, bits + 1, bits - 1)
    smallest = torch.tensor(1 if up else -(1 << 15) + 1, dtype=torch.int16, device=bits.device)
    neighbour = torch.where(close == 0, smallest, neighbour)
    return torch.where(wrong, neighbour, bits).view(dtype).clamp(-most, most)


def levels_of_16_bits(least: Tensor, most: Tensor, bits: int, levels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return low and step in 16 bits, of what `dispatch.extremes` finds."""
    last = (1 << bits) - 1
    if levels == "means":
        low = nearest(least, dtype)
        return low, nearest((most - low.float()) * (most > least), dtype)
    if levels == "ends":
        low = rounded(least, dtype, up=False)
        return low, rounded((most - low.float()) / last, dtype, up=True)
    low = nearest(least + (most - least) / (2 << bits), dtype)
    return low, rounded(_least_step(least, most, low.float(), bits), dtype, up=True)


def levels_of_8_bits(
    least: Tensor, most: Tensor, bits: int, levels: str, grid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return low and step in 8 bits, for "bins" and "means", and the grid that they are on: `grid`, or what it has to
    grow to. Steps are rounded up, those of "means" to the nearest."""
    parts, share = (1, 0.0) if levels == "means" else (1 << bits, 0.5)
    step = (most - least) / parts
    first = least + step * share
    grid = level_grid.fitting(first, step, grid)
    low = level_grid.lows(first, grid)
    lowest = level_grid.read(low, low, grid)[0]
    if levels == "means":
        return low, level_grid.steps((most - lowest) * (most > least), grid, up=False), grid
    return low, level_grid.steps(_least_step(least, most, lowest, bits), grid, up=True), grid


def _least_step(least: Tensor, most: Tensor, low: Tensor, bits: int) -> Tensor:
    """Return the step of "bins" for which no number from `least` to `most` is farther than half of it from a level."""
    return torch.maximum((low - least) * 2, (most - low) / ((1 << bits) - 0.5))
