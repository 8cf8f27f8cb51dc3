"""Adamas: every row ranked by how far its turned key lies from the query, in codes of two bits a channel.

https://arxiv.org/abs/2510.18413
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.hadamard import walsh_hadamard
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.kernels import codebooks
from sparseattn.selectors.base import Rows, Selector, StepContext, vote

GROUPS = ("each", "sum", "max")
BITS = 2
CHANNELS = 8 // BITS  # of a byte
SHARE = 0.5  # of the keys' root mean square, see the log of 2026-11-25


class Adamas(Selector):
    """Reads the rows whose codes have the smallest Manhattan distance from the query's code.

    Queries and keys are turned by a Hadamard transform that keeps products, so that no channel is much larger than the
    others. A channel's code says where its number lies: up to `-threshold`, up to 0, up to `threshold`, or above it.

    Args:
        threshold: what divides small numbers from large ones; 0 (default): half of the root mean square of the first
            keys that are sealed, the prompt's, for each KV head. 10 in the paper's code.
        group: "each" (default, its code's): every query head chooses for itself; "sum", "max": a KV head chooses once,
            by the sum of its query heads' distances or by the smallest of them.

    An index row takes `D / 4` bytes. A head size that is no power of two, or below four, is filled up with zeros to the
    next one, and D is that size.

    Departures, from the paper's code (FibonaccciYan/Adamas). Its threshold suits its models: in SmolLM2's keys one
    number in 100,000 exceeds 10, so that codes are signs alone. Of rows as far as the last one that is read the newest
    are read, which it leaves open. Its CUDA kernel sums the bits in which codes differ, by their weight: codes 1 and 2
    are three apart there. Its evaluation in Python takes the distance, as here. It leaves layers 0 and 1 dense, which
    the caller chooses here; sink and window are the cache's.

    `scan_bytes`: the code of every row.

    Raises:
        ValueError: a threshold below 0, or a group that is none of these.
    """

    operators = 24

    def __init__(self, threshold: float = 0.0, group: str = "each") -> None:
        if not 0 <= threshold < math.inf:
            raise ValueError(f"threshold is a number above 0, or 0 (by the prompt's keys), got {threshold}")
        if group not in GROUPS:
            raise ValueError(f"group is one of {', '.join(GROUPS)}, got {group!r}")
        self.threshold, self.group = float(threshold), group
        self.codes = RowBuffer(2, spare=0)  # [B,H,N,D/4] uint8, the first channel in the lowest bits
        self.edge = RowBuffer(1)  # [B,1,H] float32, each KV head's threshold; 0 before its first row

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink; the token of the step is on top of the
        budget."""
        return {"selector": cls(10.0), "sink": 0, "window": 1, "seal": 1}

    def fix(self, rows: int, seal: int) -> None:
        self.codes.fix(rows)
        self.edge.fix()

    def append(self, rows: Rows) -> None:
        if not self.edge.rows:
            self.edge.append(rows.keys.new_full((len(rows.keys), 1, rows.keys.shape[1]), 0.0, dtype=torch.float32))
        fresh = self.edge.data == 0
        if bool(fresh.any()):
            self.edge.data.copy_(torch.where(fresh, self._edges(rows)[:, None], self.edge.data))
        self.codes.append(_packed(self._levels(rows.keys)))

    def _edges(self, rows: Rows) -> Tensor:
        """`[B,H]` float32: the thresholds of sequences whose first rows these are; 0 where there is none."""
        real = (rows.positions >= 0)[:, None, :, None]
        count = (real.sum(2) * rows.keys.shape[3])[..., 0].float()  # [B,1]
        if self.threshold:
            return self.threshold * (count > 0).expand(rows.keys.shape[:2])
        square = rows.keys.float().square().masked_fill(~real, 0.0).sum((2, 3))
        return SHARE * (square / count.clamp(min=1)).sqrt()

    def _levels(self, x: Tensor) -> Tensor:
        """`[B,H,..,D]` uint8, 0 to 3: the codes of keys or queries `[B,H,..,D]`."""
        size = _padded(x.shape[-1])
        filled = torch.nn.functional.pad(x.float(), (0, size - x.shape[-1]))
        # The edge is turned instead of the numbers: a scale for every number would round them.
        edge = self.edge.data[:, 0, :, None, None] * size**0.5
        turned = walsh_hadamard(filled)
        return ((turned > -edge).to(torch.uint8) + (turned > 0) + (turned > edge)).to(torch.uint8)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        tables = _tables(self._levels(query))
        votes = vote(codebooks.logits(tables, self.codes.visible, step.valid), self.group)  # [B,Hs,N], whole numbers
        rows = votes.shape[2]
        newest = torch.arange(rows, device=votes.device)
        order = votes.nan_to_num(neginf=-(2.0**30)).long() * rows + newest
        ids = order.topk(min(budget, rows), dim=-1).indices
        return Selection.tokens(ids.masked_fill(votes.gather(2, ids).isneginf(), -1))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        row, every = _padded(query.shape[3]) // CHANNELS, query.shape[:3].numel()
        read = sealed * row
        scoring = Launch("names", query.shape[:2].numel() * read, entries=every * read)
        return self.ranked(query, Scan(sealed, read), [scoring], (sealed, min(budget, sealed)), group=self.group)


def _padded(size: int) -> int:
    return max(1 << (size - 1).bit_length(), CHANNELS)


def _packed(levels: Tensor) -> Tensor:
    """`[..,D/4]` uint8: levels `[..,D]`, four a byte."""
    weight = (1 << BITS * torch.arange(CHANNELS, device=levels.device)).to(torch.uint8)
    return (levels.unflatten(-1, (-1, CHANNELS)) * weight).sum(-1, dtype=torch.uint8)


def _tables(levels: Tensor) -> Tensor:
    """`[B,H,G,D/4,256]` float32: less how far each byte of a row is from that of queries of levels `[B,H,G,D]`."""
    own = levels.unflatten(-1, (-1, 1, CHANNELS)).float()
    return -(own - _bytes(levels.device)).abs().sum(-1)


@functools.lru_cache(maxsize=8)
def _bytes(device: torch.device) -> Tensor:
    """`[256,4]` float32: the levels in every byte."""
    with torch.inference_mode(False):
        values = torch.arange(256)[:, None] >> BITS * torch.arange(CHANNELS)
        return (values & (1 << BITS) - 1).float().to(device)
