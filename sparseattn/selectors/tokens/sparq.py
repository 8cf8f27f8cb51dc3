"""SparQ: every row ranked by the few channels of its key in which the query is largest. https://arxiv.org/abs/2312.04985"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.selectors.abilities import HasTail
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.tokens.base import Ranked

TINY = 1e-30  # in place of a query without length, whose logits are 0


class SparQ(HasTail, Ranked):
    """Reads the rows with the largest logits over the r channels in which the query is largest; a mean for the others.

    The channels are those with the largest sum of `|q|` over the query group. A row's approximate logit is the product
    of query and key over them, divided by the temperature `sqrt(D * sum|q_r| / sum|q|)`, which lies between `sqrt(r)`
    and `sqrt(D)` for a query head alone. Rows that are not read are one row in their place, the mean of all sealed
    values, with the weight that their approximate logits give them.

    Args:
        channels: r, all of them if there are fewer.
        mean: whether the mean value is added; None (default): where a KV head has one query head, as the paper does,
            which left it out of models with more (Llama 3, Mistral).
        group: how a query group votes for rows, see `vote`: "softmax" (default, the paper's), "sum" (its code's),
            "max"; "each": every query head chooses rows for itself, by the group's channels.

    The index is a second copy of the keys, channel by channel, so that r channels are read and no others: a row takes
    `D` numbers of the keys' dtype, half as much again as its key and value.

    Departures. The paper weighs the mean value by the share of the approximate scores, over all rows, that rows not
    read have. Here rows read, sink and window keep their exact logits, and only those of the others are approximate.
    Its mean is over all values, here over sealed ones. Its last rows are among the k that are read; here sink and
    window come on top of the budget. In a layer of another scale its inverse stands for `sqrt(D)`
    (`LayerContext.scale`).

    `scan_bytes`: r numbers of every row. With the tail, logits of 4 bytes for each row and query head
    are held from one `select` to the next.
    """

    operators = 20
    knob = "channels"
    by_row = ("keys",)

    def __init__(self, channels: int = 16, mean: bool | None = None, group: str = "softmax") -> None:
        check_least(channels=(channels, 1))
        super().__init__(group)
        self.channels, self.mean = channels, mean
        self.keys = RowBuffer(3)  # [B,H,D,N], the keys by channel
        self.total = RowBuffer(2)  # [B,H,D] float32, the sum of the values
        self._logits: Tensor | None = None  # [B,H,G,N] float32, that `select` leaves to `tail`, no state

    def has(self, ability: type) -> bool:
        return super().has(ability) and (self.mean is not False or ability is not HasTail)

    def append(self, rows: Rows) -> None:
        self.keys.append(rows.keys.mT)
        if self.has(HasTail):
            real = rows.positions >= 0
            total = (rows.values * real[:, None, :, None]).sum(2, dtype=torch.float32)
            if self.total.rows:
                self.total.data.add_(total)
            else:
                self.total.capacity = total.shape[2]
                self.total.append(total)

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        largest, parts = largest_channels(query, self.channels, self.temperature(query.shape[3]))
        logits = parts @ whole_channels(self.keys.visible, largest).float()
        logits = logits.masked_fill_(~valid[:, None, None], -torch.inf)
        if self._adds(query):
            self._logits = logits
        return logits

    def reads(self, query: Tensor) -> tuple[int, int]:
        return min(self.channels, query.shape[3]) * self.bytes_of(query), 0

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        return products(query, sealed, min(self.channels, query.shape[3]))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = super().scan(query, sealed, budget)
        return replace(scan, tail=1) if self._adds(query) else scan

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        logits = self._logits
        if logits is None:
            return None
        read = selection.mask(logits.shape[3]).unflatten(1, (logits.shape[1], -1))  # [B,H,G or 1,N]
        left = logits.masked_fill(read, -torch.inf).logsumexp(3).flatten(1)[..., None]  # [B,H*G,1]
        count = step.valid.sum(-1)[:, None, None]  # [B,1,1]
        mean = (self.total.visible / count.clamp(min=1))[:, :, None].to(query.dtype)  # [B,H,1,D]
        none = left.isneginf()
        ids = torch.where(none, -1, 0)
        return Tail(torch.zeros_like(mean), mean, Selection.tokens(ids, bias=left.masked_fill(none, 0.0)))

    def _adds(self, query: Tensor) -> bool:
        """Whether the mean value is added for queries `[B,H,G,D]`."""
        return query.shape[2] == 1 if self.mean is None else self.mean


def largest_channels(query: Tensor, channels: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the r channels in which a query group is largest, all of them if there are fewer, and the queries over
    them.

    Args:
        query: `[B,H,G,D]`.
        temperature: what products over all channels are divided by.

    Returns:
        `[B,H,r]` int64; `[B,H,G,r]` float32, divided by the temperature times `sqrt(sum|q_r| / sum|q|)`.
    """
    query = query.float()
    length = query.abs()
    largest = length.sum(2).topk(min(channels, query.shape[3])).indices
    parts = query.gather(3, largest[:, :, None].expand(-1, -1, query.shape[2], -1))
    share = parts.abs().sum(-1) / length.sum(-1).clamp(min=TINY)
    return largest, parts / (temperature * share.clamp(min=TINY).sqrt())[..., None]


def whole_channels(keys: Tensor, which: Tensor) -> Tensor:
    """`[B,H,r,N]`, a copy: the channels `which` `[B,H,r]` of `keys` `[B,H,C,N]`."""
    batch, heads, channels, _ = keys.shape
    first = torch.arange(batch * heads, device=keys.device).view(batch, heads, 1) * channels
    return keys.flatten(0, 2).index_select(0, (first + which).flatten()).view(*which.shape, -1)
