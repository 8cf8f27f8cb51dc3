"""What `PQ` and `QueryPQ` share: keys cut into subspaces, a codebook of k-means for each. Product quantisation,
https://doi.org/10.1109/TPAMI.2010.57."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.nearest_codes import dispatch as nearest_codes
from sparseattn.kernels.product_kmeans.dispatch import product_codebooks
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.tokens.codebook_base import Coded
from sparseattn.utils.hashing import stream


class ProductCoded(Coded):
    """Keeps, of every key, the name of the nearest centroid in each subspace of its channels.

    Args:
        subspaces: S, a divisor of the head size; 0: one for every `channels * bits` channels.
        bits: of a name, one of `choices`.
        sample: most keys of a KV head that codebooks are learned from, drawn at random; 0: all of them.
        seed: of the draw and of the first centroids.
        group: how a query group votes, see `vote`.
    """

    choices: tuple[int, ...] = (4, 6, 8)
    channels = 1  # for every bit, by default

    def __init__(self, subspaces: int, bits: int, sample: int, seed: int, group: str) -> None:
        super().__init__(group)
        if bits not in self.choices:
            raise ValueError(f"bits is one of {', '.join(map(str, self.choices))}, got {bits}")
        check_least(subspaces=(subspaces, 0), sample=(sample, 0))
        self.subspaces, self.bits, self.sample, self.seed = subspaces, bits, sample, seed

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        self.subspaces_of(size)

    def subspaces_of(self, size: int) -> int:
        """Return S, of heads of this size; ValueError where it is no divisor of that."""
        channels = self.channels * self.bits
        subspaces = self.subspaces or max(size // channels, 1)
        if size % subspaces:
            given = f"got {subspaces}" if self.subspaces else f"one for every {channels} channels makes {subspaces}"
            raise ValueError(
                f"{self}'s subspaces are a divisor of the head size, here of {size}, {given}: set subspaces"
            )
        return subspaces

    def drawn(self, keys: Tensor) -> Tensor:
        """Return which of keys `[H,n,D]` codebooks are learned from, `[sample]` int64, rising."""
        count = keys.shape[1]
        which = torch.randperm(count, generator=stream(self.seed, "sample"))[: self.sample or count].sort().values
        return which.to(keys.device)

    def books(self, keys: Tensor) -> Tensor:
        """Return the codebooks `[H,S,2^bits,d]` float32 of keys `[H,n,D]`."""
        return product_codebooks(keys, self.subspaces_of(keys.shape[2]), self.bits, self.seed)

    def packed(self, keys: Tensor, turn: tuple[Tensor, Tensor] | None = None, errors: Tensor | None = None) -> Tensor:
        """Return the names of the nearest centroids of keys `[B,H,n,D]`, `[B,H,R,n]`: two a byte of 4 bits; turn,
        errors: see `nearest_codes.dispatch.names`."""
        named = nearest_codes.paired_names if self.bits == 4 else nearest_codes.names
        return named(keys, self.centroids.data, turn, errors)

    def names(self, size: int) -> tuple[int, int]:
        subspaces = self.subspaces_of(size)
        return -(-subspaces // 2) if self.bits == 4 else subspaces, size << self.bits
