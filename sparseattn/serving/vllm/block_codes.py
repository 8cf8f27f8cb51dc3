"""`querypq` over an engine's blocks: product codes of single rows in a store that sequences share.

Codes that a prompt learns for itself cannot be shared: the next request reads the same blocks. Those of a file can, as
a row's code follows from its key, and from its position where codes leave out the mean key before RoPE. Sequences share
the blocks of a common beginning, so that a row has the same position in all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import ProductCodes, Tables, Turning
from sparseattn.kernels.product_codes.missed_rows import MissedRows, packed, record_bytes
from sparseattn.kernels.stored_codes.dispatch import gather, gather_missed
from sparseattn.selectors.base import LayerContext, Rows, vote
from sparseattn.selectors.pages.base import Entries, PageSelector
from sparseattn.selectors.tokens.calibrated_base import PROMPT
from sparseattn.selectors.tokens.query_coded_base import PART
from sparseattn.selectors.tokens.querypq import QueryPQ

UNIT = 32  # rows of an entry, whose codes lie beside each other


class BlockCodes(PageSelector):
    """Reads the rows that `querypq` does, by codes in the order of an engine's blocks.

    RoPE of the file is taken for the model's: an engine does not say which it applies. KV heads and their size are
    compared.

    Where the method keeps what codes miss, each entry keeps it of those of its rows that they miss most: that share of
    them, rounded up.

    Args:
        method: with an artefact and single rows.
    """

    entry_names: tuple[str, ...] = ("codes",)
    part_names = ("method",)

    def __init__(self, method: QueryPQ) -> None:
        if method.turning:
            self.entry_names = ("codes", "first")  # the position of an entry's first row
        if method.kept_share:
            self.entry_names = (*self.entry_names, "missed")  # records of rows, see `MissedRows`
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
        """Return those of a sequence from its beginning on."""
        return self.entries_at(keys, torch.arange(0, keys.shape[2], self.unit, device=keys.device))

    def entries_at(self, keys: Tensor, first: Tensor) -> dict[str, Tensor]:
        if not self.method.known.rows:
            self.method.check_shape(keys.shape[1], None, keys.shape[3])
            row = keys[:1, :, :1]
            self.method.learn(Rows(row, row, torch.zeros(1, 1, dtype=torch.int64, device=keys.device)))
        at = (first[:, None] + torch.arange(self.unit, device=first.device)).flatten().expand(len(keys), -1)
        few = PART // self.unit * self.unit
        parts = [self._coded(*each) for each in zip(keys.split(few, 2), at.split(few, 1), strict=True)]
        made = {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}
        if self.method.turning:
            made["first"] = first.int()[:, None].expand(*keys.shape[:2], -1, 1)
        return made

    def _coded(self, keys: Tensor, at: Tensor) -> dict[str, Tensor]:
        """Return the codes of rows, and records of those that codes miss most of each entry, with their places in
        it."""
        codes, errors = self.method.coded_at(keys, at)  # [B,H,n,M]
        made = {"codes": codes.unflatten(2, (-1, self.unit)).transpose(3, 4).contiguous()}  # [B,H,E,M,unit]
        if errors is not None:
            most = math.ceil(self.method.kept_share * self.unit)
            ids = errors.unflatten(2, (-1, self.unit)).topk(most, 3).indices  # [B,H,E,X]
            rows = (ids + torch.arange(0, errors.shape[2], self.unit, device=ids.device)[:, None]).flatten(2)
            own, named = (part.gather(2, rows[..., None].expand(*rows.shape, part.shape[3])) for part in (keys, codes))
            missed = self.method.missed_of(own, at[:, None].expand_as(errors).gather(2, rows), named)
            made["missed"] = packed(ids.flatten(2), missed).unflatten(2, (-1, most)).flatten(3)
        return made

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        codes = entries["codes"].permute(0, 1, 3, 2, 4).flatten(3)  # [B,H,M,N]
        missed = None
        if self.method.kept_share:  # of one sequence after another in one store
            order = torch.arange(real.numel(), dtype=torch.int32, device=real.device).view_as(real)
            store = {"missed": entries["missed"].transpose(1, 2).flatten(0, 1)}
            missed = self._missed_at(store, torch.where(real, order, -1))
        return self._scores(query, self._held(codes, real), self._beside(entries, real), missed)

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        held, beside = self._held(gather(store["codes"], table), table >= 0), self._beside_at(store, table)
        return self._scores(query, held, beside, self._missed_at(store, table) if beside is None else None)

    def best_at(self, query: Tensor, store: Entries, table: Tensor, count: int) -> Tensor:
        method, every = self.method, len(query)
        if self.group != "softmax" or self.page > 1:
            return super().best_at(query, store, table, count)
        beside = self._beside_at(store, table)
        if method.kept_share and beside is None:  # no RoPE is known, or there are no rows
            return super().best_at(query, store, table, count)
        keys = self._held(gather(store["codes"], table), table >= 0)
        back, centroids = (_of_all(part.visible, every) for part in (method.back, method.centroids))
        tables = Tables(query, back, centroids, method.temperature(query.shape[3]), beside)
        start, length = product_codes.best(tables, keys, count)
        return torch.where(length > 0, start, -1)

    def bytes_once(self, query: Tensor) -> int:
        return self.method.reads(query)[1]

    def _held(self, codes: Tensor, real: Tensor) -> ProductCodes:
        return ProductCodes(codes, self.method.bits, real.repeat_interleave(self.unit, 1))

    def _beside(self, entries: Entries, listed: Tensor) -> Turning | None:
        """Return what rows have beside their codes, see `QueryPQ.beside`; `entries`: those `listed` `[B,E]` is of."""
        if not self.method.turning or not listed.shape[1]:
            return None
        return self._beside_from(entries["first"][:, 0, 0, 0], listed)

    def _beside_at(self, store: Entries, table: Tensor) -> Turning | None:
        """Return likewise of the entries that a table names in a store."""
        if not self.method.turning or not table.shape[1]:
            return None
        first = store["first"][:, 0, 0][table[:, 0].clamp(min=0).long()]
        found = self._beside_from(torch.where(table[:, 0] < 0, first.max(), first), table)
        return found if found is None else replace(found, missed=self._missed_at(store, table))

    def _missed_at(self, store: Entries, table: Tensor) -> MissedRows | None:
        """Return what codes miss of rows of the entries that a table names in a store; None: that is not kept."""
        if not self.method.kept_share:
            return None
        back = self.method.back.visible
        records = gather_missed(store["missed"], table, record_bytes(back.shape[3]), self.unit)
        return MissedRows(records, _of_all(back, len(table)))

    def _beside_from(self, first: Tensor, listed: Tensor) -> Turning | None:
        """Return likewise, by the positions `first` `[B]` int32 of sequences' first rows: their entries lie one behind
        the other."""
        method, (every, entries) = self.method, listed.shape
        rows, root = torch.arange(entries * self.unit, dtype=torch.int32, device=first.device), method.root.visible
        firsts = first.tolist()
        if firsts != firsts[:1] * every:
            return method.beside_at(_of_all(root, every), first[:, None] + rows)
        return method.beside_at(_of_all(root, every), (first[:1] + rows).expand(every, -1), firsts[0])

    def _scores(self, query: Tensor, keys: ProductCodes, beside: Turning | None, missed: MissedRows | None) -> Tensor:
        logits = product_codes.logits(self.method.scaled_tables(query), keys)
        if beside is not None or missed is not None:
            scaled = query.float() / self.method.temperature(query.shape[3])
            logits = logits if beside is None else logits + beside.products(scaled)
            logits = logits if missed is None else missed.added(logits, scaled)
        return vote(self.method.masses(logits), self.group)


def _of_all(part: Tensor, every: int) -> Tensor:
    """Return what `[1,..]` is of all sequences as that of so many."""
    return part.expand(every, *part.shape[1:])
