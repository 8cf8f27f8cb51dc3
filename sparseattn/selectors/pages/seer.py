"""SeerAttention-R's gate: blocks ranked by a learned product with pooled keys, https://arxiv.org/abs/2506.08889."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import half
from sparseattn.selectors.parameters.block_gate import first_maps, gate_keys, gate_query
from sparseattn.selectors.parameters.learned_index import check_whole
from sparseattn.selectors.tokens.calibrated_base import PROMPT, FromCalibration


class Seer(FromCalibration):
    """Reads the blocks whose gate key has the largest product with the gate's query, one choice per KV head.

    The keys of a block before RoPE are pooled by their maximum, minimum and mean, and a learned map makes a gate key of
    the three. Another map makes one gate query of all query heads of a KV head. Both then get the RoPE of the layer: a
    gate key that of its block's first token.

    Args:
        artefact: a file of `sparseattn train --method seer`, of blocks of as many rows. "prompt" (default): no file; a
            gate key is the mean key, and the gate's query the mean query.
        page: rows of a block, a power of two; 64, as in the paper.

    A block has D numbers of 16 bits: with 64 rows `D / 32` bytes a row. Departures: the gate is fitted to the sum of
    the attention in a block, where the paper takes its maximum, and it has as many channels as a key. Its scores say
    nothing of what rows weigh: no budget is a mass, and no threshold chooses.

    `scan_bytes`: the gate key of every block, and the map of queries once per KV head.

    Raises:
        ValueError: a layer whose RoPE is not known, or a file of other blocks.
    """

    method = "seer"
    without_rope = "take a method that scores keys as they are, such as mean"
    by_row = ("gates",)
    operators = 16

    def __init__(self, artefact: str = PROMPT, page: int = 64) -> None:
        if page < 1 or page & (page - 1):
            raise ValueError(f"a page is a power of two rows, got {page}")
        super().__init__("sum")
        self.page = self.span = page
        self.keys = RowBuffer(2)  # [B,H,D,3,D] float32, the map of pooled keys
        self.queries = RowBuffer(2)  # [B,H,G or 1,D,D] float32, that of queries
        self.gates = RowBuffer(2)  # [B,H,P,D] of 16 bits
        self.known = RowBuffer(1)
        self.read_from(artefact, roped=False)

    def has(self, ability: type) -> bool:
        return super().has(ability) and ability is not EstimatesMass

    def why_not_compared(self) -> str | None:
        return None  # without a file its maps are the same everywhere

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        self._rope()
        super().check_shape(heads, group, size)
        if self.artefact != PROMPT:
            check_whole(self, "rows a block", self.page, self.calibration().meta["recipe"]["width"], "page here is")
            if group is not None:
                weights = self.calibration().holds(self.layer)["queries"]
                check_whole(self, "query heads a KV head", group, weights.shape[1], "the model has")

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows // self.page, seal)

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys = rows.keys[0]
        if self.artefact != PROMPT:
            return self.filed(keys)
        return {name: part.to(keys.device) for name, part in first_maps(len(keys), 1, keys.shape[2]).items()}

    def append(self, rows: Rows) -> None:
        self.learn(rows)
        places, rope = rows.positions[:, None].clamp(min=0), self._rope_on(rows.keys.device)
        gates = gate_keys(rope.unrotate(rows.keys.float(), places), self.keys.data, self.page)
        self.gates.append(rope.rotate(gates, places[..., :: self.page]).to(half(rows.keys)))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return super().select(self._asked(query, step), step, budget)

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return super().head_scores(self._asked(query, step), step).expand(-1, -1, query.shape[2], -1)

    def _asked(self, query: Tensor, step: StepContext) -> Tensor:
        """Return the gate's query `[B,H,1,D]` float32 for queries `[B,H,G,D]`."""
        rope, places = self._rope_on(query.device), step.positions[:, None, None]
        coded = gate_query(rope.unrotate(query.float(), places), self.queries.visible)
        return rope.rotate(coded[:, :, None], places)

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        """Return `[B,H,1,P]` float32, the scores of blocks for the gate's query `[B,H,1,D]`."""
        scores = query.float() @ self.gates.visible.float().mT * self.temperature(query.shape[3])
        return scores.masked_fill(~valid[:, None, None, :: self.page], -torch.inf)

    def masses(self, logits: Tensor) -> Tensor:
        return logits  # which are of blocks

    def reads(self, query: Tensor) -> tuple[int, int]:
        size = query.shape[3]
        return -(-2 * size // self.page), 4 * query.shape[2] * size * size

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        return products(query[:, :, :1], sealed // self.page, query.shape[3])

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        pages, size = sealed // self.page, query.shape[3]
        scan = Scan(pages, 2 * pages * size + self.reads(query)[1])
        scoring = replace(self.scoring(query, sealed), bytes=query.shape[0] * query.shape[1] * scan.read)
        return self.ranked(
            query, scan, [scoring], (pages, min(budget, sealed) // self.page), group=self.group, page=self.page
        )
