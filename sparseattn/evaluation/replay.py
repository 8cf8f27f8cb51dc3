"""How well a selector finds the rows that matter, and what it reads to do so: a replay of real queries.

The last tokens of a trace are decoded one by one, each against the rows before it, and every step is compared with full
attention. The measures of the papers side by side: recall@k against exact top-k (RetrievalAttention,
https://arxiv.org/abs/2409.10516; Quest, https://arxiv.org/abs/2406.10774), recovered attention mass
(RetrievalAttention's recovery ratio), error of the output (SAAP, https://arxiv.org/abs/2502.08246, Figure 5), and the
three things that papers call selectivity: rows scanned, rows attended, bytes read.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.decode import attend_chosen
from sparseattn.cache.kv_cache import KVCache, unit_of
from sparseattn.core.budget import Budget, budget_of, budget_record, parse_budget
from sparseattn.core.layer_choices import Board
from sparseattn.core.mass import Promise
from sparseattn.core.selection import Bounds, Selection, Tail
from sparseattn.evaluation import measures
from sparseattn.kernels.attend import reference as attend_reference
from sparseattn.roles.roles import Method, Roles, Share, as_method, rounded_label, shares_of, together
from sparseattn.selectors.base import Heads, Selector
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.utils.devices import usable_device

RECALLS = (1, 10, 100)
ROUNDING = 1e-5  # of sums of weights in float32
# What `compare` gives of a step, in the order of the records; `measures.py` says what each is.
MEASURES = (
    *(f"recall@{k}" for k in RECALLS),
    *("mass", "indexed_mass", "recovered", "lookups", "lookup_hits", "relative_error", "denominator_error", "mse"),
    *("attended", "attended_share", "kept", "oracle_kept", "promised", "fulfilled", "distinct_rows", "scanned"),
    *("scanned_share", "bytes_share"),
)
# Measures that are means over other things than tokens -> the measure that counts those.
COUNTED = {"lookup_hits": "lookups"}


@dataclass(frozen=True, eq=False)
class Step:
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


@dataclass(frozen=True)
class Evaluation:
    """What one selector did at one budget on one trace.

    Args:
        trace, selector, label, budget: what was measured; `selector` is its repr, `label` its short form.
        settings: sink, window, seal, last, tokens and the rest that a repetition needs.
        layers: model layers, in the order of the first dimension of `heads`.
        heads: measure -> `[layers,H*G]` float64, the mean over the decoded tokens for each query head (measures of a
            KV head are repeated for its group). See `MEASURES`.
        steps: measure -> `[layers,H*G,T]` float32, the same token by token, of the measures that `evaluate` was asked
            for so.
    """

    trace: str
    selector: str
    label: str
    budget: Budget
    settings: dict[str, Any]
    layers: tuple[int, ...]
    heads: dict[str, Tensor] = field(repr=False)
    steps: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def mean(self, measure: str) -> float:
        """Mean over layers and heads that are not NaN; of `lookup_hits` over all lookups, whichever head's they are."""
        values = self.heads[measure]
        weight = self.heads[COUNTED[measure]] if measure in COUNTED else torch.ones_like(values)
        known = ~values.isnan()
        return float((values * weight)[known].sum() / weight[known].sum())

    def by_step(self, measure: str) -> Tensor:
        """`[layers,T]` float32: the mean over heads that are not NaN at every decoded token, of one of `steps`."""
        return self.steps[measure].nanmean(1)

    def worst(self, measure: str) -> float:
        """The head where the measure is worst, of those that are not NaN."""
        values = self.heads[measure]
        values = values[~values.isnan()]
        if not len(values):
            return math.nan
        return float(values.min() if measures.measure(measure).better == measures.HIGH else values.max())

    def far(self, share: float) -> Evaluation:
        """The same of the heads with at least this share of their attention on indexed rows; the others become NaN.

        `settings` then hold the share, `far`, and which heads these are, `far_heads`: [layer, query head] of each.

        Raises:
            ValueError: there is no such head.
        """
        chosen = self.heads["indexed_mass"] >= share
        if not chosen.any():
            most = float(self.heads["indexed_mass"].max())
            raise ValueError(
                f"no head of {self.trace} has {share:g} of its attention on indexed rows, the most is {most:.3f}"
            )
        heads = {name: values.masked_fill(~chosen, math.nan) for name, values in self.heads.items()}
        steps = {name: values.masked_fill(~chosen[..., None], math.nan) for name, values in self.steps.items()}
        heads_chosen = [[self.layers[i], head] for i, head in chosen.nonzero().tolist()]
        settings = {**self.settings, "far": share, "far_heads": heads_chosen}
        return replace(self, settings=settings, heads=heads, steps=steps)

    def record(self, per_head: bool | Collection[str] = False) -> dict[str, Any]:
        """A flat JSON-able record: settings, mean and worst head of each measure, what was measured by step as
        `[layers][T]`, and the heads apart of every measure, or of those named, if asked."""
        out: dict[str, Any] = {
            "trace": self.trace,
            "selector": self.selector,
            "label": self.label,
            "budget": budget_record(self.budget),
            **self.settings,
            "layers": list(self.layers),
            "mean": {name: json_number(self.mean(name)) for name in self.heads},
            "worst": {name: json_number(self.worst(name)) for name in self.heads},
        }
        if self.steps:
            out["steps"] = {
                name: [[json_number(value) for value in layer] for layer in self.by_step(name).tolist()]
                for name in self.steps
            }
        if per_head:
            out["heads"] = {
                name: [[json_number(value) for value in layer] for layer in values.tolist()]
                for name, values in self.heads.items()
                if per_head is True or name in per_head
            }
        return out


