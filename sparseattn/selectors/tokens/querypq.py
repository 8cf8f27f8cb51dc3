"""Every row ranked by product codes of its key, in the metric of the prompt's queries. Ours.

`query_coded_base` says how keys are coded, and what of. Here rows are scored and chosen by their codes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best, summed
from sparseattn.kernels.group_vote.dispatch import best_of_listed
from sparseattn.kernels.listed_codes import dispatch as listed_codes
from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import ProductCodes, RankedCodes, Tables, Turning
from sparseattn.kernels.product_codes.missed_rows import MissedRows, record_bytes
from sparseattn.selectors.abilities import ChoosesAtOnce, RanksListed
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.tokens.query_coded_base import QueryCoded

Self = TypeVar("Self", bound="QueryPQ")

PLACE = 4  # bytes of a row's position
OWN = ("select", "factors", "coded", "beside")  # what a subclass with a choice of its own may have changed
OPERATORS_BESIDE = 8  # small tensor operations beside the kernel that chooses


class QueryPQ(ChoosesAtOnce, RanksListed, QueryCoded):
    """Reads the rows with the largest products of the query with the centroids that stand for their turned keys.

    The prompt's keys, less their mean, are turned so that a distance between two of them is the root mean square
    difference of their logits over the prompt's queries. They are rotated so that the subspaces' variances have nearly
    equal products. Each subspace is coded by the nearest of its centroids. A query is turned the other way, so that its
    products stay what they are. A row's score is a sum of as many numbers as there are subspaces. Mean, map and
    centroids are the prompt's; rows sealed later are coded with them. RoPE moves later keys and queries to where the
    prompt has none, so half of those that are learned from are first moved on to positions to come.

    Args:
        subspaces: M, a divisor of the head size, 112 at most, or 128 where the mean is the plain one; 0 (default): half
            a bit a channel, one for every `2 * bits` channels.
        bits: of a subspace's code: 4 (default), 16 centroids and two codes a byte; or 8, 256 centroids.
        metric: "own" (default): the second moment of the prompt's queries, a query group's together; "keys": keys are
            centred and rotated only.
        sample: most keys of a KV head that centroids are learned from, drawn at random; 0: all of them.
        share: share of the prompt's queries for the metric, evenly spaced. Where none are given, the keys serve as
            queries, and a warning says so.
        reach: power of a key's mean attention, from queries of the prompt's end, that it counts for in the mean of its
            centroid; 0: all keys count alike.
        seed: of the draws and of the first centroids.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.
        ahead: tokens behind the prompt that codes are made for; half of those that keys and queries are moved to lie in
            its first quarter. 0: none. None is moved either in a layer whose RoPE is not known.
        artefact: a file that `sparseattn train --method querypq` has made of traces, with as many subspaces and bits.
            Means, maps and centroids are the file's then, and metric, sample, share, reach, ahead and seed count for
            nothing: coding takes no k-means and no queries. "prompt" (default): they are the prompt's.
        page: choose pages of so many rows by the sum of their rows' weights, a power of two; 1 (default): single rows.
        additive: a key is a sum of M centroids, one of each codebook, and each is of all channels, so that M may be any
            number: codebooks have 4,096 centroids in all at most. That finds more at equal bytes. The codebooks take M
            times the room and longer to learn, and a seal makes the products of all centroids with each other. Not with
            `artefact`.
        mean: which mean key a code leaves out. "rope": that of keys before RoPE, turned to each key's position, whose
            product with the query is added again for each row. RoPE hides most of a mean, so codes then find much
            more, and choosing in long contexts takes longer. Not as a second stage. In a layer whose RoPE is not known
            it finds what "plain" finds. "plain": that of keys as they are, one for all positions. "auto" (default):
            that of the file with `artefact`, "plain" as a second stage, else "rope".
        missed: share of rows, at most half, of which what codes miss is kept in 4 bits a channel: the rows that codes
            miss most, by the mean square error of a logit. Of rows sealed later as many are among them as keep this the
            share of all, if codes miss them by more than the prompt's limit. A single line that resembles nothing else
            is found then. 0: none. None (default): .02, but 0 with the plain mean, `additive` or `artefact`, as a
            second stage and in a layer whose RoPE is not known. More than 0 is refused with the plain mean, with
            `additive` and as a second stage. In vLLM's blocks it is a share of every 32 rows.

    An index row takes `M * bits / 8` bytes: at D = 64, 4. The KV heads share 4 bytes a row, its position. A KV head has
    `D * (2^bits + D)` numbers of 16 bits, or with `additive` `D * (M * 2^bits + D)`, and 2 D of 32 bits, which a query
    reads beside the codes, and a map of keys, `4 D^2` bytes, which it does not. Where the mean is "plain" there are no
    positions, and D numbers of 32 bits.

    Of rows of which what codes miss is kept, each takes `D / 2 + 8` bytes more for each KV head.

    With "softmax" and single rows, two rows for every row of the budget are candidates, by sums of tables that are
    rounded to 8 bits, and these alone vote (`kernels.product_codes.dispatch.best`).

    `scan_bytes`: the codes of every row and its position, which the KV heads share, and once per KV head the centroids,
    the map of queries and the means. Where the mean is "plain" no positions are read. What is kept of what codes miss
    is read, too.
    """

    operators = 24
    _ranked: RankedCodes | None = None  # every row, as `chosen_by` said last

    def append(self, rows: Rows) -> None:
        self._ranked = None  # storage may be replaced
        super().append(rows)

    def tables(self, query: Tensor) -> Tensor:
        # What the mean key adds is the same for every row: it is put into the first subspace's numbers.
        products = Tables(query, self.back.visible, self.centroids.visible).numbers()
        products[:, :, :, 0] += query @ self.centre.visible[..., None]
        return products

    def factors(self, query: Tensor, temperature: float) -> Tables:
        """Return what `tables` of queries `[B,H,G,D]` are made of, the mean key's part left out."""
        return Tables(query, self.back.visible, self.centroids.visible, temperature, self.beside())

    def coded(self, valid: Tensor) -> ProductCodes:
        """Return the codes of every row that is stored; `valid` `[B,N]` bool says which are no padding."""
        return ProductCodes(self.codes.visible, self.bits, valid)

    def beside(self) -> Turning | None:
        """Return what rows have beside their codes: the mean key before RoPE, where it is known and left out."""
        if not self.turning:
            return None
        found = self.beside_at(self.root.visible, self.at.visible)
        return found if found is None or not self.kept_share else replace(found, missed=self._listed())

    def beside_at(self, root: Tensor, at: Tensor, first: int | None = None) -> Turning | None:
        """Return `beside` of rows at positions `at` `[B,N]` int32; root: `[B,H,D]`; first: see `Turning`."""
        if not self.turning or self.layer_context.rope is None:
            return None
        return Turning(self._rope_on(root.device), root, at, first)

    def _listed(self) -> MissedRows:
        """Return the rows that codes miss most."""
        return MissedRows(self.missed_rows.visible, self.back.visible)

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        found: Tensor = product_codes.logits(self.scaled_tables(query), self.coded(valid))
        if (beside := self.beside()) is not None:
            return found + self._products(query, beside)
        if not self.kept_share:
            return found
        return self._listed().added(found, query.float() / self.temperature(query.shape[3]))

    def _products(self, query: Tensor, beside: Turning) -> Tensor:
        """Return the products of queries `[B,H,G,D]` with what rows have beside their codes, `[B,H,G,N]` float32."""
        scaled, at = query.float() / self.temperature(query.shape[3]), beside.at
        if self.fixed_for_cache or at.device.type != "cpu":
            return beside.products(scaled)
        last = max(int(at.max()), 0) if at.numel() else 0
        below = beside.rope.products_below(scaled, beside.key, last + 1)
        found = below.gather(3, at.clamp(min=0).long()[:, None, None].expand(*below.shape[:3], -1))
        return found if beside.missed is None else beside.missed.added(found, scaled)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if not self._at_once:
            return super().select(query, step, budget)
        tables = self.factors(query, self.temperature(query.shape[3]))
        return Selection(*product_codes.best(tables, self.coded(step.valid), budget), 1, whole=True)

    def chosen_by(self, valid: Tensor, size: int) -> RankedCodes | None:
        own = all(getattr(type(self), name) is getattr(QueryPQ, name) for name in OWN)
        if not self._at_once or self.fixed_for_cache or not own:
            return None
        if self._ranked is None or self._ranked.valid is not valid:
            temperature = self.temperature(size)
            self._ranked = RankedCodes(
                self.back.visible, self.centroids.visible, temperature, self.coded(valid), self.beside()
            )
        return self._ranked

    def _forget_views(self) -> None:
        super()._forget_views()
        self._ranked = None

    @property
    def _at_once(self) -> bool:
        """Whether rows are chosen in one kernel, which adds nothing for single rows where no RoPE is known."""
        known = self.layer_context.rope is not None
        return self.group == "softmax" and self.page == 1 and (known or not self.kept_share)

    @property
    def _compiled(self) -> bool:
        """Whether rows are chosen in one kernel, of codes that are looked up in registers."""
        return self.bits == 4 and self._at_once

    @property
    def _adds(self) -> bool:
        """Whether a query reads rows' positions and the mean before RoPE; of a layer without rows it is taken to."""
        return self.turning and (self.layer_context.rope is not None or not self.at.rows)

    # -- as the second of two stages -----------------------------------------------------------------------------------

    def as_second(self: Self) -> Self:
        if self.missed:
            raise ValueError(f"a second stage ranks by codes alone: leave missed={self.missed:g} out")
        if self._mean_of_file() == "rope":
            raise ValueError(
                f"a second stage is shown keys without their positions, and codes of {self.artefact} need them: give "
                f"it a file that is trained with --mean plain"
            )
        if self.mean == "rope":
            raise ValueError(f"a second stage is shown keys without their positions: give {self} mean=plain")
        if not self.turning:
            return self
        plain = self.for_layer(self.layer_context)  # what was given may serve elsewhere, in its own form
        plain.by_row = type(plain).by_row
        del plain.at, plain.root
        if self._kept_if(True):
            del plain.missed_rows, plain.limit
        return plain

    def stored_rows(self) -> int:
        return self.codes.rows

    def extend(self, keys: Tensor) -> None:
        self._ranked = None
        self.codes.append(self.encode(keys).mT)

    def forget(self, first: int) -> None:
        self._ranked = None
        self.codes.resize(first)

    def best_listed(self, query: Tensor, valid: Tensor, pages: Tensor, page: int, count: int) -> tuple[Tensor, Tensor]:
        rows = pages[..., None] * page + torch.arange(page, device=pages.device)  # [B,L,P,page]
        rows = torch.where(pages[..., None] < 0, -1, rows).flatten(2)
        logits = listed_codes.logits(self.scaled_tables(query), self.coded(valid), rows.int())
        once = torch.full(pages.shape[:2], self.reads(query)[1], device=pages.device)
        return best_of_listed(logits, self.group, pages, page, count), once * (pages >= 0).any(2)

    def row_bytes(self, size: int) -> int:
        return self.names(size)[0]

    def bytes_beside(self, size: int, sealed: int, rows: float, spans: float) -> float:
        return self._once(size) if rows else 0.0

    def listed_launches(self, query: Tensor, rows: float, few: float, lists: int) -> tuple[Launch, ...]:
        batch, heads, members, size = query.shape
        each = heads * members if self.group in ("softmax", "each") else lists
        looked_up = replace(self.scoring(query, 0), entries=batch * heads * members * rows * self.names(size)[0])
        return looked_up, Launch("sort", entries=sorted_best(batch * each, rows, few))

    # -- what a step reads and takes -----------------------------------------------------------------------------------

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = super().scan(query, sealed, budget)
        if not self._compiled:
            return scan
        batch, heads, members, size = query.shape
        looked_up = members * self.subspaces_of(size) * sealed
        work, tables = summed(batch * heads, looked_up, scan.rows), super().scoring(query, sealed).flops
        flops = tables + 2.0 * query.numel() * size + self._turning(query, sealed)
        scoring = Launch("sums", batch * heads * scan.read, flops, work)
        return replace(scan, launches=(scoring, Launch("operator", count=OPERATORS_BESIDE)))

    def reads(self, query: Tensor) -> tuple[int, int]:
        row = self.names(query.shape[3])[0]
        if self._adds:
            row += -(-PLACE // query.shape[1])  # which the KV heads share
        return row, self._once(query.shape[3])

    def bytes_read(self, query: Tensor, sealed: int) -> int:
        missed = math.ceil(self._kept_if(self._adds) * sealed)
        return super().bytes_read(query, sealed) + missed * record_bytes(query.shape[3])

    def _once(self, size: int) -> int:
        """Return the bytes of centroids, the map of queries and the means of a KV head."""
        return 2 * self.names(size)[1] + 2 * size * size + 4 * size * (2 if self._adds else 1)

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        launch, size = super().scoring(query, sealed), query.shape[3]
        flops = launch.flops + 2.0 * query.numel() * size + self._turning(query, sealed)
        return Launch("names", flops=flops, entries=launch.entries)

    def _turning(self, query: Tensor, sealed: int) -> float:
        """Return the flops of products with the mean key before RoPE at so many positions, and with what codes miss."""
        return 2.0 * query.numel() * sealed * (self._adds + self._kept_if(self._adds))
