"""What the layers of one step on CUDA share: which requests read sparsely, and their tables in tensors of fixed shape.

Two ways lead to the same tensors. `Eager` gathers the sparse requests of any batch, for steps that run without a CUDA
graph of attention. `FixedBuffers` fills buffers that keep their addresses and shapes, a line for every request that
there may be, for steps of one token a request that a graph replays; a line that is not sparse names no row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds
from sparseattn.serving.vllm.cuda_rows import finished
from sparseattn.serving.vllm.page_tables import PageZones


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The n requests of a step that may read sparsely.

    Args:
        queries: `[n]` int64, the row of each in the step's queries; None: request i is row i.
        sparse: `[n]` bool, which of them do; None: all.
        bounds: `sink | sealed | recent` of each, in rows; no row at all where it is not sparse.
        table: `[n,E]` int32, the entries to choose from, see `PageZones.entries`.
        blocks: `[n,M]` int32, the engine's block table.
        others: metadata by which vLLM's own attention serves the rest; None: there is no rest.
    """

    queries: Tensor | None
    sparse: Tensor | None
    bounds: Bounds
    table: Tensor
    blocks: Tensor
    others: Any


def decoding(common: Any, above: int) -> Tensor:
    """`[R]` bool on the host: requests that decode one token, past their prompt, of more than `above` rows.

    The host knows the lengths exactly, so that nothing waits for the device: with speculative decoding they would be
    bounds, and `engine_checks` refuses it.

    Raises:
        RuntimeError: metadata that does not say which requests are in their prompt.
    """
    prefilling, rows = common.is_prefilling, common.seq_lens_cpu_upper_bound
    if prefilling is None or rows is None:
        raise RuntimeError(
            "sparse decoding needs vLLM's is_prefilling and seq_lens_cpu_upper_bound of a step, got "
            f"{'neither' if prefilling is rows else 'one of them'}: this way of running vLLM is not supported"
        )
    # Of a batch that is padded for a graph, the newer of vLLM's runners tells `is_prefilling` without the padding.
    prefilling = torch.nn.functional.pad(prefilling, (0, len(rows) - len(prefilling)), value=True)
    return (common.query_start_loc_cpu.diff() == 1) & ~prefilling & (rows > above)


def zones_of(zones: PageZones, rows: Tensor) -> Bounds:
    """Return the zones of sequences of `rows` `[n]` rows, for `attend`; none of any where a sequence has no rows."""
    base = zones.first * zones.unit
    sealed = (zones.sealed(rows) * zones.unit).minimum(rows)
    return Bounds(rows.clamp(max=base).int(), base, sealed.int(), rows.int())


class Eager:
    """Any batch: the sparse requests are gathered, the others go to vLLM's attention as they are."""

    def __init__(self, zones: PageZones, indexed: bool = True) -> None:
        self.zones, self.indexed = zones, indexed

    def places(self, common: Any) -> Tensor | None:
        """Entries that this step finishes, `[n]` int64, and zeros; None: it finishes none."""
        if not self.indexed:
            return None
        ends, new = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu.diff()
        unit = self.zones.unit
        most = int((ends // unit - (ends - new) // unit).sum())
        return finished(common.slot_mapping[: common.num_actual_tokens], unit, most) if most else None

    def step(self, common: Any, metadata: Any, sparse: Tensor) -> Step | None:
        """Return the requests that are `sparse` `[R]`, bool on the host; None: there is none."""
        chosen = sparse.nonzero()[:, 0]
        if not len(chosen):
            return None
        most = int(common.seq_lens_cpu_upper_bound[chosen].max()) if self.indexed else 0
        device = metadata.seq_lens.device
        others = None
        if len(chosen) < common.num_reqs:
            others = replace(metadata, seq_lens=one_row(metadata.seq_lens, sparse.to(device)))
        chosen = chosen.to(device)
        rows, blocks = metadata.seq_lens[chosen], metadata.block_table[chosen]
        table = self.zones.entries(rows, blocks, most)
        queries = metadata.query_start_loc[chosen].long()
        return Step(queries, None, zones_of(self.zones, rows), table, blocks, others)


class FixedBuffers:
    """Steps of one token a request, in buffers for `requests` requests of `most` rows that are never replaced.

    A graph that was recorded of such a step reads the buffers of every later one: `fill` is called on the host before
    each replay, as the rest of vLLM's metadata is.
    """

    def __init__(self, zones: PageZones, requests: int, most: int, device: torch.device, indexed: bool = True) -> None:
        self.zones, self.indexed = zones, indexed
        self.most = most if indexed else 0
        none = torch.zeros(requests, dtype=torch.int32, device=device)
        self.sparse = none.bool()
        self.dense_rows = none.clone()  # of the requests as vLLM's attention shall see them
        self.bounds = Bounds(none.clone(), zones.first * zones.unit, none.clone(), none.clone())
        self.table = zones.entries(none, none[:, None], self.most)
        self.written = none.long()  # the entry in which each request's new row lies

    def fill(self, common: Any, metadata: Any, sparse: Tensor) -> tuple[Tensor | None, Step]:
        """Return the entries to compute anew, `[R]` int64 or None, and the step, for `sparse` `[R]` bool on the host.

        Of every request the entry of its new row is computed, finished or not: which are finished is data.

        Raises:
            RuntimeError: more requests than there are lines.
        """
        count = common.num_reqs
        if count > len(self.sparse):
            raise RuntimeError(f"a step has at most {len(self.sparse)} requests (max_num_seqs), got {count}")
        slots, lengths, blocks = common.slot_mapping[:count], metadata.seq_lens[:count], metadata.block_table[:count]
        self.written[:count] = torch.where(slots < 0, 0, slots // self.zones.unit)
        self.sparse[:count].copy_(sparse, non_blocking=True)
        is_sparse = self.sparse[:count]
        rows = torch.where(is_sparse, lengths, 0)
        zones = zones_of(self.zones, rows)
        for name in ("sink", "sealed", "rows"):
            getattr(self.bounds, name)[:count] = getattr(zones, name)
        self.table[:count] = self.zones.entries(rows, blocks, self.most)
        self.dense_rows[:count] = one_row(lengths, is_sparse)
        bounds = Bounds(self.bounds.sink[:count], zones.base, self.bounds.sealed[:count], self.bounds.rows[:count])
        others = replace(metadata, seq_lens=self.dense_rows[:count])
        step = Step(None, is_sparse, bounds, self.table[:count], blocks, others)
        return self.written[:count] if self.indexed else None, step


def reads(zones: PageZones, rows: Tensor, pages: int) -> int:
    """Rows that one KV head reads, over sequences of `rows` `[n]` rows and `pages` chosen pages each at most."""
    choice = (zones.sealed(rows) - zones.first) * zones.unit
    return int((rows - choice + choice.clamp(max=pages * zones.page)).sum())


def one_row(rows: Tensor, sparse: Tensor) -> Tensor:
    """Lengths by which vLLM's attention reads one row of a sparse request, whose output is then overwritten."""
    return torch.where(sparse, 1, rows)
