"""CaM: the value of a row that leaves the newest ones goes, by chance, to the rows behind it.

CaM: Cache Merging for Memory-efficient LLMs Inference, https://openreview.net/forum?id=LCTmppB165
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.abilities import Observes
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.merging_base import Merging, listed


class CaM(Observes, Merging):
    """Holds the newest rows, and adds the value of one that it drops to the `spread` rows behind it, a share to each.

    It does so with a probability: the weight that the row got at its last step, over the mean of the weights that the
    rows held got then, 1 at most. Keys stay.

    Args:
        spread: rows that a value is spread over, 32 in the authors' code.
        seed: of the draws, one for each row and KV head.
        weigh: see `Merging`.

    As the authors' code (zyxxmu/cam, `modify_llama_cam.py`), whose rows of the prompt beyond the newest are dropped
    without merging, too. Its first rows are the cache's sink. In the mean are the rows chosen here, without the step's
    own token and others that lie in the cache's window. Query heads of a KV head decide together, by the sum of their
    weights.
    """

    def __init__(self, spread: int = 32, seed: int = 0, weigh: bool = False) -> None:
        super().__init__()
        check_least(spread=(spread, 1))
        self.spread, self.seed, self.weigh = spread, seed, weigh
        self.latest, self.at = RowBuffer(2), RowBuffer(2)  # [B,H,N]: weights of the last step, -1: none; positions

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: four rows of sink, the token of the step on top."""
        return {"selector": cls(), "sink": 4, "window": 1, "seal": 1}

    def first(self, rows: Rows) -> Tensor:
        return (1.0 + rows.positions)[:, None].expand(-1, rows.keys.shape[1], -1)

    def append(self, rows: Rows) -> None:
        super().append(rows)
        at = rows.positions[:, None].expand(-1, rows.keys.shape[1], -1)
        self.at.append(at)
        self.latest.append(torch.full_like(at, -1.0, dtype=torch.float32))

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        selection, weights = self.with_tail(selection, weights, total)
        got = weights[..., 0].unflatten(1, (self.kv, -1)).sum(2)  # [B,H,S]
        used, latest = selection.length > 0, self.latest.data
        spare = torch.nn.functional.pad(torch.full_like(latest, -1.0), (0, 1))  # a place for slots that are not used
        where = torch.where(used, selection.start.long(), latest.shape[2])
        latest.copy_(spare.scatter(2, where, got)[:, :, :-1])

    def chance(self, at: Tensor) -> Tensor:
        """Return a number from 0 to 1 for each KV head and row at positions `at` `[n]`: `[H,n]` float64."""
        stream = streams(self.seed, self.layer, self.head_numbers(self.kv), at.device)
        drawn = draws(stream, torch.zeros_like(at[:1]), at[None])[0]
        return (drawn >> 11 & (1 << 53) - 1).double() / (1 << 53)

    def merge(self, b: int, gone: Tensor, stay: Tensor) -> None:
        for h, (out, kept) in enumerate(zip(listed(gone), listed(stay), strict=True)):
            latest = self.latest.data[b, h]
            known = latest[kept][latest[kept] >= 0]
            if not len(out) or not len(known):
                continue
            merged = self.chance(self.at.data[b, h, out])[h] < latest[out] / known.mean()
            first = torch.searchsorted(kept, out)
            for row, place in zip(out[merged].tolist(), first[merged].tolist(), strict=True):
                behind, values = kept[place : place + self.spread], self.values.data[b, h]
                values[behind] = (values[behind].float() + values[row].float() / self.spread).to(values.dtype)
                self.count.data[b, h, behind] += self.count.data[b, h, row] / self.spread

    def keep(self, ids: Tensor) -> None:
        super().keep(ids)
        self.latest.keep(ids)
        self.at.keep(ids)
