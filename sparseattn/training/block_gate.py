"""Fits the gate of `seer` to the attention of a model as it is, by the loop of `learned_index`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.block_gate import first_maps, gate_query, pooled
from sparseattn.training.learned_index import FIRST, NEAR, QUERIES, SINK, Index, PromptLayer
from sparseattn.training.recipe import TrainingError


@dataclass(frozen=True)
class DrawnBlocks:
    """A step's queries and all blocks of a prompt.

    Args:
        rope: of the layer.
        query: `[H,G,q,D]` float32, before RoPE.
        places: `[q]`, of the queries.
        pools: `[H,P,D,3]`, of the blocks' keys before RoPE.
        starts: `[P]`, of the blocks' first tokens.
        seen: `[q,P]` bool, the blocks that lie whole before a query.
        attention: `[H,q,P]`, how the attention of a KV head's queries among these is shared out.
    """

    rope: Rope
    query: Tensor
    places: Tensor
    pools: Tensor
    starts: Tensor
    seen: Tensor
    attention: Tensor


class BlockGate(Index):
    """The maps of a gate, `Seer`'s, for blocks of `page` rows behind the first tokens of a prompt."""

    def __init__(self, layer: PromptLayer, page: int) -> None:
        heads, group, _, size = layer.query.shape
        self.page, self.scale = page, layer.scale
        self.parameters = first_maps(heads, group, size)
        self._pools: dict[int, Tensor] = {}  # by id of the prompt, which outlives this

    def draw(self, prompt: PromptLayer, draws: torch.Generator) -> DrawnBlocks:
        rope, places = prompt.rope, prompt.positions
        if rope is None or places is None:
            raise TrainingError("a gate takes keys before RoPE, and the RoPE of this layer is not known")
        tokens, asking = prompt.keys.shape[1], prompt.query.shape[2]
        blocks = (tokens - SINK) // self.page
        ends = SINK + self.page * torch.arange(1, blocks + 1)
        if not blocks or int(ends[0]) + NEAR >= tokens:
            raise TrainingError(f"a prompt of {tokens} tokens has no block of {self.page} before its last queries")
        first = max(tokens - asking, int(FIRST * tokens), int(ends[0]) + NEAR)
        at = torch.randint(first, tokens, (min(QUERIES, tokens - first),), generator=draws)
        kept = prompt.keys[:, SINK : int(ends[-1])]
        if id(prompt) not in self._pools:
            self._pools[id(prompt)] = pooled(rope.unrotate(kept, places[SINK : int(ends[-1])]), self.page)
        seen = (ends <= at[:, None] - NEAR).to(kept.device)
        query = prompt.query[:, :, at - (tokens - asking)].to(kept.device).float()
        logits = prompt.scale * query @ kept[:, None].mT
        weights = logits.masked_fill(~seen.repeat_interleave(self.page, 1), -torch.inf).softmax(-1)
        attention = weights.unflatten(3, (-1, self.page)).sum(4).mean(1)
        there = places[at.to(places.device)]
        starts = places[SINK : int(ends[-1]) : self.page]
        return DrawnBlocks(rope, rope.unrotate(query, there), there, self._pools[id(prompt)], starts, seen, attention)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return `[H,q,P]` for the gate's queries `[H,q,D]` and keys `[H,P,D]`, both after RoPE."""
        return self.scale * query @ keys.mT

    def loss(self, drawn: DrawnBlocks) -> Tensor:  # type: ignore[override]
        maps = self.parameters
        keys = drawn.rope.rotate(drawn.pools.flatten(-2) @ maps["keys"].flatten(-3, -2), drawn.starts)
        queries = gate_query(drawn.query.movedim(2, 1), maps["queries"][:, None])
        scores = self.scores(drawn.rope.rotate(queries, drawn.places), keys)
        scores = scores.masked_fill(~drawn.seen, torch.finfo(torch.float32).min)
        return -(drawn.attention * scores.log_softmax(-1)).sum(-1).mean()

    def found(self) -> dict[str, Tensor]:
        return {name: part.detach() for name, part in self.parameters.items()}
