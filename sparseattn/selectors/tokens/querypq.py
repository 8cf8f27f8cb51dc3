"""Every row ranked by product codes of its key, in the metric of the prompt's queries. Ours.

PQCache keeps keys as product codes, https://arxiv.org/abs/2407.12820; A2ATS weighs them by the queries,
https://arxiv.org/abs/2502.12665; the rotation is OPQ's, https://doi.org/10.1109/TPAMI.2013.240.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best, summed
from sparseattn.kernels import codebooks
from sparseattn.kernels.additive_codes import dispatch as additive_codes
from sparseattn.kernels.group_vote.dispatch import best_of_listed
from sparseattn.kernels.listed_codes import dispatch as listed_codes
from sparseattn.kernels.nearest_codes import dispatch as nearest_codes
from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import (
    MOST,
    MOST_BESIDE,
    ProductCodes,
    RankedCodes,
    Tables,
    Turning,
)
from sparseattn.kernels.product_codes.missed_rows import NO_RECORD, MissedRows, packed, record_bytes
from sparseattn.selectors.abilities import ChoosesAtOnce, LearnsFromQueries, RanksListed
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import check_least, check_share, half, into_range, warn_of_keys_as_queries
from sparseattn.selectors.parameters.query_metric import codes_of, moves_ahead, reached
from sparseattn.selectors.saved_state import Loaded, check_equal, check_finite, check_no_order, check_tensors
from sparseattn.selectors.tokens.calibrated_base import PROMPT, FromCalibration
from sparseattn.selectors.tokens.product_base import ProductCoded
from sparseattn.utils.hashing import stream, tensors_hash

Self = TypeVar("Self", bound="QueryPQ")

METRICS = ("own", "keys")
MEANS = ("auto", "plain", "rope")
MOST_ADDED = 4096  # centroids whose products with each other a seal makes
MISSED = 0.02  # share of rows of which what codes miss is kept by default
PLACE = 4  # bytes of a row's position
PART = 1 << 16  # rows that are coded at a time
OWN = ("select", "factors", "coded", "beside")  # what a subclass with a choice of its own may have changed
OPERATORS_BESIDE = 8  # small tensor operations beside the kernel that chooses


class QueryPQ(ChoosesAtOnce, RanksListed, LearnsFromQueries, FromCalibration, ProductCoded):
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

    learns_once = True
    operators = 24
    choices = (4, 8)
    channels = 2
    _ranked: RankedCodes | None = None  # every row, as `chosen_by` said last
    method = "querypq"

    def __init__(
        self,
        subspaces: int = 0,
        bits: int = 4,
        metric: str = "own",
        sample: int = 8192,
        share: float = 0.1,
        reach: float = 0.5,
        seed: int = 0,
        group: str = "softmax",
        ahead: int = 8192,
        artefact: str = PROMPT,
        page: int = 1,
        additive: bool = False,
        mean: str = "auto",
        missed: float | None = None,
    ) -> None:
        ProductCoded.__init__(self, subspaces, bits, sample, seed, group)
        if page < 1 or page & (page - 1):
            raise ValueError(f"a page is a power of two rows, or 1, got {page}")
        self.page = self.span = page
        check_share(share)
        check_least(ahead=(ahead, 0))
        if metric not in METRICS:
            raise ValueError(f"metric is one of {', '.join(METRICS)}, got {metric!r}")
        if not 0 <= reach <= 1:
            raise ValueError(f"reach is a power of weights, 0 to 1, got {reach}")
        if mean not in MEANS:
            raise ValueError(f"mean is one of {', '.join(MEANS)}, got {mean!r}")
        if additive and artefact != PROMPT:
            raise ValueError(f"codes with additive are the prompt's own: leave out artefact={artefact} or additive")
        if missed is not None and not (isinstance(missed, (int, float)) and 0 <= missed <= 0.5):
            raise ValueError(f"missed is a share of rows, 0 to 0.5, or None, got {missed!r}")
        if missed and (additive or mean == "plain"):
            other = "additive" if additive else "mean=plain"
            raise ValueError(f"missed={missed:g} is for product codes without the mean before RoPE: leave out {other}")
        self.metric, self.share, self.reach, self.ahead, self.additive = metric, share, reach, ahead, additive
        self.mean, self.missed = mean, missed
        self.queries_share = share if metric == "own" and artefact == PROMPT else 0.0
        self.codes = RowBuffer(3, spare=0)  # [B,H,R,N] uint8, each byte of all rows together, as kernels read them
        self.centre = RowBuffer(2)  # [B,H,D] float32, the mean key
        self.turn = RowBuffer(2)  # [B,H,D,D] float32, of keys
        self.back = RowBuffer(2)  # [B,H,D,D] of 16 bits, of queries
        self.read_from(artefact)
        if (self._mean_of_file() or mean) != "plain":
            self.by_row = (*self.by_row, "at")
            self.at = RowBuffer(1, spare=-1)  # [B,N] int32, positions of rows
            self.root = RowBuffer(2)  # [B,H,D] float32, the mean key before RoPE
        elif missed:
            raise ValueError(
                f"codes of {artefact} have mean=plain, and missed={missed:g} needs the mean before RoPE: train a "
                f"file with --mean rope, or leave missed out"
            )
        if self._kept_if(True):
            self.missed_rows = RowBuffer(2, spare=NO_RECORD)  # [B,H,X,W] uint8, see `MissedRows`
            self.limit = RowBuffer(2)  # [B,H,1] float32, of the mean square error of a logit
        self._check_most(subspaces, mean == "rope")  # as a second stage another has the plain one

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        if self.kept_share:
            self.missed_rows.fix(math.ceil(self.kept_share * rows))

    @property
    def kept_share(self) -> float:
        """Share of rows of which what codes miss is kept: `missed`, or what its default is here."""
        return self._kept_if(self.layer_context.rope is not None)

    def _kept_if(self, known: bool) -> float:
        """Return `kept_share` in a layer whose RoPE is known, or is not."""
        if self.missed is not None:
            return self.missed
        own = self.artefact == PROMPT and not self.additive
        return MISSED if known and own and self.turning else 0.0

    def _mean_of_file(self) -> str | None:
        """Return which mean key the codes of the file leave out, None without a file; ValueError where another one is
        asked for."""
        if self.artefact == PROMPT:
            return None
        theirs = "rope" if self.calibration().has("root") else "plain"
        if self.mean not in ("auto", theirs):
            raise ValueError(
                f"codes of {self.artefact} have mean={theirs}, got mean={self.mean}: leave mean out, or train a file "
                f"with --mean {self.mean}"
            )
        return theirs

    @property
    def _adds(self) -> bool:
        """Whether a query reads rows' positions and the mean before RoPE; of a layer without rows it is taken to."""
        return self.turning and (self.layer_context.rope is not None or not self.at.rows)

    @property
    def turning(self) -> bool:
        """Whether codes leave out the mean key before RoPE, so that rows have a position beside their codes."""
        return "at" in self.by_row

    def _check_most(self, subspaces: int, turning: bool) -> None:
        """Refuse more subspaces than sums of their tables have room for: ValueError."""
        most = MOST_BESIDE if turning else MOST
        if subspaces > most:
            plain = f", or with mean=plain {MOST}" if turning else ""
            raise ValueError(f"subspaces is {most} or less{plain}, as sums of tables have 16 bits, got {subspaces}")

    def subspaces_of(self, size: int) -> int:
        if self.additive:
            return self.subspaces or max(size // (self.channels * self.bits), 1)
        return super().subspaces_of(size)

    def names(self, size: int) -> tuple[int, int]:
        row, numbers = super().names(size)
        return row, numbers * self.subspaces_of(size) if self.additive else numbers

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        if (self.ahead or self.turning) and self.artefact == PROMPT and (rope := self.layer_context.rope) is not None:
            rope.check_size(size)
        subspaces = self.subspaces_of(size)
        self._check_most(subspaces, self.turning)
        if self.additive and subspaces << self.bits > MOST_ADDED:
            raise ValueError(
                f"additive codes have {MOST_ADDED:,} centroids at most, and {subspaces} codes of {self.bits} bits have "
                f"{subspaces << self.bits:,}: set subspaces={MOST_ADDED >> self.bits} or fewer"
            )
        if self.artefact != PROMPT:
            theirs = self.calibration().holds(self.layer)["centroids"].shape[1:3]
            if theirs != (subspaces, 1 << self.bits):
                raise ValueError(
                    f"{self} cuts heads of size {size} into {subspaces} subspaces of {1 << self.bits} centroids, and "
                    f"{self.artefact} is of {theirs[0]} with {theirs[1]}: give it subspaces={theirs[0]},"
                    f"bits={theirs[1].bit_length() - 1}, or train another one"
                )

    def index_arguments(self) -> dict[str, Any]:
        given = super().index_arguments() | {
            "mean": "rope" if self.turning else "plain",
            "missed": float(self.kept_share),
        }
        if self.artefact == PROMPT:
            rope = self.layer_context.rope
            known = rope is not None and (self.ahead or self.turning)
            moved = (tensors_hash({"inv_freq": rope.inv_freq}), rope.interleaved) if rope and known else None
            return given | {"scale": self.layer_context.scale, "rope": moved}
        del given["artefact"]  # whose other layers do not count
        return given | {"parameters": tensors_hash(self.calibration().holds(self.layer))}

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        check_no_order(order)
        (batch, heads, count, size), kind = rows.keys.shape, half(rows.keys)
        subspaces, square = self.subspaces_of(size), (batch, heads, size, size)
        channels = size if self.additive else size // subspaces
        wanted = {
            "codes": (torch.uint8, (batch, heads, self.names(size)[0], count)),
            "known": (torch.bool, (batch, 1)),
            "centre": (torch.float32, (batch, heads, size)),
            "turn": (torch.float32, square),
            "back": (kind, square),
            "centroids": (kind, (batch, heads, subspaces, 1 << self.bits, channels)),
        }
        if self.kept_share:
            records = batch, heads, math.ceil(self.kept_share * count), record_bytes(size)
            wanted |= {"missed_rows": (torch.uint8, records), "limit": (torch.float32, (batch, heads, 1))}
        if self.turning:
            wanted |= {"at": (torch.int32, (batch, count)), "root": (torch.float32, (batch, heads, size))}
        check_tensors(state, wanted)
        check_finite(
            state,
            "centre",
            "turn",
            "back",
            "centroids",
            *(["root"] if self.turning else []),
            *(["limit"] if self.kept_share else []),
        )
        check_equal(state, "known", (rows.positions >= 0).any(1, keepdim=True).cpu())
        if self.turning:
            check_equal(state, "at", rows.positions.int().cpu())
        if self.kept_share:
            _check_missed(MissedRows(state["missed_rows"], state["back"]), count)

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys, kind = rows.keys[0], half(rows.keys)
        tensors = self.filed(keys) if self.artefact != PROMPT else self._prompts(rows)
        # A key is turned into numbers as large as its products with queries, which may be beyond float16, and queries
        # into ones as large as they were small. A power of two from one map to the other changes no name or product.
        by = into_range(tensors["centroids"], kind) / into_range(tensors["back"], kind)  # [H]
        turn, back = tensors["turn"] * by[:, None, None], tensors["back"] / by[:, None, None]
        centroids = tensors["centroids"] * by[:, None, None, None]
        found = tensors | {"turn": turn, "back": back.to(kind), "centroids": centroids.to(kind)}
        return found | {"limit": self._limit(found, rows)} if self.kept_share else found

    def _prompts(self, rows: Rows) -> dict[str, Tensor]:
        """Return what the prompt's own keys and queries say, see `codes_of`."""
        keys = rows.keys[0]
        drawn = self.drawn(keys)
        sample, places, given = keys[:, drawn].float(), rows.positions[0, drawn], None
        if self.metric == "own":
            if rows.queries is None or rows.query_positions is None or not rows.query_positions.numel():
                warn_of_keys_as_queries(self, len(keys), len(keys))
                given, at = sample[:, None], places
            else:
                given, at = rows.queries[0], rows.query_positions[0]
        weights = None
        if given is not None and self.reach:
            weights = reached(given, at, sample, places, self.temperature(keys.shape[2])).pow(self.reach)
        queries: Iterable[Tensor] | None = given
        rope, first = self.layer_context.rope, int(rows.positions[0].max()) + 1
        kept = {}
        if self.turning:
            kept["root"] = self._root(sample, places)
            sample = self._without(kept["root"], sample, places)
        if self.ahead and rope is not None:
            sample = rope.turn(sample, moves_ahead(places, first, self.ahead, stream(self.seed, "keys ahead")))
            if given is not None:
                moves = moves_ahead(at, first, self.ahead, stream(self.seed, "queries ahead"))
                queries = (rope.turn(of_head.float(), moves) for of_head in given)
        codes = self.subspaces_of(keys.shape[2])
        return kept | codes_of(sample, queries, weights, codes, self.bits, self.seed, self.additive)

    def _limit(self, tensors: dict[str, Tensor], rows: Rows) -> Tensor:
        """Return what codes miss of all but a share of the rows at most, `[H,1]` float32: see `coded_at`."""
        drawn = self.drawn(rows.keys[0])
        keys = self._without(tensors["root"], rows.keys[0][:, drawn], rows.positions[0, drawn])
        errors = keys.new_empty(1, *keys.shape[:2])
        turn = _turn_of_keys(tensors["turn"][None], tensors["centre"][None])
        nearest_codes.names(keys[None], tensors["centroids"][None], turn, errors)
        count = errors.shape[2]
        return errors[0].kthvalue(count - math.floor(self.kept_share * count), dim=1, keepdim=True).values

    def _root(self, keys: Tensor, at: Tensor) -> Tensor:
        """Return the mean `[H,D]` float32 of keys `[H,n,D]` before RoPE, 0 where that is not known."""
        rope = self.layer_context.rope
        return torch.zeros_like(keys[:, 0]) if rope is None else rope.turn(keys, -at).mean(1)

    def _without(self, root: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        """Return keys `[...,n,D]` less `root` `[...,D]` turned to their positions `at`, float32."""
        left, rope = keys.to(torch.float32, copy=True), self.layer_context.rope
        if rope is not None:
            rope.take_off(left, root, at)
        return left

    def append(self, rows: Rows) -> None:
        self._ranked = None  # storage may be replaced
        self.learn(rows)
        if not self.turning:
            self.extend(rows.keys)
            return
        self.at.append(rows.positions.int())
        first, errors = self.at.rows - rows.positions.shape[1], []
        for keys, at in zip(rows.keys.split(PART, 2), rows.positions.split(PART, 1), strict=True):
            codes, off = self.coded_at(keys, at)
            self.codes.append(codes.mT)
            if off is not None:
                errors.append(off.masked_fill_((at < 0)[:, None], -torch.inf))
        if self.kept_share:
            self._keep_missed(rows, torch.cat(errors, 2), first)

    def _keep_missed(self, rows: Rows, errors: Tensor, first: int) -> None:
        """Keep what codes miss of those of `rows`, coded from row `first` on, that have the largest errors `[B,H,n]`,
        where these are beyond the limit: of as many as a sequence has room for, by its rows that are no padding."""
        real = self.at.data >= 0
        held, due = (
            [math.ceil(self.kept_share * count) for count in part.sum(1).tolist()] for part in (real[:, :first], real)
        )
        room = torch.tensor(due) - torch.tensor(held)  # [B]
        values, places = errors.topk(int(room.max()), 2)  # [B,H,X]
        there = torch.arange(places.shape[2]) < room[:, None, None]
        beyond = (values > self.limit.data) & there.to(values.device)
        keys = rows.keys.gather(2, places[..., None].expand(-1, -1, -1, rows.keys.shape[3]))
        at = rows.positions[:, None].expand_as(errors).gather(2, places)
        codes = self.codes.data[..., first:].gather(3, places[:, :, None].expand(-1, -1, self.codes.full.shape[2], -1))
        missed = self.missed_of(keys, at, codes.mT).masked_fill_(~beyond[..., None], 0)
        records, earlier = packed(torch.where(beyond, places + first, -1), missed), self.missed_rows.rows
        stored = self.missed_rows.resize(math.ceil(self.kept_share * self.at.rows), records)
        stored[:, :, earlier : self.missed_rows.rows] = NO_RECORD
        for b, (begin, end) in enumerate(zip(held, due, strict=True)):
            stored[b, :, begin:end] = records[b, :, : end - begin]

    def coded_at(self, keys: Tensor, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return codes of keys `[B,H,n,D]` at positions `[B,n]` int64, as `encode` does; what is below 0 counts as 0.
        And return what they miss, `[B,H,n]` float32, the squared length of `missed_of`; None: nothing of it is kept."""
        if self.turning:
            keys = self._without(self.root.data, keys, at.clamp(min=0)[:, None])
        if not self.kept_share:
            return self.encode(keys), None
        errors = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
        return self.packed(keys, _turn_of_keys(self.turn.data, self.centre.data), errors).mT, errors

    def missed_of(self, keys: Tensor, at: Tensor, codes: Tensor) -> Tensor:
        """Return what codes `[B,H,n,R]` miss of the turned keys `[B,H,n,D]` at positions `[B,H,n]`, as `coded_at` takes
        them, `[B,H,n,D]` float32: its squared length is the mean square error of a logit over the metric's queries."""
        left = self._without(self.root.data, keys, at.clamp(min=0))
        turned = (left - self.centre.data[:, :, None]) @ self.turn.data.mT
        names = codebooks.unpaired(codes, self.subspaces_of(keys.shape[3])) if self.bits == 4 else codes
        return turned - codebooks.decoded(names, self.centroids.data.float().expand(len(keys), -1, -1, -1, -1))

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

    def encode(self, keys: Tensor) -> Tensor:
        turn = _turn_of_keys(self.turn.data, self.centre.data)
        if not self.additive:
            return self.packed(keys, turn).mT
        named = additive_codes.names(keys, self.centroids.data, turn).mT
        return codebooks.paired(named) if self.bits == 4 else named

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

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        found: Tensor = product_codes.logits(self.scaled_tables(query), self.coded(valid))
        if (beside := self.beside()) is not None:
            return found + self._products(query, beside)
        if not self.kept_share:
            return found
        return self._listed().added(found, query.float() / self.temperature(query.shape[3]))

    def _listed(self) -> MissedRows:
        """Return the rows that codes miss most."""
        return MissedRows(self.missed_rows.visible, self.back.visible)

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


def _turn_of_keys(turn: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the map of keys `[B,H,D,D]`, and what is added behind it: less what the mean key `[B,H,D]` is turned
    into."""
    return turn, -(turn @ centre[..., None])[..., 0]


def _check_missed(listed: MissedRows, count: int) -> None:
    """Refuse others than the rows below `count`, a row that is named twice, and numbers that are not finite:
    ValueError."""
    ids = listed.ids.sort(2).values
    if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= count):
        raise ValueError(
            f"missed_rows names rows {int(ids.min())} to {int(ids.max())}, of {count} rows it names 0 to {count - 1}"
        )
    if bool(((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any()):
        raise ValueError("missed_rows names a row twice")
    check_finite({"missed_rows": listed.missed()}, "missed_rows")
