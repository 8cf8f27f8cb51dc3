"""A few steps by the engine's own objects on a small cache of random rows, before it serves: what comes out is compared
with attention in torch over the rows that each step names.

The steps go the way that an engine's go: vLLM writes rows and describes a step, the builder makes its tables, a layer
attends. So whatever another version of vLLM does otherwise shows: the packing of rows, the fields of a step, the
arguments of a call. The cache has the layout of the engine's own: block size, heads, head size and dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseattn.core.activity import NAMES
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, StepPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks
from sparseattn.kernels.topk.dispatch import best
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.serving.vllm import adapters
from sparseattn.serving.vllm.page_index import Store
from sparseattn.serving.vllm.self_test_rows import STEPS, TestRows, TestStep

# How far outputs may be off, for values of unit variance. Rounding gave a tenth of it; rows of another place give 0.5.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LOOSE = 0.15  # of vLLM's own attention over e4m3 by matrix tiles: 0.06 was measured, with vLLM 0.32
FEW, EVERY = 3, 1 << 20  # pages that a sparse step reads, of four or more, and one at full budget


def check(builder: Any) -> None:
    """Run the steps, for each method among the builder's sparse layers.

    Raises:
        ValueError: something is not as it should be; or whatever a call ends with.
    """
    names = {impl.selector.label(): name for name, impl in builder.impls.items() if impl.sparse}
    for name in names.values():
        rows = TestRows.drawn(builder, builder.layers[name])
        dense = TestedLayer(builder, name, rows, None)
        probes = {
            "dense": dense,
            "full": TestedLayer(builder, name, rows, EVERY),
            "sparse": TestedLayer(builder, name, rows, FEW),
        }
        if not isinstance(builder.impls[name].selector, PageSelector):
            del probes["full"]  # there is nothing that a window chooses
        for number in range(STEPS):
            for mixed in (False, True):
                step = rows.step(number, mixed)
                for what, probe in probes.items():
                    probe.check(step, what)
        probes["sparse"].check_keys()


class TestedLayer:
    """Copies of a builder and of a layer of it, which serve the small cache.

    Args:
        builder: of the engine; it stays as it is.
        name: of the layer.
        rows: what there is to attend to.
        pages: that are chosen; None: the layer is stock vLLM's.
    """

    def __init__(self, builder: Any, name: str, rows: TestRows, pages: int | None) -> None:
        self.rows, self.layer = rows, builder.layers[name]
        self.builder, self.impl = copy.copy(builder), copy.copy(builder.impls[name])
        self.builder.settings, self.builder.runner = None if pages is None else rows.settings, None
        self.builder.loaded = None
        self.builder.zones, self.builder.made = rows.zones, np.zeros(0, np.bool_)
        self.impl.sparse, self.impl.looked = pages is not None, True
        self.impl.counter, self.impl.group = Counts(), [self.impl]
        self.counts = self.impl.counter
        self.ranked: RankedIndex | None = None
        if pages is not None:
            self.impl.pages = pages
            if isinstance(self.impl.selector, PageSelector):
                self.impl.store = self.ranked = RankedIndex(self.impl.index_of(rows.cache))

    def check(self, step: TestStep, what: str) -> None:
        """ValueError where a step's output is not attention over the rows that the step names."""
        rows, served, before = self.rows, None, self.counts.sparse
        metadata = self.builder.build(0, step.common)
        out = adapters.attended(self.impl, self.layer, step.query, step.keys, step.values, rows.cache, metadata)
        if self.impl.sparse:
            served = getattr(metadata, "served", None)
            long = step.starts_of_long()
            if served is None or served.tokens.tolist() != long or self.counts.sparse != before + len(long):
                raise ValueError(f"a {what} step of {len(long)} long sequences does not serve them sparsely")
        named = self._named(step, served)
        off = (out.float() - rows.expected(step, named, self._groups(step, served))).abs().amax((1, 2))  # [T]
        allowed = torch.full_like(off, TOLERANCE[step.query.dtype])
        if self.builder.byte_floats == torch.float8_e4m3fn and self.builder.packing == "pairs":
            allowed.fill_(LOOSE)
            allowed[[] if served is None else served.tokens] = TOLERANCE[step.query.dtype]
        if not (off <= allowed).all():
            raise ValueError(
                f"a {what} step is off from attention over the rows that it names by {float(off.max()):.2g}"
            )

    def check_keys(self) -> None:
        """ValueError where the keys that an index is made of are not those that were written."""
        request, unit = self.rows.LONG[0], self.rows.zones.unit
        entries = torch.arange(self.rows.lengths[request] // unit)
        per = self.rows.block // unit
        places = self.rows.blocks[request, entries // per].long() * per + entries % per
        keys = self.rows.held().keys(places, unit).transpose(1, 2).flatten(0, 1)
        if not torch.equal(keys, self.rows.keys[request, : len(keys)]):
            raise ValueError("keys read from the cache are not those that vLLM wrote")

    def _named(self, step: TestStep, served: Any) -> list[Tensor]:
        """`[Hs,S]` for each new row, the rows that its queries read; -1 for none."""
        heads = self.rows.keys.shape[2]
        always = None if served is None else served.always.long()[:, None].expand(-1, heads, -1)
        chosen = None if served is None else self._chosen(served)
        named: list[Tensor] = []
        sparse = {} if served is None else {int(token): r for r, token in enumerate(served.tokens)}
        for request, at in zip(step.requests, step.rows, strict=True):
            for row in at.tolist():
                if always is not None and len(named) in sparse:
                    r = sparse[len(named)]
                    beside = self.rows.rows_at(request, always[r], row + 1, self.rows.zones.page)
                    if chosen is not None:
                        more = self.rows.rows_at(request, chosen[r], row + 1, self.impl.page)
                        beside = torch.cat([beside.repeat_interleave(len(more) // heads, 0), more], 1)
                    named.append(beside)
                else:
                    named.append(torch.arange(row + 1).expand(heads, -1))
        return named

    def _groups(self, step: TestStep, served: Any) -> list[Tensor] | None:
        """`[P,rows]` for each new row, the rows of the groups whose means stand for what it does not read."""
        if served is None or self.ranked is None or self.ranked.means is None:
            return None
        size, unit = self.ranked.means.rows, self.rows.zones.unit
        groups = [torch.zeros(0, size, dtype=torch.int64) for _ in step.query]
        new_rows = [(request, row) for request, at in zip(step.requests, step.rows, strict=True) for row in at.tolist()]
        for r, token in enumerate(served.tokens.tolist()):
            request, row = new_rows[token]
            entries = served.table[r][served.table[r] >= 0].long()[None]
            groups[token] = self.rows.rows_at(request, entries, row + 1, unit).view(-1, size)
        return groups

    def _chosen(self, served: Any) -> Tensor | None:
        """`[R,Hs,S]`: pages that a step chose, as places; -1 for none. None: it chooses nothing."""
        if self.ranked is None:
            return None
        top = self.ranked.chosen(self.impl.pages)  # [R,Hs,S]
        per = self.rows.zones.unit // self.impl.page
        entry = served.table.long()[:, None].expand(-1, top.shape[1], -1).gather(2, top.clamp(min=0) // per)
        return torch.where(top < 0, -1, entry * per + top % per)


class RankedIndex:
    """The index of a layer, whose scores are given as ranks: two pages with the same score would be chosen either way.

    Args:
        store: the index.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.means = store, store.means
        self.last = torch.empty(0)  # what the last step chose by
        self.ids: Tensor | None = None  # or what it chose

    def update_from(self, cache: BlockCache, places: Tensor, first: Tensor) -> None:
        self.store.update_from(cache, places, first)

    def scores(self, query: Tensor, table: Tensor) -> Tensor:
        scores = self.store.scores(query, table)
        ranks = scores.argsort(dim=-1, stable=True).argsort(-1).float()
        self.last = ranks.masked_fill(scores.isneginf(), -torch.inf)
        return self.last

    def attend(self, query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, count: int, scale: float) -> None:
        grouped = Store.grouped(query, cache, pages)
        if self.store.voted is None:
            scores = self.scores(grouped, pages.table)
            attend_blocks(query, out, cache, pages, scores, count, scale, means=self.means)
            return
        self.store.attend(query, out, cache, pages, count, scale)
        self.last = self.store.scores(grouped, pages.table)

    def best(self, query: Tensor, table: Tensor, count: int) -> Tensor:
        self.ids = self.store.best(query, table, count).long()
        return self.ids.int()

    def chosen(self, count: int) -> Tensor:
        """Return the pages that the last step chose, `[R,Hs,S]` int64."""
        return best(self.last, count) if self.ids is None else self.ids


class Counts:
    """Counts of a layer that nobody serves by."""

    def __init__(self) -> None:
        self.sparse = 0

    def add_step(self, layers: Any, counts: Any) -> None:
        self.sparse += int(counts[:, NAMES.index("sparse_steps")].sum())

    def add(self, layer: int, sparse_steps: int = 0, **others: int) -> None:
        self.sparse += sparse_steps
