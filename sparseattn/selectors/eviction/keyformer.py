"""Keyformer: H2O's sums of softmaxes whose logits have Gumbel noise and a temperature that rises with every token.

https://arxiv.org/abs/2403.09054
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.eviction.attention_received import QueryBlock
from sparseattn.selectors.eviction.summed_base import Summed

NOISE = 1 << 16  # numbers of noise that are drawn once, of which every query has a stretch of its own


class Keyformer(Summed):
    """Holds the rows with the largest sums of noisy softmaxes, the key tokens, and the newest rows.

    A query gives a row `softmax((logit + noise) / tau)`, with Gumbel noise of its own for every row and query head.
    `tau` is 1 for the prompt and rises by `rise` with every step, so that what is dropped, and no longer counted,
    matters less and less.

    Args:
        recent: share of the budget for the newest rows, 0 to 1; 0.3 in the authors' code.
        rise: what every step adds to the temperature, 0 or more; 0.01 in their code.
        seed: of the noise.

    One choice per KV head, by the sum over its query group; the paper's models have one query head per KV head. Facts
    are from the authors' code (d-matrix-ai/keyformer-llm). The noise is a stretch of 65,536 numbers, which begins where
    a hash of seed, layer, query head and the query's position says; theirs is drawn anew each time. The budget there
    is 60 % of the prompt. What a row gets in the cache's window is not seen, see `H2O`: compare with
    `Keyformer.paper()`, at equal total rows.

    It keeps 4 bytes for a row's position beside its sum.

    Raises:
        ValueError: a share, or a rise, out of its range.
    """

    operators = 60

    def __init__(self, recent: float = 0.3, rise: float = 0.01, seed: int = 0) -> None:
        super().__init__(recent)
        if not rise >= 0:
            raise ValueError(f"rise is what a step adds to the temperature, 0 or more, got {rise}")
        self.rise, self.seed = rise, seed
        self.at = RowBuffer(2, spare=0)  # [B,H,N] int32, positions of the rows
        self.asked = RowBuffer(1)  # [B,1] int64, the position of the step's query
        self.steps = RowBuffer(1)  # [B,1] float32, steps that were observed

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink; the token of the step is on top of the
        budget."""
        return {"selector": cls(), "sink": 0, "window": 1, "seal": 1}

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        self.at.fix(rows)
        self.asked.fix()
        self.steps.fix()

    def append(self, rows: Rows) -> None:
        self.at.append(rows.positions[:, None].expand(rows.keys.shape[:3]).int())
        if not self.asked.rows:
            self.asked.append(torch.zeros_like(rows.positions[:, :1]))
            self.steps.append(torch.zeros_like(rows.positions[:, :1], dtype=torch.float32))
        super().append(rows)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        self.asked.data[:, 0] = step.positions
        return super().select(query, step, budget)

    def keep(self, ids: Tensor) -> None:
        super().keep(ids)
        self.at.keep(ids)

    def noise(self, head: int, group: int, query_places: Tensor, place: Tensor) -> Tensor:
        """Return the noise of a KV head's queries.

        Args:
            head: the KV head, of those it is shown.
            group: its query heads.
            query_places: `[m]` int64, positions of queries.
            place: `[m,n]` or `[1,n]` integers, positions of rows.

        Returns:
            `[G,m,n]` float32.
        """
        number = self.head_numbers(head + 1)[head]
        stream = streams(self.seed, self.layer, [number * group + g for g in range(group)], query_places.device)
        begin = draws(stream, query_places, query_places.new_zeros(len(query_places), 1))[..., 0].T  # [G,m]
        return _noise(query_places.device)[(begin[..., None] + place) & NOISE - 1]

    def gives(self, logits: Tensor, block: QueryBlock) -> Tensor:
        noise = self.noise(block.head, len(logits), block.asked, block.place[None])
        return (logits + noise).softmax(-1)

    def of_step(self, got: Tensor, own: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        self.steps.data.add_(1)
        tau = 1 + self.rise * self.steps.data[:, 0]  # [B]
        read = self.at.visible.gather(2, selection.start.long())  # [B,H,S]
        query_places = self.asked.data[:, 0]
        place = torch.cat([read, query_places[:, None, None].expand(-1, self.kv, -1)], 2)
        each = [self.noise(h, got.shape[2], query_places, place[:, h]) for h in range(self.kv)]
        logits = torch.cat([got, own[..., None]], 3).log() + torch.stack(each, 1).permute(2, 1, 0, 3)
        given = (logits / tau[:, None, None, None]).softmax(-1)
        return given[..., :-1], given[..., -1]


@functools.lru_cache(maxsize=8)
def _noise(device: torch.device) -> Tensor:
    """`[NOISE]` float32: Gumbel noise, the same everywhere."""
    with torch.inference_mode(False):
        even = torch.rand(NOISE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return -(-even.clamp(min=1e-12).log()).log().float().to(device)
