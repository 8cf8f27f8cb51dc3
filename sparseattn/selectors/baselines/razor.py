"""RazorAttention's local heads: the newest rows, and one compensation row for all that are not read.

https://arxiv.org/abs/2407.15891
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.selectors.abilities import HasTail
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.baselines.recent import Recent


class RazorAttention(HasTail, Recent):
    """Reads the newest sealed rows up to the budget, and a row that stands for all older ones.

    The compensation row has their mean key and their mean value, and as bias the logarithm of their number: attention
    to n rows of one key and one value. Nothing is read to choose.

    Args:
        page: rows of a slot, a power of two; the cache seals whole pages, and a budget is cut to them.

    These are the paper's heads that do not retrieve. Its retrieval heads read every row: `roles.papers.razor` makes
    such roles from scores of heads, and `roles.papers.echo_and_induction` has the paper's scores. The paper keeps the
    newest fifth of the rows, 4,000 at least, and 4 of the sink: the budget, and the cache's window and sink. Departure:
    rows are not freed, so that a budget may grow; hence sums of keys and values up to every page are kept, which are
    `8 D / page` bytes a row, of which a step reads one.

    `scan_bytes`: 0; the compensation row counts as attended.
    """

    def __init__(self, page: int = 16) -> None:
        super().__init__(page)
        self.keys, self.values = RowBuffer(2, spare=0.0), RowBuffer(2, spare=0.0)  # [B,H,P,D] float32, of all up to it
        self.count = RowBuffer(1, spare=0)  # [B,P] int32, real rows up to a page's end

    def fix(self, rows: int, seal: int) -> None:
        for buffer in (self.keys, self.values, self.count):
            buffer.fix(rows // self.page)

    def append(self, rows: Rows) -> None:
        real = rows.positions >= 0
        for buffer, part in ((self.keys, rows.keys), (self.values, rows.values)):
            masked = part.float().masked_fill(~real[:, None, :, None], 0.0)
            sums = masked.unflatten(2, (-1, self.page)).sum(3).cumsum(2)
            buffer.append(sums + buffer.data[:, :, -1:] if buffer.rows else sums)
        count = real.unflatten(1, (-1, self.page)).sum(2).cumsum(1)
        self.count.append((count + self.count.data[:, -1:] if self.count.rows else count).int())

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = super().scan(query, sealed, budget)
        assert isinstance(scan, Scan)
        left = sealed // self.page * self.page > scan.rows
        launches = (*scan.launches, Launch("operator", count=14))
        return Scan(0, 0, launches, scan.lists, scan.rows, scan.runs, tail=int(left))

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail:
        pages = self.count.visible.shape[1]
        used = selection.length > 0
        first = torch.where(used, selection.start, pages * self.page)[:, 0].amin(1).long() // self.page  # [B]
        last = (first - 1).clamp(min=0)  # the newest page that is not read, where there is one
        count = torch.where(first > 0, self.count.visible.gather(1, last[:, None])[:, 0], 0)
        place = last[:, None, None, None].expand(-1, *self.keys.visible.shape[1:2], 1, self.keys.visible.shape[3])
        many = count.clamp(min=1)[:, None, None, None]
        keys, values = ((part.visible.gather(2, place) / many).to(query.dtype) for part in (self.keys, self.values))
        ids = torch.where(count > 0, 0, -1)[:, None, None].expand(-1, query.shape[1], 1)
        bias = count.clamp(min=1).float().log()[:, None, None].expand(-1, query.shape[1], 1)
        return Tail(keys, values, Selection.tokens(ids, bias=bias))
