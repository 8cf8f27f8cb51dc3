"""Which pages of an engine's cache a step may choose from, and which every query reads: tables, once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.serving.vllm.settings import Settings


def near_page(page: int, unit: int, packing: str) -> int:
    """Return the rows of a page of what every query reads: those of what a method chooses, or where it chooses single
    rows as many as lie in one line of memory (`attend_vllm_blocks.cpu_products`)."""
    if page > 1:
        return page
    return 32 if packing == "columns" and unit % 32 == 0 else 16


@dataclass(frozen=True, slots=True, eq=False)
class PageZones:
    """How the rows of sequences of any length lie: `sink | entries to choose from | recent`, in whole entries.

    Args:
        page: rows of a page that every query reads; pages to choose from have as many, or one.
        unit: rows of an entry of the index, a multiple of the page; a block of the engine holds whole entries.
        block: rows of a block.
        sink, window: first and last rows that every query reads.
    """

    page: int
    unit: int
    block: int
    sink: int
    window: int

    @property
    def first(self) -> int:
        """Entries of the sink."""
        return -(-self.sink // self.unit)

    @property
    def recent(self) -> int:
        """Pages behind the entries to choose from, at most."""
        return -(-(self.window + self.unit) // self.page)

    def sealed(self, rows: Tensor) -> Tensor:
        """`[R]`: entries of sequences of `rows` `[R]` rows before the window, the sink's among them."""
        return ((rows - self.window) // self.unit).clamp(min=self.first)

    def entries(self, rows: Tensor, blocks: Tensor, most: int) -> Tensor:
        """`[R,E]` int32: the entries to choose from, as places in the store; -1 behind a sequence's last.

        Args:
            rows: `[R]` of each sequence.
            blocks: `[R,M]` int32, the engine's block table.
            most: rows of the longest sequence, or more: the host's number, so that nothing waits for a device.
        """
        count = max((most - self.window) // self.unit - self.first, 0)
        entry = torch.arange(self.first, self.first + count, device=blocks.device)
        place = self._places(entry[None], blocks, self.unit)
        return torch.where(entry < self.sealed(rows)[:, None], place, -1)

    def always(self, rows: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Pages that every query reads, `[R,F]` int32 as places, -1 for none, and how many rows of the last of them
        there are, `[R]` int32."""
        per = self.unit // self.page
        start, pages = self.sealed(rows) * per, -(-rows // self.page)
        late = start[:, None] + torch.arange(self.recent, device=blocks.device)
        late = torch.where(late < pages[:, None], late, -1)
        early = torch.arange(self.first * per, device=blocks.device).expand(len(rows), -1)
        early = torch.where(early < pages[:, None], early, -1)
        page = torch.cat([early, late], 1)
        place = self._places(page.clamp(min=0), blocks, self.page)
        return torch.where(page < 0, -1, place), (rows - (pages - 1) * self.page).int()

    def _places(self, at: Tensor, blocks: Tensor, rows: int) -> Tensor:
        """Places in the store of the `at`-th `[1 or R,n]` stretches of so many rows, `[R,n]` int32."""
        per = self.block // rows
        at = at.expand(len(blocks), -1)
        block = blocks.gather(1, (at // per).clamp(max=blocks.shape[1] - 1))
        return (block * per + at % per).int()


def engine_zones(settings: Settings, page: int, unit: int, block: int, longest: int) -> PageZones:
    """Return the zones of an engine whose sequences have at most `longest` rows: tables are as wide as these."""
    return PageZones(page, unit, block, min(settings.sink, longest), min(settings.window, longest))
