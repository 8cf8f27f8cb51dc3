"""Product quantisation of the prompt's keys by faiss: every row ranked by the centroids that stand for its key.

As PQCache keeps keys, https://arxiv.org/abs/2407.12820, with more bits; `PQCache` is its own setting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.kernels.nearest import in_threads, load_faiss
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least, half
from sparseattn.selectors.tokens.codebook_base import Coded
from sparseattn.utils.hashing import stream

BITS = (4, 6, 8)


class PQ(Coded):
    """Reads the rows whose keys, as a centroid for each subspace of channels, have the largest product with the query.

    faiss's k-means (25 rounds) finds the centroids of every subspace and KV head on a sample of the first real keys
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
        if bits not in BITS:
            raise ValueError(f"bits is one of {', '.join(map(str, BITS))}, got {bits}")
        check_least(subspaces=(subspaces, 0), sample=(sample, 0))
        load_faiss()
        super().__init__(group)
        self.subspaces, self.bits, self.sample, self.seed = subspaces, bits, sample, seed

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        self._subspaces(size)

    def _subspaces(self, size: int) -> int:
        """S, of heads of this size."""
        subspaces = self.subspaces or max(size // self.bits, 1)
        if size % subspaces:
            given = f"got {subspaces}" if self.subspaces else f"one for every {self.bits} channels makes {subspaces}"
            raise ValueError(
                f"{self}'s subspaces are a divisor of the head size, here of {size}, {given}: set subspaces"
            )
        return subspaces

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys = rows.keys[0]
        heads, count, size = keys.shape
        subspaces = self._subspaces(size)
        drawn = torch.randperm(count, generator=stream(self.seed, "sample"))[: self.sample or count].sort().values
        sample = keys[:, drawn.to(keys.device)].float().cpu()
        books = torch.empty(heads, subspaces, 1 << self.bits, size // subspaces)

        def learn(h: int) -> None:
            books[h] = product_codebooks(sample[h], subspaces, self.bits, self.seed)

        in_threads(learn, range(heads))
        return {"centroids": books.to(keys.device, half(keys))}

    def encode(self, keys: Tensor) -> Tensor:
        names = codebooks.nearest(keys, self.centroids.data)
        return codebooks.paired(names) if self.bits == 4 else names

    def names(self, size: int) -> tuple[int, int]:
        subspaces = self._subspaces(size)
        return -(-subspaces // 2) if self.bits == 4 else subspaces, size << self.bits

    def tables(self, query: Tensor) -> Tensor:
        return codebooks.tables(query, self.centroids.visible)


def product_codebooks(keys: Tensor, subspaces: int, bits: int, seed: int) -> Tensor:
    """`[S,2^bits,d]` float32: k-means centroids of keys `[n,D]` in each of S subspaces of d = D / S channels."""
    (count, size), centroids = keys.shape, 1 << bits
    if count <= centroids:
        own = keys[torch.arange(centroids).clamp(max=count - 1)]
        return own.unflatten(1, (subspaces, -1)).transpose(0, 1).contiguous()
    faiss = load_faiss()
    trained: Any = faiss.ProductQuantizer(size, subspaces, bits)
    trained.cp.seed, trained.cp.min_points_per_centroid = seed, 1  # below the minimum faiss prints a warning
    trained.cp.max_points_per_centroid = count  # what it is given is the sample
    trained.train(keys.contiguous().numpy())
    return torch.from_numpy(faiss.vector_to_array(trained.centroids)).view(subspaces, centroids, -1)