def json_number(value: float) -> float | None:
    """The number, or None where it is NaN or infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def evaluate(
    trace: Trace,
    selector: Selector | Roles | str,
    budget: Budget,
    *,
    sink: int = 4,
    window: int = 64,
    last: int = 32,
    layers: Sequence[int] | None = None,
    seal: int | None = None,
    indexes: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    bits: int | None = None,
    steps: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Replays the last tokens of a trace through a selector and compares every step with full attention.

    Full attention is over all rows of the trace, those that a selector has dropped for good among them: nothing is
    freed here (`KVCache.compact`), so that eviction is judged by what it lacks.

    Args:
        trace: queries, keys and values of a model (`Trace.open`, `synthetic`, `builtin_trace`).
        selector: an instance, or a text for `make_selector`; or roles, in which the layers measured are named.
        budget: rows beyond sink and window: an int, a share of the context (float or "5%"), or None for all. Roles that
            have a budget of their own keep it.
        sink, window: rows of the cache's dense zones; 0 or more.
        last: tokens to decode, from the end of the trace; the tokens before them are the prefill.
        layers: model layers to measure, default all that attend to the whole context.
        seal: as in `KVCache`; default the selector's unit, of roles each one's (with `bits` the least common multiple
            with a group), so that less than that of further dense rows flatters it.
        indexes: folder of index files, as in `KVCache`; default none are kept.
        device: to replay on; None: a CUDA device if there is one, else the CPU, which it is for a selector that works
            in host memory. `settings` say which it was.
        bits: as in `KVCache`: sealed rows are read in 8 or 4 bits, and compared with full attention over the rows as
            they are. The label then says so, and bytes are those of the codes and levels read, over those of the whole
            cache as the trace has it.
        steps: measures to keep token by token too (`Evaluation.steps`), such as "recall@10".
        progress: called with 1 after every decoded token of a layer.

    Raises:
        ValueError: settings that leave no row to select, a layer that is not there or slides, an unfit budget, a
            device that is not there or that the selector cannot work on, or no measure of single tokens in `steps`.
        ContractError: the selector named rows that it must not (`selection_checks.check`).
    """
    return evaluate_budgets(
        trace,
        selector,
        [budget],
        sink=sink,
        window=window,
        last=last,
        layers=layers,
        seal=seal,
        indexes=indexes,
        device=device,
        bits=bits,
        steps=steps,
        progress=progress,
    )[0]


