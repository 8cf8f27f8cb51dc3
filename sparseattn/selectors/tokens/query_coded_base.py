"""What `QueryPQ` keeps of keys: codes in the metric of the prompt's queries, and what codes miss of some.

PQCache keeps keys as product codes, https://arxiv.org/abs/2407.12820; A2ATS weighs them by the queries,
https://arxiv.org/abs/2502.12665; the rotation is OPQ's, https://doi.org/10.1109/TPAMI.2013.240.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.kernels import codebooks
from sparseattn.kernels.additive_codes import dispatch as additive_codes
from sparseattn.kernels.nearest_codes import dispatch as nearest_codes
from sparseattn.kernels.product_codes.codes import MOST, MOST_BESIDE
from sparseattn.kernels.product_codes.missed_rows import NO_RECORD, MissedRows, packed, record_bytes
from sparseattn.selectors.abilities import LearnsFromQueries
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least, check_share, half, into_range, warn_of_keys_as_queries
from sparseattn.selectors.parameters.query_metric import codes_of, moves_ahead, reached
from sparseattn.selectors.saved_state import Loaded, check_equal, check_finite, check_no_order, check_tensors
from sparseattn.selectors.tokens.calibrated_base import PROMPT, FromCalibration
from sparseattn.selectors.tokens.product_base import ProductCoded
from sparseattn.utils.hashing import stream, tensors_hash

METRICS = ("own", "keys")
MEANS = ("auto", "plain", "rope")
MOST_ADDED = 4096  # centroids whose products with each other a seal makes
MISSED = 0.02  # share of rows of which what codes miss is kept by default
PART = 1 << 16  # rows that are coded at a time


class QueryCoded(LearnsFromQueries, FromCalibration, ProductCoded):
    """Keeps, of every key, its code in the metric of the prompt's queries. The arguments are those of `QueryPQ`."""

    learns_once = True
    choices = (4, 8)
    channels = 2
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
        self.learn(rows)
        if not self.turning:
            self.codes.append(self.encode(rows.keys).mT)
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

    def encode(self, keys: Tensor) -> Tensor:
        turn = _turn_of_keys(self.turn.data, self.centre.data)
        if not self.additive:
            return self.packed(keys, turn).mT
        named = additive_codes.names(keys, self.centroids.data, turn).mT
        return codebooks.paired(named) if self.bits == 4 else named


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
