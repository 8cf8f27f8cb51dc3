"""Product quantisation of the prompt's keys by faiss: every row ranked by the centroids that stand for its key.

As PQCache keeps keys, https://arxiv.org/abs/2407.12820, with more bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.hashes import stream
from sparseattn.kernels import codebooks
from sparseattn.kernels.codebooks import CENTROIDS
from sparseattn.selectors.base import check_least
from sparseattn.selectors.coded import Coded, half
from sparseattn.selectors.nearest import in_threads, load_faiss

EACH = 8  # channels of a subspace by default: a byte for eight is one bit a channel


class PQ(Coded):
    """Reads the rows whose keys, as a centroid for each subspace of channels, have the largest product with the query.

    faiss's k-means (25 rounds) finds 256 centroids for every subspace and KV head on a sample of the first real keys
    that a sequence seals, its prompt's; rows sealed later take the nearest of them. Fewer keys than centroids are their
    own.

    Args:
        subspaces: M, a divisor of the head size; 0: a subspace for every eight channels. A row takes M bytes.
        sample: most keys of a KV head that codebooks are learned from, drawn at random.
        seed: of the draw and of the first centroids.
        group: how a query group votes, see `vote`: "softmax" (default, PQCache's), "sum", "max"; "each": every query
            head chooses for itself.

    The codebooks of a KV head take 256 keys, which a query reads beside the codes: with one bit a channel and keys of
    16 bits as much as the codes of 4,096 rows.

    Departures from PQCache's code. It has two subspaces of 64 centroids, 12 bits a key, and k-means over all of the
    prompt's keys on idle CPU cores while the prompt is read; here there are 8 bits for every eight channels, and k-means
    sees a sample. It gives rows codes as they leave its local window, as rows here get them when they are sealed. Its
    blocks of keys and values that stay on a GPU while all others lie in host memory are no part of the choice.

    `scan_bytes`: the codes of every row, and the codebooks once per KV head.
    """

    def __init__(self, subspaces: int = 0, sample: int = 4096, seed: int = 0, group: str = "softmax") -> None:
        check_least(subspaces=(subspaces, 0), sample=(sample, CENTROIDS))
        load_faiss()
        super().__init__(group)
        self.subspaces, self.sample, self.seed = subspaces, sample, seed

    def learned(self, keys: Tensor) -> dict[str, Tensor]:
        heads, count, size = keys.shape
        subspaces = self.subspaces or max(size // EACH, 1)
        if size % subspaces:
            raise ValueError(
                f"subspaces divide the head size, {size} here, got {subspaces}; PQ(subspaces=M) takes another M"
            )
        drawn = torch.randperm(count, generator=stream(self.seed, "sample"))[: self.sample].sort().values
        sample = keys[:, drawn.to(keys.device)].float().cpu()
        books: list[Tensor] = [torch.empty(0)] * heads

        def learn(h: int) -> None:
            books[h] = product_codebooks(sample[h], subspaces, self.seed)

        in_threads(learn, range(heads))
        return {"books": torch.stack(books).to(keys.device, half(keys))}

    def encode(self, keys: Tensor) -> Tensor:
        return codebooks.encode(keys, self.books.data)

    def tables(self, query: Tensor) -> Tensor:
        return codebooks.tables(query, self.books.visible)


def product_codebooks(keys: Tensor, subspaces: int, seed: int) -> Tensor:
    """`[M,256,d]` float32: k-means centroids of keys `[n,D]` in each of M subspaces of d = D / M channels."""
    count, size = keys.shape
    if count <= CENTROIDS:
        own = keys[torch.arange(CENTROIDS).clamp(max=count - 1)]
        return own.unflatten(1, (subspaces, -1)).transpose(0, 1).contiguous()
    faiss = load_faiss()
    trained: Any = faiss.ProductQuantizer(size, subspaces, 8)
    trained.cp.seed, trained.cp.min_points_per_centroid = seed, 1  # below the minimum faiss prints a warning
    trained.train(keys.contiguous().numpy())
    return torch.from_numpy(faiss.vector_to_array(trained.centroids)).view(subspaces, CENTROIDS, -1)
