"""How well a selector finds the rows that matter, and what it reads to do so: a replay of real queries.

The last tokens of a trace are decoded one by one, each against the rows before it, and every step is compared with full
attention. The measures of the papers side by side: recall@k against exact top-k (RetrievalAttention,
https://arxiv.org/abs/2409.10516; Quest, https://arxiv.org/abs/2406.10774), recovered attention mass
(RetrievalAttention's recovery ratio), error of the output (SAAP, https://arxiv.org/abs/2502.08246, Figure 5), and the
three things that papers call selectivity: rows scanned, rows attended, bytes read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import Budget, parse_budget
from sparseattn.core.context import Heads, LayerContext, RecordedIndex
from sparseattn.core.layer_choices import Board
from sparseattn.core.selection import Selection
from sparseattn.evaluation.full_attention import LIMIT, FullAttention, FullAttentions
from sparseattn.evaluation.replay_activity import replay_activity
from sparseattn.evaluation.replay_settings import (
    Replay,
    ReplayOptions,
    check_replay,
    is_trace,
    replay_device,
    usable_layers,
)
from sparseattn.evaluation.result import Evaluation
from sparseattn.evaluation.step_measures import COUNTED, MEASURES, check_steps, compare
from sparseattn.roles.role import Share, kept_label, together
from sparseattn.roles.roles import Roles, as_method, shares_of
from sparseattn.selectors.abilities import LooksAhead
from sparseattn.selectors.base import Selector
from sparseattn.traces.trace import Trace, TraceLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """One decoded token of a layer, or of the heads in it that share a method, as a replay measured it.

    Args:
        layer: of the model.
        heads: which of the layer's KV heads these are; None: all of them.
        token: whose step it is, counted from the trace's first.
        query: `[1,H,G,D]` float32.
        cache, selection, scale: as `compare` takes them.
        measured: measure -> `[H*G]` float64, what `compare` gave.
    """

    layer: int
    heads: Heads | None
    token: int
    query: Tensor
    cache: KVCache
    selection: Selection
    scale: float
    measured: dict[str, Tensor]


def evaluate(
    trace: Trace,
    selector: Selector | Roles | str,
    budget: Budget,
    *,
    steps: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    **settings: Unpack[ReplayOptions],
) -> Evaluation:
    """Replay the last tokens of a trace through a selector and compare every step with full attention.

    Full attention is over all rows of the trace, those that a selector has dropped for good among them: nothing is
    freed here (`KVCache.compact`), so that eviction is judged by what it lacks.

    Args:
        trace: queries, keys and values of a model (`Trace.open`, `synthetic`, `builtin_trace`).
        selector: an instance, or a text for `make_selector`; or roles, in which the layers measured are named.
        budget: rows beyond sink and window: an int, a share of the context (float or "5%"), or None for all. Roles that
            have a budget of their own keep it.
        steps: measures to keep token by token too (`Evaluation.steps`), such as "recall@10".
        progress: called with 1 after every decoded token of a layer.
        settings: the fields of `Replay`: `sink=4`, `window=64`, `last=32`, `layers`, `seal`, `indexes`, `device`,
            `rows`, `every`. With `rows` the label says so, and bytes are those that the codec reads, over those of the
            whole cache as the trace has it.

    Raises:
        ValueError: settings that leave no row to select, a layer that is not there or slides, an unfit budget, a
            device that is not there or that the selector cannot work on, or no measure of single tokens in `steps`.
        ContractError: the selector named rows that it must not (`selection_checks.check`).
    """
    return evaluate_budgets(trace, selector, [budget], Replay(**settings), steps=steps, progress=progress)[0]


def evaluate_budgets(
    trace: Trace,
    selector: Selector | Roles | str,
    budgets: Sequence[Budget],
    how: Replay | None = None,
    *,
    steps: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    watch: Callable[[ReplayedStep], None] | None = None,
    full_attentions: FullAttentions | None = None,
) -> list[Evaluation]:
    """`evaluate` at several budgets; the prefill is indexed once and cloned for each of them.

    `watch` is shown every step as it is measured. `full_attentions` keeps what full attention gave at each step; pass
    the same one for several methods on a trace, and only the first computes it.
    """
    is_trace(trace)
    check_steps(steps)
    how = how or Replay()
    method, budgets = as_method(selector), [parse_budget(budget) for budget in budgets]
    if isinstance(method, Selector):
        how = replace(how, seal=how.seal_rows(method))
    place = replay_device(method, how.device)
    how = replace(how, layers=usable_layers(trace, how.layers), device=place)
    check_replay(trace, budgets, method, how)
    layers = list(how.layers or ())
    kept = full_attentions or FullAttentions(LIMIT if len(budgets) > 1 else 0)
    run = _Run(trace, how, place, budgets, steps, progress, watch, kept, Board())
    per_layer = [run.layer(index, shares_of(method, index, trace.shapes[index].heads)) for index in layers]
    facts: dict[str, Any] = {
        "sink": how.sink,
        "window": how.window,
        "seal": how.seal,
        "last": how.last,
        "tokens": trace.tokens,
        "device": str(place),
        "trace_dtype": str(trace.dtype).removeprefix("torch."),
        "replay_dtype": "float32",  # of the arithmetic; bytes are counted as a cache of `trace_dtype` has them
    }
    if how.every > 1:
        facts["every"] = how.every
    if how.codec is not None:
        facts["codec"] = str(how.codec)
    evaluations = []
    for i, budget in enumerate(budgets):
        measured = {name: torch.stack([heads[i][name] for heads in per_layer]) for name in MEASURES}
        by_step = {name: torch.stack([heads[i][f"{name} by step"] for heads in per_layer]) for name in steps}
        activity = replay_activity(trace, layers, measured, how.last, how.every)
        named = trace.name, repr(method), kept_label(method.label(), how.codec), budget
        evaluations.append(Evaluation(*named, facts, tuple(layers), measured, by_step, activity))
    return evaluations


@dataclass(frozen=True, eq=False)
class _Run:
    """A replay of one method at several budgets. Args: as in `evaluate_budgets`; board: what its layers tell others."""

    trace: Trace
    how: Replay
    place: torch.device
    budgets: Sequence[Budget]
    steps: Sequence[str]
    progress: Callable[[int], None] | None
    watch: Callable[[ReplayedStep], None] | None
    full_attentions: FullAttentions
    board: Board

    def layer(self, index: int, shares: Sequence[Share]) -> list[dict[str, Tensor]]:
        """Return the measures of a layer at each budget, see `_of_layer`; `shares`: which heads have which method."""
        self.trace.verify(index)  # a changed bit would change what is measured, and nobody would see it
        layer = _on(self.place, self.trace.layer(index))
        parts: list[list[dict[str, Tensor]]] = []  # [share][budget]
        for share in shares:
            selector = share.fresh(
                LayerContext(
                    index,
                    self.trace.depth,
                    rope=layer.rope,
                    scale=layer.scale,
                    key_bytes=self.trace.dtype.itemsize,
                    board=self.board,
                    native=self.recorded(layer),
                )
            )
            cache = self.how.cache(selector)
            ahead = None if layer.ahead is None else share.of(layer.ahead, 0)
            query, keys, values = (share.of(rows, 0) for rows in (layer.query, layer.keys, layer.values))
            part = replace(layer, query=query, keys=keys, values=values, ahead=ahead)
            append_rows(cache, part, self.positions, 0, self.trace.tokens - self.how.last)
            cache.seal()
            counted = self.progress if share is shares[-1] else None  # a token of a layer counts once
            parts.append(self.each_budget(cache, part, [share.budget(budget) for budget in self.budgets], counted))
        return [_of_layer(shares, measured) for measured in zip(*parts, strict=True)]

    def recorded(self, layer: TraceLayer) -> RecordedIndex | None:
        """Return what the layer's own index chose, by positions; None where the trace holds nothing of it."""
        if layer.native is None:
            return None
        rows, queries = layer.native.long(), layer.query.shape[2]
        at = torch.where(rows < 0, -1, self.positions[rows.clamp(min=0)])
        row_bytes = self.trace.meta.get("native_row_bytes", {}).get(str(layer.index))
        return RecordedIndex(at, int(self.positions[len(self.positions) - queries]), row_bytes)

    @functools.cached_property
    def positions(self) -> Tensor:
        """`[T]`, where tokens are replayed."""
        return self.trace.positions.to(self.place)

    def each_budget(
        self, cache: KVCache, layer: TraceLayer, budgets: Sequence[Budget], progress: Callable[[int], None] | None
    ) -> list[dict[str, Tensor]]:
        """Return `decoded` at each budget, once where it is the same, as where a role has one of its own."""
        measured: list[dict[str, Tensor]] = []
        board = cache.selector.layer_context.board
        for i, budget in enumerate(budgets):
            if i and repr(budget) == repr(budgets[0]) and not (board is not None and cache.selector.layer in board):
                measured.append(measured[0])
                for _ in range(self.how.last):
                    if progress is not None:
                        progress(1)
            else:
                measured.append(self.decoded(cache.clone(), layer, budget, i, progress))
        return measured

    def decoded(
        self, cache: KVCache, layer: TraceLayer, budget: Budget, turn: int, progress: Callable[[int], None] | None
    ) -> dict[str, Tensor]:
        """Return measure -> `[H*G]` float64, the mean over the tokens measured; with "by step" behind it `[H*G,T]`
        float32 of each.

        turn: which of the budgets it is, by which layers find each other's choices.
        """
        total: dict[str, Tensor] = {}
        series: dict[str, list[Tensor]] = {name: [] for name in self.steps}
        tokens, last = self.trace.tokens, self.how.last
        for t in range(tokens - last, tokens):
            append_rows(cache, layer, self.positions, t, t + 1)
            # [1,H,G,D]; a trace may hold the last queries only. A copy, so that no method can change the trace.
            query = layer.query[None, :, :, t - tokens].to(torch.float32, copy=True)
            input_checks.check_finite(query=query)
            if cache.selector.find(LooksAhead):
                assert layer.ahead is not None  # check_replay
                cache.search.foresee(layer.ahead[None, :, :, t - tokens].float())
            if (board := cache.selector.layer_context.board) is not None:
                board.step = turn, t
            selection = cache.select(query, budget)
            measured = (t - tokens + last + 1) % self.how.every == 0
            if progress is not None:
                progress(1)
            if not (measured or cache.search.observed):
                continue
            full = functools.partial(self._full_attention, cache, layer, t, query)
            step = compare(query, cache, selection, layer.scale, full)  # which tells methods that observe
            if not measured:
                continue
            if self.watch is not None:
                heads = cache.selector.layer_context.heads
                self.watch(ReplayedStep(layer.index, heads, t, query, cache, selection, layer.scale, step))
            for name, values in series.items():
                values.append(step[name].float())
            for name, value in step.items():
                if name in COUNTED:
                    value = torch.where(step[COUNTED[name]] > 0, value * step[COUNTED[name]], 0.0)
                total[name] = total[name] + value if name in total else value
        count = last // self.how.every
        means = {name: value / (total[COUNTED[name]] if name in COUNTED else count) for name, value in total.items()}
        means |= {f"{name} by step": torch.stack(values, -1) for name, values in series.items()}
        return {name: value.cpu() for name, value in means.items()}

    def _full_attention(
        self, cache: KVCache, layer: TraceLayer, token: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> FullAttention:
        """Return full attention of a token's query over the rows of a layer's heads that a cache has.

        It is the same for every method, but where a method stores rows in an order of its own.
        """
        compute = functools.partial(FullAttention.of, query, keys, values, layer.scale)
        if not cache.stored.as_they_came:
            return compute()
        step = layer.index, cache.selector.layer_context.heads, token, self.place
        return self.full_attentions.at(self.trace, step, compute)


def _of_layer(shares: Sequence[Share], parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Measure -> `[H*G]`, and `[H*G,T]` by step, of what the shares of a layer's KV heads gave, each `[h*G,..]`."""
    heads = [1 if share.heads is None else len(share.heads.which) for share in shares]  # one share: its rows stay as is
    return {
        name: together(shares, [part[name].view(h, -1) for h, part in zip(heads, parts, strict=True)], 0).view(
            -1, *parts[0][name].shape[1:]
        )
        for name in parts[0]
    }


def _on(device: torch.device, layer: TraceLayer) -> TraceLayer:
    """Return the layer's rows on a device."""
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in layer.tensors.items()}
    return replace(layer, **moved)


def append_rows(cache: KVCache, layer: TraceLayer, positions: Tensor, start: int, stop: int) -> None:
    """Store the rows `start` to `stop` of a trace's layer, with the queries that the cache learns from."""
    learns = cache.learns
    lacking = len(positions) - layer.query.shape[2]  # as in `check_replay`
    bounds = (start, lacking, stop) if learns and start < lacking < stop else (start, stop)
    for low, high in itertools.pairwise(bounds):
        queries, rows = None, slice(low, high)
        if learns and low < lacking:  # not looked at
            heads, group, _, size = layer.query.shape
            queries = layer.keys.new_zeros(1, dtype=torch.float32).expand(1, heads, group, high - low, size)
        elif learns:
            queries = layer.query[None, :, :, low - lacking : high - lacking].float()
        kept = layer.keys[None, :, rows].float(), layer.values[None, :, rows].float()
        cache.append(*kept, queries, positions[None, rows])
