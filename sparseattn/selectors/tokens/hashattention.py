"""HashAttention: rows ranked by the Hamming distance of hash codes that small networks make.

https://arxiv.org/abs/2412.14468
"""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.parameters.hash_networks import HIDDEN, KEYS, QUERIES, first_network, through
from sparseattn.selectors.parameters.learned_index import check_whole, width_of
from sparseattn.selectors.tokens.calibrated_base import PROMPT
from sparseattn.selectors.tokens.sign_base import SignCodes
from sparseattn.utils.hashing import stream

BITS = 32


class HashAttention(SignCodes):
    """Reads the rows whose hash codes differ from the query's in the fewest bits.

    Keys of a KV head have a network of three layers, queries of each query head another. Signs of outputs are bits.

    Args:
        artefact: a file of `sparseattn train --method hashattention`, of as many bits. "prompt" (default): networks
            with random weights, the control that learning must beat.
        bits: of a code, a multiple of 8; 0 (default): as many as the file has, without one 32, as in the paper.
        seed: of random weights.
        group: "sum" (default): a KV head chooses once, by the sum of its query heads' distances; "max": by the least of
            them; "each": every query head chooses for itself, as in the paper.

    An index row takes `bits / 8` bytes. Departures: keys of a KV head have one code for all of its query heads, where
    the paper's code keeps one for each of them. `train` fits the networks to the attention itself, the paper's labels
    are the 64 best tokens. Distances are no logits: no budget is a mass, and no tail stands for rows.

    `scan_bytes`: the codes of every row, and the networks of the query heads once per KV head.
    """

    method = "hashattention"

    def __init__(self, artefact: str = PROMPT, bits: int = 0, seed: int = 0, group: str = "sum") -> None:
        for name in (*KEYS, *QUERIES):
            setattr(self, name, RowBuffer(2))  # [B,H,..] float32, see `hash_networks`
        super().__init__(artefact, bits, seed, group)
        self.width = bits or (BITS if artefact == PROMPT else width_of(self.calibration(), KEYS[-2]))

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        if self.artefact != PROMPT:
            weights = self.calibration().holds(self.layer)
            check_whole(self, "bits", self.width, weights[KEYS[-2]].shape[2], "bits here is")
            if group is not None:
                check_whole(self, "query heads a KV head", group, weights[QUERIES[0]].shape[1], "the model has")

    def drawn(self, heads: int, size: int) -> dict[str, Tensor]:
        draws = stream(self.seed, self.layer, "networks")
        network = first_network(KEYS, (heads,), size, self.width, draws)
        same = first_network(QUERIES, (heads, 1), size, self.width, draws)
        # Keys and queries of equal direction get equal codes only where both have one network.
        return network | {name: network[key][:, None] for name, key in zip(same, network, strict=True)}

    def of_keys(self, keys: Tensor) -> Tensor:
        return through(keys, [getattr(self, name).data for name in KEYS])

    def of_queries(self, query: Tensor) -> Tensor:
        parts = [getattr(self, name).visible for name in QUERIES]
        return through(query[:, :, :, None], parts)[:, :, :, 0]

    def map_bytes(self, group: int, size: int) -> int:
        numbers = size * HIDDEN + HIDDEN * HIDDEN + HIDDEN * self.width + 2 * HIDDEN + self.width
        return 4 * group * numbers
