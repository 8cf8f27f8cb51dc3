"""How vLLM's CPU cache packs its blocks, seen by what it writes."""

from __future__ import annotations

from typing import Any

import torch

from sparseattn.kernels.attend_vllm_blocks import blocks
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.serving.vllm import adapters


def packing_of(layer: Any, dtype: torch.dtype, heads: int, block: int, size: int) -> str:
    """Return the packing of a layer's cache, seen by letting the engine write rows and reading them.

    Raises:
        ValueError: a packing that is not known.
    """
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 2 * block, heads, size, generator=draw).to(dtype)
    for packing in blocks.PACKINGS:
        cache = torch.zeros(2, heads, block, 2 * size, dtype=dtype)
        adapters.write(layer, rows[0], rows[1], cache, torch.arange(2 * block))
        packed = BlockCache(cache, packing)
        read = [part(torch.arange(2), block) for part in (packed.keys, packed.values)]
        if all(torch.equal(a.transpose(1, 2).flatten(0, 1), b) for a, b in zip(read, rows, strict=True)):
            return packing
    raise ValueError(
        f"the packing of vLLM's cache with {dtype} is not known: sparseattn reads {' and '.join(blocks.PACKINGS)}"
    )
