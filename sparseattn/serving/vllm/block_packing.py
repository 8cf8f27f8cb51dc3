"""How vLLM's CPU cache packs its blocks, seen by what it writes."""

from __future__ import annotations

from typing import Any

import torch

from sparseattn.kernels.attend_vllm_blocks import blocks
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.serving.vllm import adapters

SMALL = 2.0**-5  # standard deviations: smaller numbers have fewer bits of 8, or none
NEAR = 0.25  # how far a number of 8 bits is from what was written, at most: vLLM cuts the bits off that do not fit


def packing_of(
    layer: Any, dtype: torch.dtype, heads: int, block: int, size: int, byte_floats: torch.dtype | None = None
) -> str:
    """Return the packing of a layer's cache, seen by letting the engine write rows and reading them.

    Args:
        layer: of the engine.
        dtype: of the rows.
        heads, block, size: KV heads, rows of a block, and channels.
        byte_floats: the 8-bit floats that the cache holds; None: it holds rows as they are.

    Raises:
        ValueError: a packing that is not known.
    """
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 2 * block, heads, size, generator=draw)
    if byte_floats is not None:  # as large as their scales are made for
        rows *= torch.tensor(adapters.scales(layer))[:, None, None, None]
    rows = rows.to(dtype)
    cache = torch.zeros(2, heads, block, 2 * size, dtype=dtype if byte_floats is None else torch.uint8)
    adapters.write(layer, rows[0], rows[1], cache, torch.arange(2 * block))
    for packing in blocks.PACKINGS:
        packed = read_as(layer, cache, packing, dtype, byte_floats)
        read = [part(torch.arange(2), block) for part in (packed.keys, packed.values)]
        if all(
            _alike(a.transpose(1, 2).flatten(0, 1), b, byte_floats is None) for a, b in zip(read, rows, strict=True)
        ):
            return packing
    raise ValueError(
        f"the packing of vLLM's cache with {dtype} is not known: sparseattn reads {' and '.join(blocks.PACKINGS)}"
    )


def read_as(
    layer: Any, cache: torch.Tensor, packing: str, dtype: torch.dtype, byte_floats: torch.dtype | None
) -> BlockCache:
    """Return how a layer's cache is read, see `packing_of`."""
    if byte_floats is None:
        return BlockCache(cache, packing)
    return BlockCache(cache.view(byte_floats), packing, dtype, *adapters.scales(layer))


def _alike(read: torch.Tensor, written: torch.Tensor, exact: bool) -> bool:
    if exact:
        return torch.equal(read, written)
    return torch.allclose(read.float(), written.float(), rtol=NEAR, atol=float(NEAR * SMALL * written.float().std()))
