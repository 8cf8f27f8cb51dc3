"""How vLLM's CPU cache packs its blocks, and the compiling of what reads them."""

from __future__ import annotations

from typing import Any

import torch

from sparseattn.kernels.attend_vllm_blocks import blocks
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, StepPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks, attend_rows
from sparseattn.serving.vllm import adapters
from sparseattn.serving.vllm.page_tables import PageZones


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


def warm_up(
    dtype: torch.dtype, packing: str, queries: int, heads: int, block: int, size: int, zones: PageZones, single: bool
) -> None:
    """Compiles what a step runs, for this engine's dtype: it takes seconds the first time.

    Args:
        single: whether single rows are chosen.
    """
    cache = torch.zeros(1, heads, block, 2 * size, dtype=dtype)
    query = torch.zeros(1, queries, size, dtype=dtype)
    place = torch.zeros(1, 1, dtype=torch.int32)
    scores = torch.zeros(1, heads, zones.unit // zones.page)
    tails = torch.ones(1, dtype=torch.int32)
    pages = StepPages(zones.page, zones.unit, place, place, tails, torch.zeros(1, dtype=torch.int64))
    attend_blocks(query, torch.empty_like(query), BlockCache(cache, packing), pages, scores, 1, 1.0)
    if single:
        ids = torch.zeros(1, heads, 1, dtype=torch.int32)
        attend_rows(query, torch.empty_like(query), BlockCache(cache, packing), pages, ids, 1.0)
