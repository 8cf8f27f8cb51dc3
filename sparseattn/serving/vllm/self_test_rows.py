"""Random rows of a few sequences in a small cache as vLLM writes them, and steps that add to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.serving.vllm import adapters
from sparseattn.serving.vllm.block_packing import read_as
from sparseattn.serving.vllm.page_tables import PageZones
from sparseattn.serving.vllm.settings import Settings

STEPS = 2
SHORT = 7  # rows of a sequence that is dense
LOGITS = 2.0  # standard deviation of logits: single rows matter
UNUSED = 9.0  # what the cache holds where nothing was written


@dataclass(frozen=True, eq=False)
class TestStep:
    """New rows of some sequences.

    Args:
        requests: their numbers.
        rows: of each, `[n]` int64, its new rows, counted from its first.
        query, keys, values: `[T,H*G,D]` and `[T,H,D]`, of all new rows.
        common: vLLM's description.
    """

    requests: list[int]
    rows: list[Tensor]
    query: Tensor
    keys: Tensor
    values: Tensor
    common: Any

    def starts_of_long(self) -> list[int]:
        """Where among the new rows those of the long sequences begin."""
        starts = torch.tensor([0, *map(len, self.rows)]).cumsum(0).tolist()
        return [start for request, start in zip(self.requests, starts, strict=False) if request in TestRows.LONG]


class TestRows:
    """Sequences: two that are long enough to be decoded sparsely, one that is short, and one that is a prompt.

    Args:
        builder: of the engine, by which the cache has its layout.
        layer: of the engine, which packs rows.
        settings: by which the steps are served.
        lengths: rows that each sequence has before the first step.
    """

    LONG, PROMPT = (0, 3), 2
    CHUNK = 5  # rows of the prompt in a step

    def __init__(self, builder: Any, layer: Any, settings: Settings, lengths: list[int]) -> None:
        self.settings, self.lengths, self.layer, self.block = settings, lengths, layer, builder.block
        zones = builder.zones
        self.zones = PageZones(zones.page, zones.unit, self.block, zones.sink, zones.window)
        draw = torch.Generator().manual_seed(0)
        heads, size, most = builder.num_kv_heads, builder.head_dim, max(lengths) + STEPS * self.CHUNK

        def random(heads: int, factor: float = 1.0) -> Tensor:
            return (torch.randn(len(lengths), most, heads, size, generator=draw) * factor).to(builder.dtype)

        self.keys, self.values = random(heads), random(heads)
        self.query = random(builder.num_heads, LOGITS / layer.impl.scale / size**0.5)
        each = -(-most // self.block)
        free = torch.randperm(len(lengths) * each, generator=draw).int() + 1  # block 0 is vLLM's null block
        self.blocks = free.view(len(lengths), each)
        self.reading = builder.packing, builder.dtype, builder.byte_floats
        unused = torch.full((len(free) + 1, heads, self.block, 2 * size), UNUSED)
        self.cache = unused.to(builder.dtype if builder.byte_floats is None else builder.byte_floats)
        if builder.byte_floats is not None:
            self.cache = self.cache.view(torch.uint8)
        for request, count in enumerate(lengths):
            self._write([(request, torch.arange(count))])

    @classmethod
    def drawn(cls, builder: Any, layer: Any) -> TestRows:
        """Return rows for a layer, by the settings of its engine with a small sink and window."""
        unit, given = layer.impl.unit, builder.settings
        sink, window = min(given.sink, unit), min(given.window, unit)
        always_read = -(-sink // unit) * unit + window
        settings = replace(given, sink=sink, window=window, above=max(always_read, 2 * SHORT))
        return cls(builder, layer, settings, [always_read + 6 * unit + 5, SHORT, 2, always_read + 4 * unit + SHORT])

    def step(self, number: int, mixed: bool) -> TestStep:
        """Return the `number`-th step, of the long sequences alone or `mixed` with the others. Its rows are written."""
        requests = [*range(len(self.lengths))] if mixed else [*self.LONG]
        spans = []
        for request in requests:
            count = self.CHUNK if request == self.PROMPT else 1
            spans.append((request, self.lengths[request] + torch.arange(number * count, (number + 1) * count)))
        keys, values, slots = self._write(spans)
        query = torch.cat([self.query[request, rows] for request, rows in spans])
        counts = torch.tensor([0, *(len(rows) for _, rows in spans)])
        ends = torch.tensor([int(rows[-1]) + 1 for _, rows in spans]).int()
        prompt = torch.tensor([request == self.PROMPT for request in requests])
        common = adapters.step(counts.cumsum(0).int(), ends, self.blocks[requests], slots, prompt)
        return TestStep(requests, [rows for _, rows in spans], query, keys, values, common)

    def expected(self, step: TestStep, named: list[Tensor], groups: list[Tensor] | None = None) -> Tensor:
        """Return `[T,H*G,D]` float32: attention of each new row over the rows that it names, `[Hs,S]`, -1 for none.

        Args:
            step: of the new rows.
            named: of each.
            groups: of each the rows `[P,rows]` for whose unnamed ones their means stand in; None: nothing does.
        """
        each = zip(step.requests, step.rows, strict=True)
        request = [request for request, rows in each for _ in rows]
        heads, most = max(len(rows) for rows in named), max(rows.shape[1] for rows in named)
        ids = torch.full((len(named), heads, most), -1)
        for own, rows in zip(ids, named, strict=True):
            own[:, : rows.shape[1]] = rows if len(rows) == heads else rows.repeat_interleave(heads // len(rows), 0)
        query = step.query.float().unflatten(1, (self.keys.shape[2], -1))
        keys, values = (part[request].transpose(1, 2).float() for part in (self.keys, self.values))
        selection = Selection.tokens(ids)
        if groups is not None:
            keys, values, selection = _with_means(keys, values, ids, groups)
        out, _ = attend(query, keys, values, selection, scale=self.layer.impl.scale, impl="reference")
        return out.flatten(1, 2)

    def rows_at(self, request: int, places: Tensor, count: int, page: int) -> Tensor:
        """Return the rows of a sequence of `count` rows in the pages `places` `[Hs,S]` of `page` rows; -1 for none,
        `[Hs,S*page]`."""
        per = self.block // page
        number = torch.full((len(self.cache),), -1)
        number[self.blocks[request].long()] = torch.arange(self.blocks.shape[1])
        block = number[places.clamp(min=0) // per]
        first = block * self.block + places % per * page
        rows = first[..., None] + torch.arange(page)
        return torch.where((places < 0)[..., None] | (rows >= count), -1, rows).flatten(-2)

    def held(self) -> BlockCache:
        """Return the cache as it is read."""
        return read_as(self.layer, self.cache, *self.reading)

    def _write(self, spans: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Let vLLM write rows of sequences; return keys and values `[T,H,D]` and where they lie, `[T]` int64."""
        keys, values = (torch.cat([part[r, rows] for r, rows in spans]) for part in (self.keys, self.values))
        slots = torch.cat([self._slots(r, rows) for r, rows in spans])
        adapters.write(self.layer, keys, values, self.cache, slots)
        if self.cache.dtype == torch.uint8:
            self._take_rounded(spans)
        return keys, values, slots

    def _take_rounded(self, spans: list[tuple[int, Tensor]]) -> None:
        """Replace rows by what the cache holds of them, of which vLLM cuts off the bits that do not fit.

        Raises:
            ValueError: what is read is further off than that.
        """
        cache = self.held()
        near, least = (0.125, 2.0**-9) if cache.packed.dtype == torch.float8_e4m3fn else (0.25, 2.0**-16)
        most = torch.finfo(cache.packed.dtype).max
        for request, rows in spans:
            blocks = self.blocks[request].long()
            parts = (self.keys, cache.keys, cache.key_scale), (self.values, cache.values, cache.value_scale)
            for part, read, scale in parts:
                held = read(blocks, self.block).transpose(1, 2).flatten(0, 1)[rows]  # [n,H,D]
                written = part[request, rows].float().clamp(-most * scale, most * scale)
                if not torch.allclose(held.float(), written, rtol=near + 2**-8, atol=least * scale):
                    raise ValueError("numbers read from a cache of 8 bits are not those that vLLM wrote")
                part[request, rows] = held

    def _slots(self, request: int, rows: Tensor) -> Tensor:
        """`[n]` int64: where rows of a sequence lie in the cache."""
        return self.blocks[request, rows // self.block].long() * self.block + rows % self.block


def _with_means(keys: Tensor, values: Tensor, ids: Tensor, groups: list[Tensor]) -> tuple[Tensor, Tensor, Selection]:
    """Return rows `[T,H,N,D]` with the means of groups behind them, and which of both each head attends to.

    Args:
        keys, values: `[T,H,N,D]`.
        ids: `[T,Hs,S]`, rows that are read, -1 for none.
        groups: of each of T the rows `[P,rows]` of its groups.
    """
    batch, heads, count, _ = keys.shape
    most = max(len(rows) for rows in groups)
    bias = torch.full((batch, ids.shape[1], most), -torch.inf)
    means = torch.zeros(2, batch, heads, most, keys.shape[3])
    for token, rows in enumerate(groups):
        read = torch.zeros(ids.shape[1], count + 1, dtype=torch.int64)
        read.scatter_(1, torch.where(ids[token] < 0, count, ids[token]), 1)
        left = rows.shape[1] - read[:, rows.flatten()].view(len(read), *rows.shape).sum(2)
        bias[token, :, : len(rows)] = left.float().log()
        for mean, part in zip(means, (keys, values), strict=True):
            mean[token, :, : len(rows)] = part[token][:, rows].mean(2)
    own = torch.arange(count, count + most).expand(*ids.shape[:2], -1)
    every = torch.cat([ids, torch.where(bias.isneginf(), -1, own)], 2)
    both = torch.cat([torch.zeros(ids.shape), torch.where(bias.isneginf(), 0, bias)], 2)
    keys, values = (torch.cat([part, mean], 2) for part, mean in zip((keys, values), means, strict=True))
    return keys, values, Selection.tokens(every, bias=both)
