"""Levels of keys of few bits in 8 bits: numbers on a grid of each channel of a KV head, which grows as keys do.

A group's lowest level is `anchor + unit * low` and its step `pace * step`, `low` int8 and `step` uint8. A grid is the
three beside each other, `[B,H,3,D]` float32. It is chosen from the first groups that are stored, with room to spare.
Where later ones do not fit, the grid of that channel grows and the levels that are stored are rounded to it anew: their
codes stay, so that a number is then off by up to `(last + 1) pace / 4 + unit / 2` more than half a step, `last` the
largest code.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 3  # anchor, unit and pace
SLACK = 1.25  # a grid leaves room for other keys, so that few of them make stored levels be rounded anew
TINY = 1e-30  # least unit, of a channel that is one number
LOWS, STEPS = 127, 255  # the largest that int8 and uint8 hold


def fitting(low: Tensor, step: Tensor, grid: Tensor | None) -> Tensor:
    """Return a grid for levels: `grid` but in the channels where they do not fit, and there one for what did fit as
    well.

    Args:
        low, step: `[B,H,n,D]` float32, n 1 or more.
        grid: `[B,H,3,D]`; None: the first.
    """
    least, most, top = low.amin(2), low.amax(2), step.amax(2)
    fits = None
    if grid is not None:
        anchor, unit, pace = grid.unbind(2)
        lowest, highest = anchor - LOWS * unit, anchor + LOWS * unit
        fits = (least >= lowest) & (most <= highest) & (top + unit <= STEPS * pace)
        least, most, top = torch.minimum(least, lowest), torch.maximum(most, highest), torch.maximum(top, STEPS * pace)
    unit = (((most - least) / 2 * SLACK + top / 2) / LOWS).clamp(min=TINY)
    pace = ((top * SLACK + unit) / STEPS).clamp(min=TINY)  # a step makes up for a low that is half a unit off
    grid_now = torch.stack([(least + most) / 2, unit, pace], 2)
    return grid_now if grid is None or fits is None else torch.where(fits[:, :, None], grid, grid_now)


def read(low: Tensor, step: Tensor, grid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Levels `[B,H,n,D]` as the float32 that they stand for; without a grid they are floats of 16 bits."""
    if grid is None:
        return low.float(), step.float()
    anchor, unit, pace = grid[:, :, :, None].unbind(2)
    return low.float() * unit + anchor, step.float() * pace


def lows(numbers: Tensor, grid: Tensor) -> Tensor:
    """Return the nearest int8 of float32 `[B,H,n,D]`."""
    anchor, unit, _ = grid[:, :, :, None].unbind(2)
    return ((numbers - anchor) / unit).round_().clamp_(-LOWS, LOWS).to(torch.int8)


def steps(numbers: Tensor, grid: Tensor, up: bool) -> Tensor:
    """Return the uint8 of float32 `[B,H,n,D]`, rounded up or to the nearest."""
    counted = numbers / grid[:, :, 2:]
    return (counted.ceil_() if up else counted.round_()).clamp_(0, STEPS).to(torch.uint8)


def regrid(low: Tensor, step: Tensor, before: Tensor, grid: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Levels on `before` rounded to the grid that it has grown to; the middle of a group's levels stays where
    it was."""
    lowest, wide = read(low, step, before)
    step_there = steps(wide, grid, up=False)
    middle = lowest + (wide - step_there * grid[:, :, 2:]) * (((1 << bits) - 1) / 2)
    other = (before != grid).any(2, keepdim=True)
    return torch.where(other, lows(middle, grid), low), torch.where(other, step_there, step)
