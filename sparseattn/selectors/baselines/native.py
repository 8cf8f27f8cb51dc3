"""What a model's own index chose, out of a trace: the index that others are compared with on such a model.

Traces of `sparseattn capture` hold it for DeepSeek-V3.2 and its kin (https://arxiv.org/abs/2512.02556), MiniMax-M3 and
Qwen's QSA, see `models.native_choice`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.selectors.abilities import ReplaysNative
from sparseattn.selectors.base import Rows, Selector, StepContext

NATIVE = "native"  # in place of a selector's name, where a model itself chooses


class Native(ReplaysNative, Selector):
    """Reads what the layer's own index chose for the same token: the best of it that the budget allows.

    It has no name in `SELECTORS`, since it knows nothing but the tokens of a trace: `bench --selector native`.
    """

    operators = 12

    def __init__(self) -> None:
        self.at = RowBuffer(1, spare=-1)  # [B,N] int64 positions of the rows

    @classmethod
    def class_name(cls) -> str:
        return NATIVE

    def append(self, rows: Rows) -> None:
        self.at.append(rows.positions)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        recorded = self.layer_context.native
        if recorded is None:
            raise ValueError("native reads what a trace holds of a model's own index, and this layer has none")
        recorded_rows = recorded.rows[:, (step.positions - recorded.first).long()]  # [Hs,B,S]
        wanted, at = recorded_rows.transpose(0, 1).long(), self.at.visible  # [B,Hs,S], [B,N]
        heads = query.shape[1]
        if wanted.shape[1] == 1:
            wanted = wanted.expand(-1, heads, -1)
        elif wanted.shape[1] != heads:
            wanted = wanted[:, list(self.head_numbers(heads))]
        place = torch.searchsorted(at.contiguous(), wanted.flatten(1)).clamp(max=at.shape[1] - 1)
        there = (at.gather(1, place) == wanted.flatten(1)).view_as(wanted)
        place = torch.where(there & (wanted >= 0), place.view_as(wanted), -1)
        order = (place < 0).to(torch.int8).argsort(dim=-1, stable=True)  # what lies in the sealed zone first
        return Selection.tokens(place.gather(-1, order)[..., :budget])

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        recorded = self.layer_context.native
        if recorded is None or recorded.row_bytes is None:
            return None
        return Scan(sealed, sealed * recorded.row_bytes / query.shape[1])  # its keys serve all heads
