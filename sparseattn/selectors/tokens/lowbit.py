"""Every row ranked by its key in one, two or four bits, stored by channel as KIVI stores keys. Ours.

KIVI, https://arxiv.org/abs/2402.02750; FIER, https://arxiv.org/abs/2508.08256, ranks by one bit (`Fier`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Launch, Scan, picked
from sparseattn.kernels.encode_keys.dispatch import extremes, packed_codes
from sparseattn.kernels.encode_keys.levels import levels_of_8_bits, levels_of_16_bits
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys import level_grid, packing
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_rows
from sparseattn.selectors.abilities import ChoosesAtOnce, RanksListed
from sparseattn.selectors.base import Rows, Selector, StepContext, vote
from sparseattn.selectors.checks import half
from sparseattn.selectors.pages.base import Entries, PageSelector

BITS = (1, 2, 4)


class LowBit(ChoosesAtOnce, RanksListed, PageSelector):
    """Reads the rows whose keys, rounded to a few bits a channel, have the largest product with the query.

    Args:
        bits: 1, 2 (default) or 4 of a channel of a row.
        rows: a group that shares levels, a multiple of 16. Rows that wait for a full one are read densely.
        page: choose pages of so many rows by the sum of their rows' weights, a power of two that divides `rows`; 1
            (default): single rows.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.
        scales: bits of a level, 16 (default) or 8. With 8, levels are on a grid of each channel, which grows as keys
            do, see `kernels.quantized_keys.level_grid`.

    Two bits and four: levels in the middle of 4 or 16 equal parts of what a channel's numbers in the group reach over,
    so that a number is at most half a step off, and a logit at most `sum_i |q_i| step_i / (2 sqrt(D))`; where numba
    scores, the query is rounded too (`kernels.quantized_keys.dispatch.logits`). One bit: the means of the numbers below
    and above the middle, without such a bound. An index row takes `bits * D / 8` bytes and its share of the levels,
    `scales D / (4 rows)` (two numbers a channel): at D = 64, 20 bytes where Quest's bounds (page 16, bfloat16) take 16.

    The bound holds for levels of 8 bits as they are read, too, until keys come that do not fit a channel's grid: then
    the levels that are stored are rounded anew, at most by a few units of the new grid.

    `scan_bytes`: the codes and levels of every row, and the grid.
    """

    operators = 10
    entry_names = ("codes", "low", "step")
    codes: RowBuffer  # [B,H,N/rows,rows*4W] uint8, see `kernels.quantized_keys.packing`
    low: RowBuffer  # [B,H,N/rows,D], of 16 bits; with 8 int8, and the step uint8
    step: RowBuffer
    _coded: QuantizedKeys | None = None  # every row, as `chosen_by` said last

    def __init__(self, bits: int = 2, rows: int = 64, page: int = 1, group: str = "softmax", scales: int = 16) -> None:
        if bits not in BITS:
            raise ValueError(f"bits is one of {', '.join(map(str, BITS))}, got {bits}")
        if rows < packing.TILE or rows % packing.TILE:
            raise ValueError(f"rows of a group are a multiple of {packing.TILE}, got {rows}")
        if page < 1 or page & (page - 1) or rows % page:
            raise ValueError(f"a page is a power of two rows that divides a group's {rows}, or 1, got {page}")
        if scales not in (8, 16):
            raise ValueError(f"scales is 8 or 16 bits of a level, got {scales}")
        super().__init__(page, group)
        self.bits, self.rows, self.scales = bits, rows, scales
        self.mass = page > 1
        self.grid = RowBuffer(
            2, level_grid.NUMBERS
        )  # [B,H,3,D] float32, of levels of 8 bits, see `kernels.quantized_keys.level_grid`

    @property
    def unit(self) -> int:
        return self.rows

    @property
    def levels(self) -> str:
        """See `kernels.encode_keys.reference.quantise`."""
        return "bins" if self.bits > 1 else "means"

    def fix(self, rows: int, seal: int) -> None:
        for name in self.entry_names:
            getattr(self, name).fix(rows // self.rows)
        self.grid.fix()

    def to(self, device: torch.device | str) -> None:
        stored = self.codes.full if self.codes.allocated else None
        super().to(device)
        if stored is not None and packing.tile(stored.device) != packing.tile(self.codes.full.device):
            codes = self.codes.full
            codes.copy_(packing.repack(stored, self.bits, self.low.full.shape[-1], codes.device))

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        ends = extremes(keys, self.rows, self.levels)
        if self.scales == 16:
            low, step = levels_of_16_bits(*ends, self.bits, self.levels, half(keys))
        else:
            low, step = self._on_grid(*ends)
        return {
            "codes": packed_codes(keys, low, step, self.bits, self.levels_grid),
            "low": low,
            "step": step,
        }

    def valid_entries(self, valid: Tensor) -> Tensor:
        return valid  # its kernels take rows

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        return quantized_keys.scores(query, self._index(entries, real), self.group, self.page)

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        return quantized_keys.scores_at(query, self._index(store), table, self.group, self.page)

    def why_not_shared(self) -> str | None:
        return "its 8-bit levels are on a grid of a whole sequence" if self.scales == 8 else None

    def why_not_compared(self) -> str | None:
        return "its 8-bit levels are on a grid of a whole sequence" if self.scales == 8 else None

    check_state = Selector.check_state  # not kept in files

    def _index(self, entries: Entries, real: Tensor | None = None) -> QuantizedKeys:
        return QuantizedKeys(entries["codes"], entries["low"], entries["step"], self.bits, real, self.levels_grid)

    def index(self, valid: Tensor) -> QuantizedKeys:
        """Return every row that is stored; `valid` `[B,N]` bool says which are no padding."""
        return self._index(self._entries(), valid)

    def _on_grid(self, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Levels of 8 bits; where they do not fit, the grid grows, and those stored before are rounded to it."""
        before = self.levels_grid
        low, step, grid = levels_of_8_bits(least, most, self.bits, self.levels, before)
        if before is None:
            self.grid.append(grid)
        elif not torch.equal(before, grid):
            if self.low.rows:
                stored = level_grid.regrid(self.low.data, self.step.data, before, grid, self.bits)
                for buffer, levels in zip((self.low, self.step), stored, strict=True):
                    buffer.data.copy_(levels)
            before.copy_(grid)
        return low, step

    @property
    def levels_grid(self) -> Tensor | None:
        """The grid of levels of 8 bits; None with 16, and before the first row."""
        return self.grid.data if self.grid.rows else None

    def levels_bytes(self, groups: Tensor, size: int) -> Tensor:
        """Return the bytes of the levels of so many groups of `size` channels, and of the grid that they are on."""
        read = groups * (self.scales // 4 * size)
        return read if self.scales == 16 else read + (groups > 0) * (4 * level_grid.NUMBERS * size)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        batch, heads, members, size = query.shape
        codes, every = sealed * 4 * packing.words(size, self.bits), batch * heads
        read = codes + int(self.levels_bytes(torch.tensor(sealed // self.rows), size))
        best, lists = min(budget, sealed) // self.page, heads * members if self.group == "each" else heads
        work = picked(batch * lists, sealed // self.page, best)
        scoring = Launch("codes", every * read, 2.0 * every * sealed * members * size, work)
        launches = (scoring, Launch("operator", count=self.operators))
        return Scan(sealed, read, launches, lists, best * self.page, best)

    def stored_rows(self) -> int:
        return self.codes.rows * self.rows

    def append(self, rows: Rows) -> None:
        self._coded = None  # storage may be replaced
        super().append(rows)

    def extend(self, keys: Tensor) -> None:
        self._coded = None
        for name, part in self.entries(keys).items():
            getattr(self, name).append(part)

    def best_listed(self, query: Tensor, valid: Tensor, pages: Tensor, page: int, count: int) -> tuple[Tensor, Tensor]:
        ids, groups = quantized_keys.best_listed(query, self.index(valid), self.group, pages, page, count)
        return ids, self.levels_bytes(groups, query.shape[3])

    def row_bytes(self, size: int) -> int:
        return 4 * packing.words(size, self.bits)

    def bytes_beside(self, size: int, sealed: int, rows: float, spans: float) -> float:
        touched = 1 - (1 - rows / sealed) ** max(self.rows * spans / rows, 1.0) if rows else 0.0
        return float(self.levels_bytes(torch.tensor(sealed // self.rows * touched), size))

    def listed_launches(self, query: Tensor, rows: float, few: float, lists: int) -> tuple[Launch, ...]:
        batch, size = query.shape[0], query.shape[3]
        work = picked(batch * lists, rows, few)
        return (Launch("listed", flops=2.0 * query.shape[:3].numel() * rows * size, entries=work),)

    def forget(self, first: int) -> None:
        self._coded = None
        for buffer in (self.codes, self.low, self.step):
            buffer.resize(first // self.rows)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        ids = quantized_keys.best(query, self.index(step.valid), self.group, budget // self.page, self.page)
        return Selection.pages(ids, self.page)

    def chosen_by(self, valid: Tensor, size: int) -> QuantizedKeys | None:
        own = all(getattr(type(self), name) is getattr(LowBit, name) for name in ("select", "index", "_index"))
        if self.page > 1 or self.group != "softmax" or self.fixed_for_cache or not own:
            return None
        if self._coded is None or self._coded.valid is not valid:
            self._coded = self.index(valid)
        return self._coded

    def _forget_views(self) -> None:
        super()._forget_views()
        self._coded = None

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        logits = self.page_logits(self.scaled(query), self._entries(), step.valid)
        selection = Selection.pages(best_rows(vote(logits, self.group), budget // self.page), self.page)
        return Weighed.of(selection, self.fitted(logits), self.page)

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return super().head_scores(self.scaled(query), step)

    def scaled(self, query: Tensor) -> Tensor:
        """Return `query` for kernels that divide products by `sqrt(head_dim)`, in a layer of another scale."""
        size = query.shape[3]
        return query if self.layer_context.scale is None else query * (size**0.5 / self.temperature(size))
