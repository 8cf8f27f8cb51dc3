"""Which stored rows one decode step reads: the rows a method chose and the zones that every query reads.

Letters, used the same way everywhere: B sequences, H KV heads, G query heads per KV head, N stored rows, D head size,
S slots of a selection, Hs selection heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows chosen for each selection head, as S disjoint spans of consecutive rows.

    Args:
        start: `[B,Hs,S]` int32, first row of each span; row 0 is the first row the selector was shown.
        length: `[B,Hs,S]` int32, rows in the span, 0 to `span`; 0 marks an unused slot, whose `start` means nothing.
        span: longest span, a power of two; a compile-time constant of the GPU kernel.
        scanned: `[B,Hs]` int64, rows or representatives (page bounds, centroids) scored to choose, or None.
        scan_bytes: `[B,H]` int64, bytes of index, metadata and model read to choose, per KV head (a query group
            shares one pass over its KV head's metadata), or None.
        whole: whether every span that is used has `span` rows and begins at a multiple of `span`: whole pages, which
            who reads by page need not take apart. A property of the method, not of what the tensors hold.
        bias: `[B,Hs,S]` float32, added to the logit of every row of the slot, after the scale: a natural logarithm, so
            that a row read with probability p stands for 1/p rows with a bias of -log p. Finite where a slot is used;
            of an unused one it means nothing. None: no row has one.

    `Hs` is H (one choice for a whole query group) or H*G (one per query head, head `h*G + g`). Shapes depend on the
    budget and on how many rows are stored, never on what the tensors hold, so that no step waits for the device.

    Raises:
        ValueError: wrong shape, dtype or span. What the tensors hold is not inspected (that would synchronise).
    """

    start: Tensor
    length: Tensor
    span: int
    scanned: Tensor | None = None
    scan_bytes: Tensor | None = None
    whole: bool = False
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.start.ndim != 3 or self.start.shape != self.length.shape:
            raise ValueError(
                f"a selection's start and length are both [B,Hs,S], got {list(self.start.shape)} and "
                f"{list(self.length.shape)}"
            )
        if self.start.dtype != torch.int32 or self.length.dtype != torch.int32:
            raise ValueError(
                f"a selection's start and length are int32, got {self.start.dtype} and {self.length.dtype}"
            )
        if self.span < 1 or self.span & (self.span - 1):
            raise ValueError(f"a selection's span is a power of two (1, 2, 4, ...), got {self.span}")
        bias = self.bias
        if bias is not None and (bias.shape, bias.dtype) != (self.start.shape, torch.float32):
            raise ValueError(
                f"a selection's bias is float32 [B,Hs,S] = {list(self.start.shape)}, got {bias.dtype} "
                f"{list(bias.shape)}"
            )

    @classmethod
    def none(cls, batch: int, heads: int, device: torch.device | str = "cpu") -> Selection:
        """Select nothing beyond the sink and the window, for H = `heads` KV heads: zero slots."""
        empty = torch.zeros(batch, heads, 0, dtype=torch.int32, device=device)
        nothing = torch.zeros(batch, heads, dtype=torch.int64, device=device)
        return cls(empty, empty, 1, nothing, nothing, whole=True)

    @classmethod
    def tokens(
        cls,
        ids: Tensor,
        scanned: Tensor | None = None,
        scan_bytes: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Selection:
        """Select single rows: `ids` `[B,Hs,S]` of any integer dtype, distinct within a head; a negative id is
        unused."""
        return cls(ids.clamp(min=0).int(), (ids >= 0).int(), 1, scanned, scan_bytes, whole=True, bias=bias)

    @classmethod
    def pages(
        cls,
        ids: Tensor,
        page: int,
        scanned: Tensor | None = None,
        scan_bytes: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Selection:
        """Select whole pages of `page` rows (a power of two): `ids` `[B,Hs,S]`, distinct; a negative id is unused."""
        start, length = (ids.clamp(min=0) * page).int(), (ids >= 0).int() * page
        return cls(start, length, page, scanned, scan_bytes, whole=True, bias=bias)

    @classmethod
    def runs(
        cls,
        start: Tensor,
        length: Tensor,
        span: int,
        budget: int,
        scanned: Tensor | None = None,
        scan_bytes: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Selection:
        """Select runs of any length, best first, cut into spans and stopped at `budget` rows.

        `start`, `length` are `[B,Hs,R]` of any integer dtype; runs of one head are disjoint. The selection has
        `budget // span + R` slots: a run ends in at most one partial span, so every row within the budget has a slot.
        `bias` `[B,Hs,R]` is that of a run's rows, so of all spans that it is cut into.
        """
        if span < 1 or not length.shape[-1]:
            return cls(start.int(), length.int(), span, scanned, scan_bytes, bias=bias)
        length = length.long()
        before = length.cumsum(-1) - length  # [B,Hs,R] rows of the better runs
        length = length.minimum((budget - before).clamp(min=0))
        spans = (length + span - 1).div(span, rounding_mode="floor")
        ends = spans.cumsum(-1)  # [B,Hs,R] slots up to and with each run
        runs = length.shape[-1]
        slots = torch.arange(budget // span + runs, device=length.device).expand(*length.shape[:2], -1).contiguous()
        run = torch.searchsorted(ends.contiguous(), slots, right=True)  # [B,Hs,S]; `runs` = past the last one
        used, run = run < runs, run.clamp(max=runs - 1)
        offset = (slots - (ends - spans).gather(-1, run)) * span
        left = (length.gather(-1, run) - offset).clamp(0, span)
        first = (start.long().gather(-1, run) + offset).int()
        bias = None if bias is None else bias.gather(-1, run)
        return cls(first, (left * used).int(), span, scanned, scan_bytes, bias=bias)

    @property
    def rows(self) -> Tensor:
        """`[B,Hs,S*span]` int64: every selected row, -1 in the places of a span that are not used."""
        offset = torch.arange(self.span, device=self.start.device)
        row = self.start.long()[..., None] + offset
        return torch.where(offset < self.length[..., None], row, -1).flatten(2)

    @property
    def attended(self) -> Tensor:
        """`[B,Hs]` int64: rows selected."""
        return self.length.sum(-1)

    def distinct(self, heads: int, rows: int) -> Tensor:
        """Return `[B,H]` int64: rows selected, each once for all selection heads of one of the `heads` KV heads.

        `rows`: how many there are to select from.
        """
        if self.start.shape[1] == heads:
            return self.attended  # spans are disjoint
        return self.mask(rows).unflatten(1, (heads, -1)).any(2).sum(-1)

    def bias_bytes(self, heads: int) -> Tensor:
        """Return `[B,H]` int64: bytes of the biases of the slots in use, for each of the `heads` KV heads."""
        used = (self.length > 0).sum(-1).unflatten(1, (heads, -1)).sum(-1)
        return used * (0 if self.bias is None else self.bias.element_size())

    def mask(self, rows: int) -> Tensor:
        """Return `[B,Hs,rows]` bool: which of the first `rows` rows are selected."""
        ids = self.rows
        out = torch.zeros(*ids.shape[:2], rows + 1, dtype=torch.bool, device=ids.device)
        return out.scatter_(2, torch.where((ids >= 0) & (ids < rows), ids, rows), True)[..., :rows]

    def row_bias(self, rows: int) -> Tensor:
        """Return `[B,Hs,rows]` float32: the bias of each of the first `rows` rows, 0 where it has none."""
        ids = self.rows
        out = torch.zeros(*ids.shape[:2], rows + 1, device=ids.device)
        if self.bias is not None:
            place = torch.where((ids >= 0) & (ids < rows), ids, rows)
            out = out.scatter(2, place, self.bias.repeat_interleave(self.span, -1))
        return out[..., :rows]


class Chosen:
    """What a step chose, whole spans, as numbers of which a `Selection` is made when somebody asks: few steps' are.

    Args:
        numbers: int32, of which the first are start and length, `[2,B,Hs,S]`.
        sizes: 2, B, Hs and S.
        span: rows of every span that is used.
    """

    __slots__ = ("_numbers", "_selection", "_span", "sizes")

    def __init__(self, numbers: Tensor, sizes: tuple[int, ...], span: int) -> None:
        self._numbers, self.sizes, self._span = numbers, sizes, span
        self._selection: Selection | None = None

    @classmethod
    def of(cls, selection: Selection) -> Chosen:
        """Return what stands for a selection that is there."""
        chosen = cls(selection.start, (2, *selection.start.shape), selection.span)
        chosen._selection = selection
        return chosen

    @property
    def selection(self) -> Selection:
        """The selection, the same at each call."""
        if self._selection is None:
            start, length = self._numbers.view(-1)[: math.prod(self.sizes)].view(self.sizes).unbind()
            self._selection = Selection(start, length, self._span, whole=True)
        return self._selection


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """A selection, and what a method estimates that it weighs: what a budget by mass is cut by (`mass.cut`).

    Args:
        selection: as `select` returns it, of S slots.
        weights: `[B,H*G,S]` float32, for every query head: natural logarithm of the sum of the exponentiated logits of
            a slot's rows, -inf for a slot that is not used. A bias is in it.
        rest: `[B,H*G]` float32, the same of all sealed rows that the selection does not name; -inf for none.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """

    selection: Selection
    weights: Tensor
    rest: Tensor

    def __post_init__(self) -> None:
        (batch, heads, slots), weights, rest = self.selection.start.shape, self.weights, self.rest
        fits = weights.ndim == 3 and (weights.shape[0], weights.shape[2]) == (batch, slots)
        if not fits or weights.shape[1] % max(heads, 1) or weights.shape[:2] != rest.shape:
            raise ValueError(
                f"weights of a selection {[batch, heads, slots]} are [B,H*G,S] and the rest's [B,H*G], got "
                f"{list(weights.shape)} and {list(rest.shape)}"
            )
        if weights.dtype != torch.float32 or rest.dtype != torch.float32:
            raise ValueError(
                f"weights of a selection and of the rest are float32, got {weights.dtype} and {rest.dtype}"
            )

    @classmethod
    def of(cls, selection: Selection, logits: Tensor, page: int = 1) -> Weighed:
        """Weigh by an estimate for every row, or every page.

        Args:
            selection: every slot in use is one of the pages, or one row where `page` is 1.
            logits: `[B,H,G,P]` of all sealed rows, -inf for what is not real; of a page, the logarithm of the mean of
                its rows' exponentiated logits.
            page: rows of each of them.
        """
        _, heads, group, pages = logits.shape
        each = torch.nn.functional.pad(logits.float().flatten(1, 2), (0, 1), value=-torch.inf)  # [B,H*G,P+1]
        at = torch.where(selection.length > 0, selection.start // page, pages).long()  # [B,Hs,S]
        shared = heads * group // at.shape[1]
        at = at[:, :, None].expand(-1, -1, shared, -1).flatten(1, 2)
        weights = each.gather(2, at) + math.log(page)
        rest = each.scatter(2, at, -torch.inf).logsumexp(-1) + math.log(page)
        return cls(selection, weights, rest)

    @classmethod
    def nothing(cls, query: Tensor) -> Weighed:
        """Return zero slots for a query `[B,H,G,D]`, where nothing is sealed."""
        batch, heads, group, _ = query.shape
        weights = torch.zeros(batch, heads * group, 0, device=query.device)
        rest = torch.full((batch, heads * group), -torch.inf, device=query.device)
        return cls(Selection.none(batch, heads, query.device), weights, rest)


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Rows that a selector owns and that stand for what a step does not read, such as the mean of those values.

    A step attends to them as to stored rows, and merges both by their log-sum-exp.

    Args:
        keys, values: `[B,H,M,D]`, in the query's dtype, on the device of the sealed rows. Rows that nobody names may
            hold anything.
        selection: which of them each head attends to, counted from row 0, with a bias where a row stands for many: one
            with a zero key and a bias of log w has the weight w before the softmax's division. What making the rows
            read is told in `scan_bytes` of the step's selection, not here.

    As of a selection, shapes depend on the budget and on how many rows are stored alone.

    Raises:
        ValueError: shapes that do not fit each other.
    """

    keys: Tensor
    values: Tensor
    selection: Selection

    def __post_init__(self) -> None:
        chosen = self.selection.start.shape
        if self.keys.ndim != 4 or self.keys.shape != self.values.shape:
            raise ValueError(
                f"a tail's keys and values are both [B,H,M,D], got {list(self.keys.shape)} and "
                f"{list(self.values.shape)}"
            )
        batch, heads = self.keys.shape[:2]
        if chosen[0] != batch or chosen[1] % heads:
            raise ValueError(
                f"a tail's selection is [B,Hs,S] with B = {batch} and Hs = {heads} (per KV head) or a multiple of it "
                f"(per query head), got {list(chosen)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """The zones of the stored rows, `sink | sealed | recent`, as data: every read of a kernel is bounded by them.

    A query reads rows `[0, sink)`, the selected rows of `[base, sealed)`, and rows `[sealed, rows)`.

    Args:
        sink: `[B]` int32, rows of the sink.
        base: the row where the sealed zone begins, row 0 of a selection; at least every `sink`.
        sealed: `[B]` int32, end of the sealed zone.
        rows: `[B]` int32, end of the recent rows.

    They are tensors so that lengths may differ in a batch and grow inside a captured CUDA graph.
    """

    sink: Tensor
    base: int
    sealed: Tensor
    rows: Tensor

    @classmethod
    def of(
        cls, batch: int, rows: int, sink: int = 0, sealed: int | None = None, device: torch.device | str = "cpu"
    ) -> Bounds:
        """Make the same zones for every sequence; `sealed=None`: all rows after the sink are selectable, none
        recent."""

        def full(n: int) -> Tensor:
            return torch.full((batch,), n, dtype=torch.int32, device=device)

        return cls(full(sink), sink, full(rows if sealed is None else sealed), full(rows))

    def dense(self, rows: int) -> Tensor:
        """Return `[B,rows]` bool: rows that every query reads."""
        row = torch.arange(rows, device=self.rows.device)
        sink, sealed, end = self.sink[:, None], self.sealed[:, None], self.rows[:, None]
        return (row < sink) | ((row >= sealed) & (row < end))
