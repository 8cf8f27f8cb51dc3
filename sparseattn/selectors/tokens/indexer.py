"""A learned indexer of few dimensions, after DeepSeek Sparse Attention's, https://arxiv.org/abs/2512.02556."""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.parameters.learned_index import check_whole, level_tables, nibbles_of_levels, width_of
from sparseattn.selectors.tokens.calibrated_base import PROMPT
from sparseattn.selectors.tokens.learned_base import LearnedCodes

DIMENSIONS, SPREAD = 8, 2.5  # root mean squares that levels of maps drawn at random reach to


class Indexer(LearnedCodes):
    """Reads the rows with the largest products in few learned dimensions, of which each is kept in four bits.

    Keys of a KV head and queries of each query head have linear maps of their own, learned from the attention itself.

    Args:
        artefact: a file of `sparseattn train --method indexer`, of as many dimensions. "prompt" (default): one map for
            both, drawn at random, the control that learning must beat.
        dimensions: r, of a key's image; 0 (default): as many as the file has, without one 8.
        seed: of a random map.
        group: how a query group votes, see `vote`.

    An index row takes `r / 2` bytes. Departures, of DSA's: that indexer is trained with its model, has a ReLU and a
    weight for each of many index heads, and one key for all heads of a layer; this one is fitted to a model as it is,
    for its own heads, on traces.

    `scan_bytes`: the codes of every row, and the maps of the query heads once per KV head.
    """

    method = "indexer"

    def __init__(self, artefact: str = PROMPT, dimensions: int = 0, seed: int = 0, group: str = "softmax") -> None:
        check_least(dimensions=(dimensions, 0))
        self.dimensions = dimensions
        self.keys = RowBuffer(2)  # [B,H,D,r] float32, the map of keys
        self.queries = RowBuffer(2)  # [B,H,G or 1,D,r] float32, those of queries
        self.low = RowBuffer(2)  # [B,H,r] float32, the least level of each dimension
        self.step = RowBuffer(2)  # [B,H,r] float32, between levels
        super().__init__(artefact, seed, group)
        self.width = dimensions or (DIMENSIONS if artefact == PROMPT else width_of(self.calibration(), "keys"))

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        if self.artefact != PROMPT:
            weights = self.calibration().holds(self.layer)
            check_whole(self, "dimensions", self.width, weights["keys"].shape[2], "dimensions here is")
            if group is not None:
                check_whole(self, "query heads a KV head", group, weights["queries"].shape[1], "the model has")

    def subspaces(self, size: int) -> int:
        return self.width

    def drawn(self, heads: int, size: int) -> dict[str, Tensor]:
        turn = self.normal("map", heads, size, self.width) / size**0.5
        far = turn.new_full((heads, self.width), SPREAD)
        return {"keys": turn, "queries": turn[:, None] * (size / self.width), "low": -far, "step": far * 2 / 15}

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        maps = super().learned(rows)
        if self.artefact == PROMPT:  # images of the prompt's keys are of size 1
            spread = rows.keys[0].float().square().mean((1, 2)).sqrt().clamp(min=1e-6)[:, None, None]
            maps = maps | {"keys": maps["keys"] / spread, "queries": maps["queries"] * spread[:, None]}
        return maps

    def named(self, keys: Tensor) -> Tensor:
        low, step = (part.data[:, :, None] for part in (self.low, self.step))
        return nibbles_of_levels(keys @ self.keys.data, low, step)

    def tables(self, query: Tensor) -> Tensor:
        turned = (query[:, :, :, None] @ self.queries.visible)[:, :, :, 0] / self.temperature(query.shape[3])
        return level_tables(turned, self.low.visible, self.step.visible)

    def map_bytes(self, group: int, size: int) -> int:
        return 4 * (group * size + 2) * self.width
