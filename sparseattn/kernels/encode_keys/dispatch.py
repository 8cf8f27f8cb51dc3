"""Keys rounded to a few bits, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.encode_keys.levels import levels_of_16_bits
from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.quantized_keys import level_grid
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys

ENCODE = Operation(__package__, "torch", "numba")


def encode(
    keys: Tensor, rows: int, bits: int, levels: str, dtype: torch.dtype, impl: str | None = None
) -> QuantizedKeys:
    """Return keys rounded to a few bits, see `reference.quantise`; `impl`: see `extremes`."""
    low, step = levels_of_16_bits(*extremes(keys, rows, levels, impl), bits, levels, dtype)
    return QuantizedKeys(packed_codes(keys, low, step, bits, impl=impl), low, step, bits)


def extremes(keys: Tensor, rows: int, levels: str, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Return what levels are made of, `[B,H,n/rows,D]` float32.

    The least and the largest number of a channel in a group; for "means" those of the numbers below and above the
    middle of these, the first twice where none is above.

    Args:
        keys, rows, levels: see `reference.quantise`.
        impl: "torch" or "numba", see `implementations`.
    """
    return ENCODE.pick(impl, keys.device, keys.dtype).extremes(keys, rows, levels)


def packed_codes(
    keys: Tensor, low: Tensor, step: Tensor, bits: int, grid: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Return the codes of the levels nearest to keys `[B,H,n,D]`, packed as `quantized_keys.packing` says.

    Args:
        low, step, bits, grid: see `quantized_keys.keys.QuantizedKeys`.
        impl: see `extremes`.
    """
    if grid is not None:
        low, step = level_grid.read(low, step, grid)
    return ENCODE.pick(impl, keys.device, keys.dtype).packed_codes(keys, low, step, bits)
