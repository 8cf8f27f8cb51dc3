"""Times steps of one long sequence by the engine's own objects, dense as stock's and sparse, before it serves.

Layers read rows of their own that no cache of the processor holds together, as in a model's step. What the rows hold
does not matter to the time. The longest length at which stock is faster decides (`above.pays_above`).
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from sparseattn import __version__
from sparseattn.serving.vllm import adapters, installed
from sparseattn.serving.vllm.above import Timed, lengths, pays_above, remember, remembered, said
from sparseattn.serving.vllm.self_test import Counts
from sparseattn.serving.vllm.settings import Settings
from sparseattn.utils.devices import features, processor

TOGETHER = 256 << 20  # bytes of rows that the timed layers have in all, more than a processor's cache
ROUNDS = 7


def measured(builder: Any) -> Settings:
    """Return the settings of a builder with the rows above which sequences are sparse, by times of this engine or of
    an earlier start of such an engine on this machine.

    Args:
        builder: of an engine that has passed the self-test; it stays as it is.
    """
    settings, longest = builder.settings, int(builder.vllm_config.model_config.max_model_len)
    what = _depends_on(builder, longest)
    timed, of = remembered(what), "measured at an earlier start"
    if timed is None:
        least = (
            builder.zones.sink
            + builder.zones.window
            + builder.zones.unit
            + max(impl.pages * impl.page for impl in builder.sparse)
        )
        timed, of = [_timed(builder, rows) for rows in lengths(least, longest)], "measured now"
        try:
            remember(what, timed)
        except OSError as error:  # a read-only home
            adapters.logger.warning("sparseattn: the times could not be kept for the next start (%s)", error)
    above = pays_above(timed, longest)
    say: Callable[..., None] = adapters.logger.warning if above >= longest else adapters.logger.info
    say("sparseattn, %s: %s", of, said(timed, above, longest))
    return replace(settings, above=above, measured=False)


def _depends_on(builder: Any, longest: int) -> dict[str, Any]:
    """Return all that times depend on, as JSON holds it."""
    return {
        "processor": processor(),
        "features": features(),
        "threads": torch.get_num_threads(),
        "vllm": installed.distribution(),
        "sparseattn": __version__,
        "shape": [builder.num_heads, builder.num_kv_heads, builder.head_dim, str(builder.dtype), builder.block],
        "cache": str(builder.dtype if builder.byte_floats is None else builder.byte_floats),
        "packing": builder.packing,
        "methods": Counter(f"{impl.selector.label()}, {impl.pages} pages" for impl in builder.sparse),
        "zones": [builder.settings.sink, builder.settings.window],
        "longest": longest,
    }


def _timed(builder: Any, rows: int) -> Timed:
    """Time a step of one sequence of so many rows."""
    steps = Steps(builder, rows)
    sides = [steps.side(None), steps.side(replace(builder.settings, above=0))]
    seconds: tuple[list[float], list[float]] = ([], [])
    for side in sides:  # entries of the index are made, and pages of memory touched
        steps.run(*side)
    for _ in range(ROUNDS):
        for taken, side in zip(seconds, sides, strict=True):
            taken.append(steps.run(*side))
    return Timed(rows, *map(median, seconds))


class Steps:
    """One sequence in some of an engine's sparse layers, spread evenly over them.

    Args:
        builder: of the engine.
        rows: of the sequence, that of the step among them.
    """

    def __init__(self, builder: Any, rows: int) -> None:
        self.builder = builder
        heads, size, block = builder.num_kv_heads, builder.head_dim, builder.block
        blocks = -(-rows // block)
        shape = blocks + 1, heads, block, 2 * size  # block 0 is vLLM's null block
        held = builder.dtype if builder.byte_floats is None else builder.byte_floats
        each = blocks * heads * block * 2 * size * held.itemsize
        draw = torch.Generator().manual_seed(0)
        sparse = [name for name, impl in builder.impls.items() if impl.sparse]
        count = min(-(-TOGETHER // each), len(sparse))
        self.names, self.layers = [sparse[i * len(sparse) // count] for i in range(count)], len(sparse)
        self.caches = [torch.empty(shape).normal_(generator=draw).to(held) for _ in self.names]
        if builder.byte_floats is not None:
            self.caches = [cache.view(torch.uint8) for cache in self.caches]
        self.query = torch.empty(1, builder.num_heads, size, dtype=builder.dtype).normal_(generator=draw)
        self.row = torch.zeros(1, heads, size, dtype=builder.dtype)
        table = torch.arange(1, blocks + 1).int()[None]
        slot = torch.tensor([int(table[0, -1]) * block + (rows - 1) % block])
        starts, prompt = torch.tensor([0, 1]).int(), torch.tensor([False])
        self.common = adapters.step(starts, torch.tensor([rows]).int(), table, slot, prompt)

    def side(self, settings: Settings | None) -> tuple[Any, list[Any]]:
        """Return a builder and layers that serve by settings; None: as stock."""
        builder = copy.copy(self.builder)
        builder.settings, builder.made, builder.runner = settings, np.zeros(0, np.bool_), None
        builder.loaded = None
        impls: list[Any] = []
        for name in self.names:
            impl = copy.copy(self.builder.impls[name])
            impl.sparse, impl.looked, impl.store, impl.counter = settings is not None, True, None, Counts()
            impl.group = impls
            impls.append(impl)
        return builder, impls

    def run(self, builder: Any, impls: list[Any]) -> float:
        """Return the seconds of a step of all sparse layers: its tables once, and for each layer what these took."""
        began = time.perf_counter()
        metadata = builder.build(0, self.common)
        built = time.perf_counter()
        for name, impl, cache in zip(self.names, impls, self.caches, strict=True):
            layer = self.builder.layers[name]
            adapters.attended(impl, layer, self.query, self.row, self.row, cache, metadata)
        ended = time.perf_counter()
        return (built - began) + (ended - built) * self.layers / len(impls)
