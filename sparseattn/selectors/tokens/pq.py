"""Product quantisation of the prompt's keys: every row ranked by the centroids that stand for its key.

As PQCache keeps keys, https://arxiv.org/abs/2407.12820, with more bits; `PQCache` is its own setting.
"""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import half
from sparseattn.selectors.tokens.product_base import ProductCoded


class PQ(ProductCoded):
    """Reads the rows whose keys, as a centroid for each subspace of channels, have the largest product with the query.

    k-means (25 rounds) finds the centroids of every subspace and KV head on a sample of the first real keys
    that a sequence seals, its prompt's; rows sealed later take the nearest of them. Fewer keys than centroids are their
    own.

    Args:
        subspaces: S, a divisor of the head size; 0: one bit a channel, so a subspace for every `bits` channels.
        bits: 8 (default), 256 centroids in a subspace; 6, 64 of them; or 4, 16 of them, what faiss's fast scan works
            on.
        sample: most keys of a KV head that codebooks are learned from, drawn at random; 0: all of them.
        seed: of the draw and of the first centroids.
        group: how a query group votes, see `vote`: "softmax" (default, PQCache's), "sum", "max"; "each": every query
            head chooses for itself.

    An index row takes `S * bits / 8` bytes, and S with 6 bits. The codebooks of a KV head take 2 to the power of `bits`
    keys, which a query reads beside the codes: with 8 bits, one bit a channel and keys of 16 bits as much as the codes
    of 4,096 rows.

    Codebooks hold for the positions that they were learned at, as keys carry RoPE: after a short prompt and a long
    answer far fewer of the right rows are found.

    `scan_bytes`: the codes of every row, and the codebooks once per KV head.
    """

    def __init__(
        self, subspaces: int = 0, bits: int = 8, sample: int = 4096, seed: int = 0, group: str = "softmax"
    ) -> None:
        super().__init__(subspaces, bits, sample, seed, group)

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys = rows.keys[0]
        return {"centroids": self.books(keys[:, self.drawn(keys)]).to(half(keys))}

    def encode(self, keys: Tensor) -> Tensor:
        return self.packed(keys).mT

    def tables(self, query: Tensor) -> Tensor:
        return codebooks.tables(query, self.centroids.visible)
