"""Uniform sampling without replacement: the control that a method must beat.

The control of Figure 5 of SAAP, https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selection import Selection
from sparseattn.selectors.base import Rows, Selector, best
from sparseattn.storage import RowBuffer


class Random(Selector):
    """Reads rows drawn at random for every query, one draw per KV head.

    The draw is a hash of (seed, layer, head, position of the query, position of the row): it does not depend on the
    batch, on padding or on how the rows were appended.

    Args:
        seed: any integer.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.at = RowBuffer(1, spare=-1)  # [B,N] int64 positions of the rows

    def fix(self, rows: int, seal: int) -> None:
        self.at.fix(rows)

    def append(self, rows: Rows) -> None:
        self.at.append(rows.positions)

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        batch, heads = query.shape[:2]
        if self.at.rows == 0:
            return Selection.none(batch, heads, query.device)
        at = self.at.visible
        head = torch.arange(heads, device=at.device)
        if self.heads is not None:
            head = torch.tensor(self.heads.which, device=at.device)
        stream = _mix(_mix(_mix(torch.full_like(head, _signed(self.seed % (1 << 64)))) + self.layer) + head)  # [H]
        draw = _mix(_mix(stream + positions[:, None])[..., None] + at[:, None])  # [B,H,N]
        uniform = (draw >> 11).double().masked_fill((at < 0)[:, None], -torch.inf)
        scanned = torch.zeros(batch, heads, dtype=torch.int64, device=at.device)
        return Selection.tokens(best(uniform, budget), scanned, scanned)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
