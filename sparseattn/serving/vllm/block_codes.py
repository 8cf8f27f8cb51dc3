"""`querypq` over an engine's blocks: product codes of single rows in a store that sequences share.

Codes that a prompt learns for itself cannot be shared: the next request reads the same blocks. Those of a file can, as
a row's code follows from its key alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import ProductCodes, Tables
from sparseattn.kernels.stored_codes.dispatch import gather
from sparseattn.selectors.base import LayerContext, Rows, vote
from sparseattn.selectors.pages.base import Entries, PageSelector
from sparseattn.selectors.tokens.calibrated_base import PROMPT
from sparseattn.selectors.tokens.querypq import QueryPQ

UNIT = 32  # rows of an entry, whose codes lie beside each other


class BlockCodes(PageSelector):
    """Reads the rows that `querypq` does, by codes in the order of an engine's blocks.

    RoPE of the file is taken for the model's: an engine does not say which it applies. KV heads and their size are
    compared.

    Args:
        method: with an artefact and single rows.
    """

    entry_names = ("codes",)
    part_names = ("method",)

    def __init__(self, method: QueryPQ) -> None:
        super().__init__(method.page, method.group)
        self.method = method

    @property
    def unit(self) -> int:
        return max(UNIT, self.page)

    def label(self, *, knob: bool = True) -> str:
        return self.method.label(knob=knob)

    def bind(self, context: LayerContext) -> None:
        if self.method.artefact != PROMPT:
            context = replace(context, rope=self.method.calibration().ropes.get(context.layer))
        super().bind(context)

    def why_not_shared(self) -> str | None:
        if self.method.artefact == PROMPT:
            return (
                "its codes are made for one prompt, and blocks are shared by many: train a file (sparseattn train "
                "--method querypq) and serve querypq:artefact=FILE"
            )
        if self.page > 1:
            return "codes choose single rows there: leave out page, or serve lowbit:bits=1,page=16 for pages"
        return None

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        if not self.method.known.rows:
            self.method.check_shape(keys.shape[1], None, keys.shape[3])
            row = keys[:1, :, :1]
            self.method.learn(Rows(row, row, torch.zeros(1, 1, dtype=torch.int64, device=keys.device)))
        codes = self.method.encode(keys)  # [B,H,n,M]
        return {"codes": codes.unflatten(2, (-1, self.unit)).transpose(3, 4).contiguous()}  # [B,H,E,M,unit]

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        codes = entries["codes"].permute(0, 1, 3, 2, 4).flatten(3)  # [B,H,M,N]
        return self._scores(query, self._held(codes, real))

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        return self._scores(query, self._held(gather(store["codes"], table), table >= 0))

    def best_at(self, query: Tensor, store: Entries, table: Tensor, count: int) -> Tensor:
        if self.group != "softmax" or self.page > 1:
            return super().best_at(query, store, table, count)
        keys = self._held(gather(store["codes"], table), table >= 0)
        every, method = len(query), self.method
        back, centroids = (
            part.visible.expand(every, *part.visible.shape[1:]) for part in (method.back, method.centroids)
        )
        tables = Tables(query, back, centroids, method.temperature(query.shape[3]))
        start, length = product_codes.best(tables, keys, count)
        return torch.where(length > 0, start, -1)

    def bytes_once(self, query: Tensor) -> int:
        return self.method.reads(query)[1]

    def _held(self, codes: Tensor, real: Tensor) -> ProductCodes:
        return ProductCodes(codes, self.method.bits, real.repeat_interleave(self.unit, 1))

    def _scores(self, query: Tensor, keys: ProductCodes) -> Tensor:
        tables = self.method.scaled_tables(query)
        return vote(self.method.masses(product_codes.logits(tables, keys)), self.group)
