"""Every row ranked by its key in one, two or four bits, stored by channel as KIVI stores keys. Ours.

KIVI, https://arxiv.org/abs/2402.02750; FIER, https://arxiv.org/abs/2508.08256, ranks by one bit (`Fier`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import lowbit
from sparseattn.selection import Selection
from sparseattn.selectors.base import Rows, Selector, check_group, half
from sparseattn.storage import RowBuffer

BITS = (1, 2, 4)


class LowBit(Selector):
    """Reads the rows whose keys, rounded to a few bits a channel, have the largest product with the query.

    Args:
        bits: 1, 2 (default) or 4 of a channel of a row.
        rows: a group that shares levels, a multiple of 16. Rows that wait for a full one are read densely.
        page: choose pages of so many rows by the sum of their rows' weights, a power of two that divides `rows`; 1
            (default): single rows.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.

    Two bits and four: levels in the middle of 4 or 16 equal parts of what a channel's numbers in the group reach over,
    so that a number is at most half a step off, and a logit at most `sum_i |q_i| step_i / (2 sqrt(D))`; where numba
    scores, the query is rounded too (`kernels.lowbit.logits`). One bit: the means of the numbers below and above the
    middle, without such a bound. An index row takes `bits * D / 8` bytes
    and its share of the levels, `4 D / rows` (two numbers of 16 bits a channel): at D = 64, 20 bytes where Quest's
    bounds (page 16, bfloat16) take 16.

    `scan_bytes`: the codes and levels of every row.
    """

    def __init__(self, bits: int = 2, rows: int = 64, page: int = 1, group: str = "softmax") -> None:
        if bits not in BITS:
            raise ValueError(f"bits is one of {', '.join(map(str, BITS))}, got {bits}")
        if rows < lowbit.TILE or rows % lowbit.TILE:
            raise ValueError(f"rows of a group are a multiple of {lowbit.TILE}, got {rows}")
        if page < 1 or page & (page - 1) or rows % page:
            raise ValueError(f"a page is a power of two rows that divides a group's {rows}, or 1, got {page}")
        self.bits, self.rows, self.page, self.group = bits, rows, page, check_group(group)
        self.span = page
        self.codes = RowBuffer(2)  # [B,H,N/rows,rows*4W] uint8, see `kernels.lowbit`
        self.low = RowBuffer(2)  # [B,H,N/rows,D], 16 bits
        self.step = RowBuffer(2)
        self.real = RowBuffer(1, spare=False)  # [B,N] bool, not padding

    @property
    def unit(self) -> int:
        return self.rows

    @property
    def levels(self) -> str:
        """See `kernels.lowbit.quantise`."""
        return "bins" if self.bits > 1 else "means"

    def fix(self, rows: int, seal: int) -> None:
        for buffer in (self.codes, self.low, self.step):
            buffer.fix(rows // self.rows)
        self.real.fix(rows)

    def to(self, device: torch.device | str) -> None:
        held = self.codes.full if self.codes.allocated else None
        super().to(device)
        if held is not None and lowbit.tile(held.device) != lowbit.tile(self.codes.full.device):
            codes = self.codes.full
            codes.copy_(lowbit.moved(held, self.bits, self.low.full.shape[-1], codes.device))

    def append(self, rows: Rows) -> None:
        codes, low, step = lowbit.encode(rows.keys, self.rows, self.bits, self.levels, half(rows.keys))
        self.codes.append(codes)
        self.low.append(low)
        self.step.append(step)
        self.real.append(rows.positions >= 0)

    def keep(self, first: int) -> None:
        """Forgets the rows from `first` on, a multiple of a group's."""
        for buffer in (self.codes, self.low, self.step):
            buffer.resize(first // self.rows, buffer.full)
        self.real.resize(first, self.real.full)

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        batch, heads, group, size = query.shape
        if not self.real.rows:
            return Selection.none(batch, heads, query.device)
        real = self.real.visible
        index = self.codes.visible, self.low.visible, self.step.visible
        scanned = real.sum(-1)[:, None]  # [B,1]
        chosen = heads * group if self.group == "each" else heads
        read = scanned * lowbit.words(size, self.bits) * 4 + scanned // self.rows * 4 * size
        costs = scanned.expand(-1, chosen), read.expand(-1, heads)
        ids = lowbit.best(query, *index, real, self.bits, self.group, budget // self.page, self.page)
        return Selection.pages(ids, self.page, *costs)