def check_steps(measures: Sequence[str]) -> None:
    """ValueError for what is no measure of a single token: there may be no lookup at one, say."""
    known = [name for name in MEASURES if name not in COUNTED]
    unknown = [name for name in measures if name not in known]
    if unknown or isinstance(measures, str):
        raise ValueError(f"what can be measured step by step is {', '.join(known)}; got {measures!r}")


def is_trace(trace: object) -> None:
    """ValueError for anything but a trace."""
    if not isinstance(trace, Trace):
        raise ValueError(f"trace is a Trace (Trace.open(path), builtin_trace(name), synthetic(...)), got {trace!r}")


def evaluate_budgets(
    trace: Trace,
    selector: Selector | Roles | str,
    budgets: Sequence[Budget],
    *,
    sink: int = 4,
    window: int = 64,
    last: int = 32,
    layers: Sequence[int] | None = None,
    seal: int | None = None,
    indexes: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    bits: int | None = None,
    steps: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    watch: Callable[[Step], None] | None = None,
) -> list[Evaluation]:
    """`evaluate` at several budgets; the prefill is indexed once and cloned for each of them.

    `watch` is shown every step as it is measured.
    """
    is_trace(trace)
    check_steps(steps)
    method, budgets = as_method(selector), [parse_budget(budget) for budget in budgets]
    if isinstance(method, Selector):
        seal = unit_of(method, bits) if seal is None else seal
    place = replay_device(method, device)
    indices = usable_layers(trace, layers)
    check_replay(trace, budgets, method, sink, window, last, seal, indices, bits)
    positions, board = trace.positions.to(place), Board()
    per_layer: list[list[dict[str, Tensor]]] = []  # [layer][budget]
    for index in indices:
        layer = _on(place, trace.layer(index))
        shares = shares_of(method, index, trace.shapes[index].heads)
        parts: list[list[dict[str, Tensor]]] = []  # [share][budget]
        for share in shares:
            mine = share.fresh(index, layer.rope, trace.depth, layer.scale)
            mine.width, mine.board = trace.dtype.itemsize, board
            cache = KVCache(
                mine,
                sink=sink,
                window=window,
                seal=unit_of(mine, bits) if seal is None else seal,
                indexes=indexes,
                bits=bits,
                exact=bits is not None,
                check=True,
            )
            ahead = None if layer.ahead is None else share.of(layer.ahead, 0)
            query, keys, values = (share.of(rows, 0) for rows in (layer.query, layer.keys, layer.values))
            part = replace(layer, query=query, keys=keys, values=values, ahead=ahead)
            append_rows(cache, part, positions, 0, trace.tokens - last)
            cache.seal()
            counted = progress if share is shares[-1] else None  # a token of a layer counts once
            parts.append(
                _replays(
                    cache, part, positions, [share.budget(asked) for asked in budgets], last, counted, steps, watch
                )
            )
        per_layer.append([_of_layer(shares, measured) for measured in zip(*parts, strict=True)])
    settings = {
        "sink": sink,
        "window": window,
        "seal": seal,
        "last": last,
        "tokens": trace.tokens,
        "device": str(place),
        "trace_dtype": str(trace.dtype).removeprefix("torch."),
        "replay_dtype": "float32",  # of the arithmetic; bytes are counted as a cache of `trace_dtype` has them
    }
    if bits is not None:
        settings["bits"] = bits
    return [
        Evaluation(
            trace.name,
            repr(method),
            rounded_label(method.label(), bits),
            budget,
            settings,
            tuple(indices),
            {name: torch.stack([heads[i][name] for heads in per_layer]) for name in MEASURES},
            {name: torch.stack([heads[i][f"{name} by step"] for heads in per_layer]) for name in steps},
        )
        for i, budget in enumerate(budgets)
    ]


