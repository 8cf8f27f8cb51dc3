"""How vLLM's CPU cache packs its blocks, and the compiling of what reads them."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops

from sparseattn.kernels.attend_vllm_blocks import blocks
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, StepPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks
from sparseattn.serving.vllm.page_tables import Zones


def packing_of(isa: str, dtype: torch.dtype, heads: int, block: int, size: int) -> str:
    """The packing of a cache, seen by letting the engine write rows and reading them.

    Raises:
        ValueError: a packing that is not known.
    """
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 2 * block, heads, size, generator=draw).to(dtype)
    for packing in blocks.PACKINGS:
        cache = torch.zeros(2, heads, block, 2 * size, dtype=dtype)
        halves = cache.view(2, heads, 2 * block, size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(rows[0], rows[1], *halves, torch.arange(2 * block), isa)
        packed = BlockCache(cache, packing)
        read = [part(torch.arange(2), block) for part in (packed.keys, packed.values)]
        if all(torch.equal(a.transpose(1, 2).flatten(0, 1), b) for a, b in zip(read, rows, strict=True)):
            return packing
    raise ValueError(
        f"the packing of vLLM's cache for {isa!r} with {dtype} is not known: sparseattn reads "
        f"{' and '.join(blocks.PACKINGS)}"
    )


def warm_up(dtype: torch.dtype, packing: str, queries: int, heads: int, block: int, size: int, zones: Zones) -> None:
    """Compiles what a step runs, for this engine's dtype: it takes seconds the first time."""
    cache = torch.zeros(1, heads, block, 2 * size, dtype=dtype)
    query = torch.zeros(1, queries, size, dtype=dtype)
    place = torch.zeros(1, 1, dtype=torch.int32)
    scores = torch.zeros(1, heads, zones.unit // zones.page)
    tails = torch.ones(1, dtype=torch.int32)
    pages = StepPages(zones.page, zones.unit, place, place, tails, torch.zeros(1, dtype=torch.int64))
    attend_blocks(query, torch.empty_like(query), BlockCache(cache, packing), pages, scores, 1, 1.0)
