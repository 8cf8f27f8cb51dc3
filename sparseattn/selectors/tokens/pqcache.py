"""PQCache: every row ranked by two names of six bits that stand for its key. https://arxiv.org/abs/2407.12820"""

from __future__ import annotations

from sparseattn.selectors.tokens.pq import PQ


class PQCache(PQ):
    """Reads the rows whose keys, as one of 64 centroids for each half of the channels, have the largest product.

    `PQ` as the paper's code sets it: two subspaces, six bits, all of the prompt's keys in k-means, and one choice for a
    query group, by its heads' summed probabilities.

    Args:
        subspaces: a divisor of the head size. Its code allows 1, 2 (default), 4, 8 and 16.
        bits: of a name: 4, 6 (default) or 8.
        seed: of the first centroids.
        group: how a query group votes, see `vote`: "softmax" (default, the paper's), "sum", "max"; "each": every query
            head chooses for itself.

    An index row takes a byte for each name, 2 by default, where 12 bits would do. The codebooks of a KV head take 64
    keys. Codebooks hold for the positions that they were learned at, see `PQ`.

    Departures, from its code (HugoZHL/PQCache). k-means runs 25 rounds before the first decoded token; there
    it runs 3 to 300 of scikit-learn on idle CPU cores, as many as fit while the prompt is read. Rows get names when
    they are sealed, as there when they leave the local window. Its 32 first tokens, and a window of half the budget,
    are sink and window here, on top of the budget. Its cache of blocks on a GPU, where all others lie in host memory,
    is no part of the choice (`KVCache(sealed_device="cpu")` keeps sealed rows there).

    `scan_bytes`: the names of every row, and the codebooks once per KV head.
    """

    def __init__(self, subspaces: int = 2, bits: int = 6, seed: int = 0, group: str = "softmax") -> None:
        super().__init__(subspaces, bits, 0, seed, group)
