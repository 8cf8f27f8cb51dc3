"""Loki: every row ranked by the first principal components of its key. https://arxiv.org/abs/2406.02542"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.step_cost import Launch, products
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.tokens.calibrated_base import PROMPT, Calibrated


class Loki(Calibrated):
    """Reads the rows with the largest logits in d dimensions: those in which keys vary most.

    The principal directions of a KV head's keys (PCA, about their mean) are calibrated beforehand. The first d of them
    turn query and key, and the product, divided by `sqrt(D)`, ranks the rows.

    Args:
        dimensions: d, all of them if there are fewer; 0 (default): a quarter of the head size, the paper's setting.
        artefact: a file that `sparseattn train --method loki` has made of traces; "prompt" (default): the
            directions are those of the keys that a sequence seals first, its prompt's.
        before: directions of keys before RoPE, which turn keys after it. The paper has both and takes, for each model,
            the better; some heads' keys vary most after RoPE where no query looks.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each" (the paper's): every query
            head chooses for itself.

    The index keeps d numbers of the keys' dtype for every row, and D * d more for each KV head.

    Departures, from its code (hpcgroup/loki). There the cache itself holds turned keys, so the first d dimensions are
    no second copy; here keys stay as they are, and the copy of d dimensions counts. Its code can choose d
    by layer from the variance explained; here d is the same in all. The default, without a file, is ours, and costs a
    PCA before the first decoded token.

    `scan_bytes`: d numbers of every row, and the directions once per KV head.
    """

    method = "loki"
    by_row = ("low",)

    def __init__(
        self, dimensions: int = 0, artefact: str = PROMPT, before: bool = False, group: str = "softmax"
    ) -> None:
        check_least(dimensions=(dimensions, 0))
        super().__init__(artefact, group, not before)
        self.dimensions, self.before = dimensions, before
        self.basis = RowBuffer(2)  # [B,H,D,d] float32
        self.low = RowBuffer(3)  # [B,H,d,N]: by dimension a CPU multiplies twice as fast as by row

    def taken(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        basis = parameters["basis"]
        return {"basis": basis[..., : self._kept(basis.shape[1])]}

    def append(self, rows: Rows) -> None:
        self.learn(rows)
        self.low.append((rows.keys.float() @ self.basis.data).to(rows.keys.dtype).mT)

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        turned_query = query.float() / self.temperature(query.shape[3]) @ self.basis.visible  # [B,H,G,d]
        return (turned_query @ self.low.visible.float()).masked_fill_(~valid[:, None, None], -torch.inf)

    def reads(self, query: Tensor) -> tuple[int, int]:
        size, dimensions = query.shape[3], self._kept(query.shape[3])
        return dimensions * self.bytes_of(query), 4 * size * dimensions

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        return products(query, sealed, self._kept(query.shape[3]))

    def _kept(self, size: int) -> int:
        """d, of keys of `size` channels."""
        return min(self.dimensions or max(size // 4, 1), size)
