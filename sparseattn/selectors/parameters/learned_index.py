"""Codes of four bits of what learned maps make of keys, and what they add to a query's score.

Letters: H KV heads, G query heads per KV head, r dimensions or bits, S = r or r / 4 codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LEVELS = 16  # of a code
NIBBLE = 4  # bits of it


def nibbles_of_signs(x: Tensor) -> Tensor:
    """Return codes `[...,r/4]` uint8 of four signs each of `x` `[...,r]`, the first in the lowest bit."""
    bits = (x > 0).unflatten(-1, (-1, NIBBLE)).to(torch.uint8)
    return (bits << torch.arange(NIBBLE, device=x.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def sign_tables(weights: Tensor) -> Tensor:
    """Return `[...,r/4,16]`, the sums of weights `[...,r]` times the signs that each code stands for."""
    codes = torch.arange(LEVELS, device=weights.device)
    signs = 2.0 * ((codes >> torch.arange(NIBBLE, device=weights.device)[:, None]) & 1) - 1  # [4,16]
    return weights.unflatten(-1, (-1, NIBBLE)) @ signs.to(weights.dtype)


def nibbles_of_levels(x: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Return codes uint8 of the shape of `x`, the nearest of 16 levels `low + step * code`."""
    return ((x - low) / step).round_().clamp_(0, LEVELS - 1).to(torch.uint8)


def level_tables(query: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Return `[B,H,G,r,16]`: products of queries `[B,H,G,r]` with the levels of each dimension, `[B,H,r]` both."""
    codes = torch.arange(LEVELS, device=query.device, dtype=query.dtype)
    levels = low[..., None] + step[..., None] * codes  # [B,H,r,16]
    return query[..., None] * levels[:, :, None]


def check_whole(selector: Any, what: str, mine: int, theirs: int, whose: str) -> None:
    """ValueError where a file of learned maps is of another number."""
    if mine != theirs:
        raise ValueError(f"{selector.artefact} is of {theirs} {what}, and {whose} {mine}: give it a file of as many")


def width_of(calibration: Any, name: str) -> int:
    """Return the last size of a file's parameter, of its first layer."""
    width: int = next(iter(calibration.layers.values()))[name].shape[-1]
    return width
