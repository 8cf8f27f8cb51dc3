"""OOD-DiskANN's RobustVamana: a graph of keys near each other, stitched by queries. https://arxiv.org/abs/2211.12850"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sparseattn.selectors.graphs.retrieval import RetrievalAttention, compiled


class RobustVamana(RetrievalAttention):
    """Searches, for every query head, a Vamana graph over its KV head's keys and reads the best rows found.

    Each key is linked to keys that a search for it finds, pruned so that no neighbour is `alpha` times nearer to
    another neighbour. A sample of the prompt's queries is put into the graph with them. Where a key has such a query
    for a neighbour, the query gives its place to keys of its own list. RetrievalAttention's Figure 6
    (https://arxiv.org/abs/2409.10516) compares with it. Search, storage and insertion of rows sealed while decoding are
    `RetrievalAttention`'s.

    Args:
        beam: keys kept during a search, at least the budget in effect: more find more and scan more.
        degree: most neighbours of a key (R).
        alpha: how much nearer, in squared distances, a neighbour has to be to occlude; 1.2 in DiskANN. 1: as in the
            first of the two passes.
        build_beam: beam of the searches that find candidates (L).
        share: queries put in, as a share of the prompt, evenly spaced; the paper takes 1 % of the index. Without any
            the graph is Vamana.

    Facts are from the branch robust_vamana of https://github.com/microsoft/DiskANN. As there for inner products, keys
    get a dimension more and queries are scaled, so that all have length 1 and nearest is largest in product.
    Departures: there is a graph for each query head; keys are inserted 1,024 at a time and see each other; a list is
    full at `degree`, without the code's slack of 1.3; occlusion is at `alpha` alone and not in steps up to it; an edge
    is added where a key could not be reached; rows sealed later are inserted without queries.

    Raises:
        ValueError: an argument out of its range.
        ImportError: numba or faiss is missing.
    """

    def __init__(
        self, beam: int = 300, degree: int = 32, alpha: float = 1.2, build_beam: int = 64, share: float = 0.01
    ) -> None:
        super().__init__(beam, degree=degree, build_beam=build_beam, share=share, guides=0)
        if not alpha >= 1:
            raise ValueError(f"alpha is 1 or more, got {alpha}")
        self.alpha = alpha

    @classmethod
    def paper(cls, **knobs: Any) -> dict[str, Any]:
        """Return RetrievalAttention's setting, in which its paper compares the two, as arguments of `KVCache`."""
        return super().paper(**knobs)

    @property
    def recipe(self) -> Any:
        roargraph, _ = compiled()
        return roargraph.GraphRecipe(self.neighbours, self.degree, self.pivots, self.build_beam, 0, self.alpha)

    def _points(self, keys: Tensor, b: int, s: int) -> Tensor:
        """Return keys `[N,D]` over the longest one's length, with a dimension that makes all as long."""
        length = keys.norm(dim=1, keepdim=True)
        most = length.max().clamp(min=torch.finfo(keys.dtype).tiny)
        return torch.cat([keys / most, (1 - (length / most).square()).clamp(min=0).sqrt()], 1)

    def _guiding(self, queries: Tensor) -> Tensor:
        return queries[:0]

    def _built(self, keys: Tensor, queries: Tensor, b: int, s: int) -> tuple[Any, bool]:
        from sparseattn.kernels.graph import vamana

        points, guiding = self._points(keys, b, s), torch.nn.functional.pad(normalize(queries, dim=1), (0, 1))
        return vamana.build(points.numpy(), guiding.numpy(), self.recipe), False