def _replays(
    cache: KVCache,
    layer: TraceLayer,
    positions: Tensor,
    budgets: Sequence[Budget],
    last: int,
    progress: Callable[[int], None] | None,
    steps: Sequence[str],
    watch: Callable[[Step], None] | None,
) -> list[dict[str, Tensor]]:
    """`_replay` at each budget, once where it is the same, as where a role has one of its own."""
    found: list[dict[str, Tensor]] = []
    board = cache.selector.board
    for i, budget in enumerate(budgets):
        if i and repr(budget) == repr(budgets[0]) and not (board is not None and cache.selector.layer in board):
            found.append(found[0])
            for _ in range(last):
                if progress is not None:
                    progress(1)
        else:
            found.append(_replay(cache.clone(), layer, positions, budget, last, progress, steps, i, watch))
    return found


def _of_layer(shares: Sequence[Share], parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Measure -> `[H*G]`, and `[H*G,T]` by step, of what the shares of a layer's KV heads gave, each `[h*G,..]`."""
    heads = [1 if share.heads is None else len(share.heads.which) for share in shares]  # one share: its rows stay as is
    return {
        name: together(shares, [part[name].view(h, -1) for h, part in zip(heads, parts, strict=True)], 0).view(
            -1, *parts[0][name].shape[1:]
        )
        for name in parts[0]
    }


def replay_device(method: Method, device: torch.device | str | None) -> torch.device:
    """Where `evaluate` replays traces for this selector; ValueError for a device on which it cannot."""
    if method.host and device is None:
        return torch.device("cpu")
    place = usable_device(device)
    if method.host and place.type != "cpu":
        raise ValueError(f"{method!r} works in host memory: its device is cpu, or none is named, got {place}")
    return place


def _on(device: torch.device, layer: TraceLayer) -> TraceLayer:
    """The layer's rows on a device."""
    ahead = None if layer.ahead is None else layer.ahead.to(device)
    query, keys, values = (tensor.to(device) for tensor in (layer.query, layer.keys, layer.values))
    return replace(layer, query=query, keys=keys, values=values, ahead=ahead)


def usable_layers(trace: Trace, layers: Sequence[int] | None) -> list[int]:
    """The layers to measure: those asked for, or all that attend to the whole context; else ValueError."""
    if layers is not None and (not layers or len(set(layers)) < len(layers)):
        raise ValueError(f"layers are one or more different indices, got {list(layers)}")
    missing = [index for index in layers or () if index not in trace.layers]
    if missing:
        raise ValueError(f"the trace {trace.name} holds layers {list(trace.layers)}, not {missing}")
    chosen = list(trace.layers if layers is None else layers)
    sliding = {index: window for index in chosen if (window := trace.shapes[index].window) is not None}
    if layers is not None and sliding:
        raise ValueError(
            f"layers {list(sliding)} of {trace.name} attend to a sliding window of {next(iter(sliding.values()))} "
            f"rows only, there is nothing to select: leave them out"
        )
    chosen = [index for index in chosen if index not in sliding]
    if not chosen:
        raise ValueError(f"the trace {trace.name} has no layer that attends to the whole context")
    return chosen


def check_replay(
    trace: Trace,
    budgets: Sequence[Budget],
    method: Method,
    sink: int,
    window: int,
    last: int,
    seal: int | None = None,
    layers: Sequence[int] | None = None,
    bits: int | None = None,
) -> None:
    """The settings leave rows to select, the budgets fit the method, and it can serve all `layers`; else ValueError.

    A method that lacks a layer, such as SAAP where its artefact was not trained for it, is refused and not measured on
    the others: means over other layers compare with nothing.
    """
    which = usable_layers(trace, None) if layers is None else layers
    each = [(index, share) for index in which for share in shares_of(method, index, trace.shapes[index].heads)]
    methods = {share.label: share for _, share in each}  # not a layer's each, as checks of a selector take time
    for share in methods.values():
        own = share.selector
        least = unit_of(own, bits)
        KVCache(own, sink=sink, window=window, seal=least if seal is None else seal, bits=bits)  # its own checks
    if not 1 <= last < trace.tokens:
        raise ValueError(f"last is 1 to {trace.tokens - 1} tokens of the trace's {trace.tokens}, got {last}")
    left = trace.tokens - last - sink - window
    for share in methods.values():
        if left < (least := unit_of(share.selector, bits)):
            raise ValueError(
                f"a sink of {sink} and a window of {window} rows leave {max(left, 0)} of the {trace.tokens - last} "
                f"rows before the replay to select from; {share.selector!r} needs at least {least}"
            )
    held = min(shape.queries or trace.tokens for shape in trace.shapes.values())
    if last > held:
        raise ValueError(
            f"{trace.name} holds the queries of its last {held} tokens, so last is at most that, got {last}"
        )
    for share in methods.values():
        for budget in budgets:
            budget_of(share.selector, share.budget(budget), trace.tokens - last)
    if layers is not None:
        for index, share in each:
            shape = trace.shapes[index]
            own = share.fresh(index, trace.ropes[index], trace.depth, shape.scale)
            if (anchor := own.follows) is not None and anchor not in layers[: layers.index(index)]:
                raise ValueError(
                    f"{own!r} reads in layer {index} what layer {anchor} chose, so that layer is measured too, before "
                    f"it; got layers {list(layers)}"
                )
            own.check_shape(shape.heads if share.heads is None else len(share.heads.which), shape.group, shape.size)
            lacking = trace.tokens - (shape.queries or trace.tokens)  # the first tokens, whose queries it does not hold
            unread = 0 if own.queries_share else max(trace.tokens - last - own.last_queries, 0)
            if own.learns and lacking > unread:
                raise ValueError(
                    f"{own!r} learns from the queries of the prefill, and this trace holds only those of the last "
                    f"{shape.queries} tokens of {trace.tokens}"
                )
        blind = [index for index, share in each if share.selector.foresees and not trace.shapes[index].ahead]
        if blind:
            raise ValueError(
                f"{method!r} goes by queries foreseen from the layer before, and {trace.name} holds none for layers "
                f"{blind}: `sparseattn capture --ahead` records them for every layer but the first, which is to be "
                f"left out"
            )


def append_rows(cache: KVCache, layer: TraceLayer, positions: Tensor, start: int, stop: int) -> None:
    """Stores the rows `start` to `stop` of a trace's layer, with the queries that the selector learns from."""
    learns = cache.selector.learns
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


def _replay(
    cache: KVCache,
    layer: TraceLayer,
    positions: Tensor,
    budget: Budget,
    last: int,
    progress: Callable[[int], None] | None,
    steps: Sequence[str] = (),
    turn: int = 0,
    watch: Callable[[Step], None] | None = None,
) -> dict[str, Tensor]:
    """Measure -> `[H*G]` float64, the mean over the last tokens; with "by step" behind it `[H*G,T]` float32 of each.

    turn: which of the budgets it is, by which layers find each other's choices.
    """
    total: dict[str, Tensor] = {}
    series: dict[str, list[Tensor]] = {name: [] for name in steps}
    tokens = len(positions)
    for t in range(tokens - last, tokens):
        append_rows(cache, layer, positions, t, t + 1)
        query = layer.query[None, :, :, t - tokens].float()  # [1,H,G,D]; a trace may hold the last queries only
        input_checks.finite(query=query)
        if cache.selector.foresees:
            assert layer.ahead is not None  # check_replay
            cache.foresee(layer.ahead[None, :, :, t - tokens].float())
        if cache.selector.board is not None:
            cache.selector.board.step = turn, t
        selection = cache.select(query, budget)
        step = compare(query, cache, selection, layer.scale)
        if watch is not None:
            watch(Step(layer.index, cache.selector.heads, t, query, cache, selection, layer.scale, step))
        for name, values in series.items():
            values.append(step[name].float())
        for name, value in step.items():
            if name in COUNTED:
                value = torch.where(step[COUNTED[name]] > 0, value * step[COUNTED[name]], 0.0)
            total[name] = total[name] + value if name in total else value
        if progress is not None:
            progress(1)
    means = {name: value / (total[COUNTED[name]] if name in COUNTED else last) for name, value in total.items()}
    means |= {f"{name} by step": torch.stack(values, -1) for name, values in series.items()}
    return {name: value.cpu() for name, value in means.items()}


def compare(query: Tensor, cache: KVCache, selection: Selection, scale: float) -> dict[str, Tensor]:
    """Every measure of one decode step of one sequence against full attention: measure -> `[H*G]` float64.

    A selector that observes is told what its selection got, as in `decode`. Rows of its tail count as rows attended and
    read, and its biases as bytes read.

    Args:
        query: `[1,H,G,D]` float32 or float64.
        cache: one unpadded sequence, after `select`; with `bits`, one that keeps the rows as they came too (`exact`).
        selection: what it selected for this query.
        scale: factor of the logits.
    """
    if cache.sealed_device is not None:
        raise ValueError("compare reads every row where it lies: give it a cache without sealed_device")
    if cache.freed:
        raise ValueError(f"compare reads every row, and compact has freed {cache.freed} of each head of this cache")
    if cache.bits is not None and not cache.exact:
        raise ValueError("compare needs the rows as they came: give it a cache of few bits made with exact=True")
    _, heads, _, size = query.shape
    keys, values, bounds, reads = rows_read(query, cache, selection)
    rows, indexed = keys.shape[2], slice(bounds.base, int(bounds.sealed[0]))
    logits = query @ keys.mT * scale  # [1,H,G,N]
    total = logits.logsumexp(-1)  # [1,H,G]
    weights = logits.softmax(-1)
    full = weights @ values  # [1,H,G,D]
    out = attend_chosen(query, cache, selection, scale=scale)
    error = out - full
    far = weights[..., indexed].sum(-1)  # [1,H,G]
    found = (weights * reads)[..., indexed].sum(-1)
    sought = weights[..., indexed] >= measures.LOOKUP
    hits = (sought & reads[..., indexed]).sum(-1)
    attended = reads.sum(-1)  # [1,H,G]
    distinct = reads.any(2).sum(-1)[..., None].expand_as(attended)
    always = int(bounds.dense(rows).sum())  # rows that every query reads
    row_bytes = 2 * size * cache.selector.bytes_of(keys)  # a key and a value
    of_rows = (always * row_bytes + cache.bytes_named(selection))[..., None]
    biases = selection.bias_bytes(heads)[..., None]
    if (tail := cache.latest_tail) is not None:
        attended = attended + tail.selection.attended.unflatten(1, (heads, -1))
        own = tail.selection.distinct(heads, tail.keys.shape[2])[..., None]
        distinct, of_rows = distinct + own, of_rows + own * row_bytes
        biases = biases + tail.selection.bias_bytes(heads)[..., None]
    unknown = torch.full(
        (1, heads, 1), torch.nan, dtype=torch.float64, device=query.device
    )  # a selector that does not say what it cost
    scanned = unknown if selection.scanned is None else selection.scanned.unflatten(1, (heads, -1))
    read = unknown if selection.scan_bytes is None else selection.scan_bytes[..., None]

    measured = {
        "mass": (weights * reads).sum(-1),
        "indexed_mass": far,
        "recovered": torch.where(far > 0, found / far, 1.0),
        "lookups": sought.sum(-1),
        "lookup_hits": hits / sought.sum(-1),  # NaN without any
        "relative_error": error.norm(dim=-1) / full.norm(dim=-1).clamp(min=1e-30),
        "denominator_error": (_log_sum(query, logits, reads, selection, indexed, tail, scale) - total).expm1().abs(),
        "mse": error.square().mean(-1),
        "attended": attended,
        "attended_share": attended / rows,
        "kept": reads[..., indexed].sum(-1),
        **_promised(cache.latest_promise, weights, reads, indexed),
        "distinct_rows": distinct,
        "scanned": scanned.expand_as(attended),
        "scanned_share": scanned.expand_as(attended) / rows,
        "bytes_share": ((of_rows + biases + read) / (rows * row_bytes)).expand_as(attended),
    }
    top = logits[..., indexed].topk(min(max(RECALLS), indexed.stop - indexed.start), dim=-1).indices
    hit = reads[..., indexed].gather(-1, top)  # [1,H,G,k], best first
    for k in RECALLS:
        measured[f"recall@{k}"] = hit[..., :k].double().mean(-1)
    return {name: measured[name].double().flatten() for name in MEASURES}


def rows_read(query: Tensor, cache: KVCache, selection: Selection) -> tuple[Tensor, Tensor, Bounds, Tensor]:
    """The rows of a cache as `compare` has them, in stored order: keys and values `[1,H,N,D]`, their zones, and which
    of them each query head reads, `[1,H,G,N]` bool."""
    _, heads, group, _ = query.shape
    keys, values, bounds = cache.keys, cache.values, cache.bounds
    if cache.bits is not None:
        (keys, values, _), bounds = cache.everything(), cache.all_bounds
    reads = attend_reference.named(selection, bounds, heads, keys.shape[2]).expand(-1, -1, group, -1)
    return keys, values, bounds, reads


def _log_sum(
    query: Tensor,
    logits: Tensor,
    reads: Tensor,
    selection: Selection,
    indexed: slice,
    tail: Tail | None,
    scale: float,
) -> Tensor:
    """`[1,H,G]`: log-sum-exp of the logits `[1,H,G,N]` of the rows that a step attends to, with biases and tail."""
    heads = query.shape[1]
    logits = logits.masked_fill(~reads, -torch.inf)
    if selection.bias is not None:
        bias = selection.row_bias(indexed.stop - indexed.start).unflatten(1, (heads, -1))
        logits = torch.cat([logits[..., : indexed.start], logits[..., indexed] + bias, logits[..., indexed.stop :]], -1)
    if tail is None:
        return logits.logsumexp(-1)
    own, bias = (
        part(tail.keys.shape[2]).unflatten(1, (heads, -1)) for part in (tail.selection.mask, tail.selection.row_bias)
    )
    more = (query @ tail.keys.mT * scale + bias).masked_fill(~own, -torch.inf)
    return torch.cat([logits, more], -1).logsumexp(-1)


def _promised(promise: Promise | None, weights: Tensor, reads: Tensor, indexed: slice) -> dict[str, Tensor]:
    """The measures `[1,H,G]` of a budget by mass; NaN for another.

    Args:
        weights, reads: `[1,H,G,N]`, full attention's, and which rows are attended.
        indexed: the rows to choose from.
    """
    if promise is None:
        none = weights.new_full(weights.shape[:3], math.nan)
        return {"oracle_kept": none, "promised": none, "fulfilled": none}
    far = weights[..., indexed].sort(-1, descending=True).values
    before = 1 - far.sum(-1, keepdim=True) + far.cumsum(-1) - far  # with sink, unsealed rows and what is heavier
    held = (weights * reads).sum(-1)
    return {
        "oracle_kept": (before < promise.wanted).sum(-1),
        "promised": promise.held.view(held.shape),
        "fulfilled": (held >= promise.wanted * (1 - ROUNDING)).double(),
    }
