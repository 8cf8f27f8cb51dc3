"""HATA: rows ranked by the Hamming distance of learned hash codes, https://arxiv.org/abs/2506.02572."""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.parameters.learned_index import check_whole, width_of
from sparseattn.selectors.tokens.calibrated_base import PROMPT
from sparseattn.selectors.tokens.sign_base import SignCodes

BITS = 128


class Hata(SignCodes):
    """Reads the rows whose hash codes differ from the query's in the fewest bits.

    A bit is the sign of a product of a key, or of a query, with a learned direction: one set for both, per KV head.

    Args:
        artefact: a file of `sparseattn train --method hata`, of as many bits. "prompt" (default): directions drawn at
            random, the control that learning must beat.
        bits: of a code, a multiple of 8; 0 (default): as many as the file has, without one 128, as in the paper.
        seed: of random directions.
        group: "sum" (default, its code's): a KV head chooses once, by the sum of its query heads' distances; "max": by
            the least of them; "each": every query head chooses for itself.

    An index row takes `bits / 8` bytes. Departures: `train` fits the directions to the attention itself by default, and
    by the paper's own loss with `--objective hata`. Which of equally distant rows is read is left open here and there.
    Distances are no logits, so it says nothing of what rows weigh: no budget is a mass, and no tail stands for rows.

    `scan_bytes`: the codes of every row, and the directions once per KV head.
    """

    method = "hata"

    def __init__(self, artefact: str = PROMPT, bits: int = 0, seed: int = 0, group: str = "sum") -> None:
        self.directions = RowBuffer(2)  # [B,H,D,bits] float32
        super().__init__(artefact, bits, seed, group)
        self.width = bits or (BITS if artefact == PROMPT else width_of(self.calibration(), "directions"))

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        if self.artefact != PROMPT:
            bits = self.calibration().holds(self.layer)["directions"].shape[2]
            check_whole(self, "bits", self.width, bits, "bits here is")

    def drawn(self, heads: int, size: int) -> dict[str, Tensor]:
        return {"directions": self.normal("directions", heads, size, self.width)}

    def of_keys(self, keys: Tensor) -> Tensor:
        return keys @ self.directions.data

    def of_queries(self, query: Tensor) -> Tensor:
        return query @ self.directions.visible

    def map_bytes(self, group: int, size: int) -> int:
        return 4 * size * self.width
