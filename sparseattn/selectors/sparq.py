"""SparQ: every row ranked by the few channels of its key in which the query is largest. https://arxiv.org/abs/2312.04985"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.base import Rows, check_least
from sparseattn.selectors.ranked import Ranked
from sparseattn.storage import RowBuffer


class SparQ(Ranked):
    """Reads the rows with the largest logits over the r channels in which the query group is largest.

    The channels are those with the largest sum of `|q|` over the group. A row's approximate logit is the query's
    product with them, divided by a temperature between `sqrt(r)` and `sqrt(D)`: `sqrt(D * sum|q_r| / sum|q|)`.

    Args:
        channels: r, all of them if there are fewer.
        group: how a query group votes for rows, see `vote`: "softmax" (default, the paper's), "sum" (its code's),
            "max"; "each": every query head chooses rows for itself, by the group's channels.

    The index is a second copy of the keys, channel by channel, so that r channels are read and no others: a row takes
    `D` numbers of the keys' dtype, half as much again as its key and value.

    Departures. The paper's last rows are among the k that are read; here sink and window come on top of the budget.

    `scan_bytes`: r numbers of every row.
    """

    knob = "channels"
    by_row = ("keys",)

    def __init__(self, channels: int = 16, group: str = "softmax") -> None:
        check_least(channels=(channels, 1))
        super().__init__(group)
        self.channels = channels
        self.keys = RowBuffer(3)  # [B,H,D,N], the keys by channel

    def append(self, rows: Rows) -> None:
        self.keys.append(rows.keys.mT)
        self.real.append(rows.positions >= 0)

    def logits(self, query: Tensor) -> Tensor:
        query, keys = query.float(), self.keys.visible
        batch, heads, group, size = query.shape
        channels = min(self.channels, size)
        length = query.abs()
        largest = length.sum(2).topk(channels).indices  # [B,H,r]
        first = torch.arange(batch * heads, device=query.device).view(batch, heads, 1) * size
        some = keys.flatten(0, 2).index_select(0, (first + largest).flatten())  # whole channels
        some = some.view(batch, heads, channels, -1)
        asked = query.gather(3, largest[:, :, None].expand(-1, -1, group, -1))  # [B,H,G,r]
        temperature = (size * asked.abs().sum(-1) / length.sum(-1).clamp(min=TINY)).clamp(min=TINY).sqrt()
        logits = (asked / temperature[..., None]) @ some.float()
        return logits.masked_fill_(~self.real.visible[:, None, None], -torch.inf)

    def read(self, scanned: Tensor, query: Tensor) -> Tensor:
        return scanned * (min(self.channels, query.shape[3]) * self.bytes_of(self.keys.full))


TINY = 1e-30  # of a query of zeros, whose logits are 0
