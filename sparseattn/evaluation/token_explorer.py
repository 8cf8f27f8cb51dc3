"""What single tokens attend to, row by row, and which of these rows methods read: for people to look at.

Everything is what `evaluation.replay.evaluate_budgets` measures as it replays a trace: this keeps the rows that it
looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparseattn.core.budget import Budget
from sparseattn.evaluation.attention_stats import rows_holding
from sparseattn.evaluation.replay import ReplayedStep, evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay, check_replay, replay_device, usable_layers
from sparseattn.evaluation.step_measures import rows_read
from sparseattn.roles.roles import Roles, as_method
from sparseattn.selectors.base import Selector
from sparseattn.traces.trace import Trace

DECADES = 5  # of weights that levels tell apart: what is below 1e-5 of a head's attention has level 0
SHARE = 0.9  # of a head's attention, that the needed rows hold
MOST = 1 << 28  # bytes of levels at most, which are in memory at once
TOLD = ("relative_error", "mass", "indexed_mass", "recovered", "attended")  # measures that are kept of a step


@dataclass(frozen=True, eq=False)
class TokenReading:
    """What one method read at every token.

    Args:
        label: of the method.
        rows: `[Q,L,H*G,ceil(T/8)]` uint8, a bit a row of the trace, the first in the lowest bit: whether it is read.
        measured: measure -> `[Q,L,H*G]` float64, of `TOLD`.
        page: rows of a page, where the method reads whole pages of rows as the trace has them; else 1.
    """

    label: str
    rows: Tensor = field(repr=False)
    measured: dict[str, Tensor] = field(repr=False)
    page: int = 1


@dataclass(frozen=True, eq=False)
class Exploration:
    """Full attention of the last Q tokens of a trace, and what methods read of it.

    Args:
        trace: its name.
        tokens: Q numbers of tokens, counted from the trace's first: those that ask.
        layers: L numbers of model layers.
        heads, group: H*G query heads of a layer; G of them share a KV head.
        sink, window: rows that every method reads.
        budget: rows that a method may read besides.
        levels: `[Q,L,H*G,T]` uint8, full attention's weight of each row, see `level`.
        needed: `[Q,L,H*G]` int64, the fewest rows that hold `SHARE` of the attention.
        readings: of each method.
    """

    trace: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    heads: int
    group: int
    sink: int
    window: int
    budget: Budget
    levels: Tensor = field(repr=False)
    needed: Tensor = field(repr=False)
    readings: tuple[TokenReading, ...] = field(repr=False)


def explore(
    trace: Trace,
    selectors: Sequence[Selector | Roles | str],
    budget: Budget,
    *,
    queries: int = 8,
    sink: int = 4,
    window: int = 64,
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Exploration:
    """Replays the last tokens of a trace through each selector and keeps which rows they read.

    Args:
        trace: of a model.
        selectors: one or more, of different labels.
        budget: rows beyond sink and window, as in `evaluate`.
        queries: tokens at the end of the trace that ask.
        sink, window, layers, device: as in `evaluate`.
        progress: called with 1 after every token of a layer and selector.

    Raises:
        ValueError: what `evaluate` refuses, layers of different numbers of heads, two selectors of one label, or more
            than `MOST` bytes of levels.
    """
    chosen = usable_layers(trace, layers)
    how = Replay(sink, window, last=queries, layers=chosen, device=device)
    methods = [as_method(selector) for selector in selectors]
    if not methods or len({method.label() for method in methods}) < len(methods):
        raise ValueError(f"selectors are one or more of different labels, got {[method.label() for method in methods]}")
    for method in methods:
        replay_device(method, device)
        check_replay(trace, [budget], method, how)
    heads, group = _heads(trace, chosen, queries)
    shape = (queries, len(chosen), heads * group)
    levels = torch.zeros(*shape, trace.tokens, dtype=torch.uint8)
    needed = torch.zeros(shape, dtype=torch.int64)
    readings = []
    for i, method in enumerate(methods):
        noted = _Noted(trace, chosen, queries, group, shape)
        watch = functools.partial(noted.watch, levels=None if i else levels, needed=None if i else needed)
        evaluate_budgets(trace, method, [budget], how, progress=progress, watch=watch)
        readings.append(TokenReading(method.label(), noted.rows, noted.measured, noted.page or 1))
    last = tuple(range(trace.tokens - queries, trace.tokens))
    return Exploration(
        trace.name, last, tuple(chosen), heads * group, group, sink, window, budget, levels, needed, tuple(readings)
    )


def _heads(trace: Trace, layers: Sequence[int], queries: int) -> tuple[int, int]:
    """KV heads of the layers, and query heads of each; ValueError where layers differ, or hold too much to explore."""
    shapes = {(trace.shapes[index].heads, trace.shapes[index].group) for index in layers}
    if len(shapes) > 1:
        raise ValueError(f"layers {layers} have different numbers of heads, {sorted(shapes)}: name layers that agree")
    ((heads, group),) = shapes
    size = queries * len(layers) * heads * group * trace.tokens
    if size > MOST:
        raise ValueError(
            f"{queries} tokens, {len(layers)} layers and {heads * group} heads of {trace.tokens:,} rows are "
            f"{size / 2**20:,.0f} MiB of weights, at most {MOST >> 20} are explored: name fewer layers or tokens"
        )
    return heads, group


def level(weights: Tensor) -> Tensor:
    """Shares of the attention as 8 bits, even in their logarithm: 255 for all of it, 0 below the last of `DECADES`.

    `10 ** (DECADES * (level / 255 - 1))` is the share again, within 3 %.
    """
    return (255 * (1 + weights.clamp(min=1e-30).log10() / DECADES)).round().clamp(0, 255).to(torch.uint8)


def packed(bits: Tensor) -> Tensor:
    """Bits `[...,N]` bool as bytes `[...,ceil(N/8)]` uint8, the first in the lowest bit."""
    bits = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)


class _Noted:
    """What one method's replay leaves."""

    def __init__(self, trace: Trace, layers: Sequence[int], queries: int, group: int, shape: tuple[int, ...]) -> None:
        self.rows = torch.zeros(*shape, -(-trace.tokens // 8), dtype=torch.uint8)
        self.measured = {name: torch.zeros(shape, dtype=torch.float64) for name in TOLD}
        self.page: int | None = None  # of every step so far; None: there was none
        self._trace, self._layers, self._first, self._group = trace, list(layers), trace.tokens - queries, group
        self._loaded: tuple[int, Tensor] | None = None  # a layer's number and its keys and values [H,T,2D]

    def watch(self, step: ReplayedStep, levels: Tensor | None, needed: Tensor | None) -> None:
        keys, values, _, reads = rows_read(step.query, step.cache, step.selection)
        logits = (step.query @ keys.mT * step.scale)[0]  # [H,G,N]
        places, rows = torch.cat([keys[0], values[0]], -1).cpu(), self._of_layer(step.layer)
        which = slice(None) if step.heads is None else list(step.heads.which)
        token = tokens_of(places, rows[which, : step.token + 1])  # [H,N]
        if token is not None:
            token = token[:, None].expand(-1, self._group, -1)

        def in_order(x: Tensor) -> Tensor:
            """`[H,G,N]` of stored rows as the trace has them, `[H*G,N]`."""
            x = x.cpu()
            return (x if token is None else torch.empty_like(x).scatter_(-1, token, x)).flatten(0, 1)

        at = (step.token - self._first, self._layers.index(step.layer))
        heads = torch.arange(self.rows.shape[2]).view(-1, self._group)[which].flatten()
        packed_rows = packed(in_order(reads[0]))
        self.rows[at][heads, : packed_rows.shape[-1]] = packed_rows
        for name, into in self.measured.items():
            into[at][heads] = step.measured[name].cpu()
        span = step.selection.span if step.selection.whole and token is None else 1
        self.page = span if self.page in (None, span) else 1
        if levels is not None and needed is not None:
            weights = in_order(logits.softmax(-1))
            levels[at][heads, : weights.shape[-1]] = level(weights)
            needed[at][heads] = rows_holding(weights, SHARE).long()

    def _of_layer(self, index: int) -> Tensor:
        if self._loaded is None or self._loaded[0] != index:
            self._trace.verify(index)
            layer = self._trace.layer(index)
            self._loaded = index, torch.cat([layer.keys.float(), layer.values.float()], -1)
        return self._loaded[1]


def tokens_of(stored: Tensor, rows: Tensor) -> Tensor | None:
    """Which row of a trace each stored row is, as a selector may have had a cache reorder them; None: all in order.

    Args:
        stored, rows: `[H,N,D]`, the same rows in any order; of rows that are alike either may be named.

    Returns:
        `[H,N]` int64.

    Raises:
        ValueError: they are not the same rows.
    """
    if torch.equal(stored, rows):
        return None
    along = torch.randn(rows.shape[-1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs, ours = ((x.double() @ along)[..., 0].argsort(-1) for x in (rows, stored))  # [H,N]
    places = torch.empty_like(ours).scatter_(-1, ours, theirs)
    if not torch.equal(rows.gather(1, places[..., None].expand_as(rows)), stored):
        raise ValueError("a cache holds other rows than the trace, so nobody can say which of its tokens were read")
    return places
