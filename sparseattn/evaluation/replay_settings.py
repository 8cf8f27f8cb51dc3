"""How the end of a trace is decoded anew, and whether a trace and a method can be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.shown_rows import unit_of
from sparseattn.codecs.base import RowCodec
from sparseattn.codecs.registry import as_codec
from sparseattn.core.budget import Budget, budget_of
from sparseattn.core.context import LayerContext
from sparseattn.roles.role import Share
from sparseattn.roles.roles import Method, shares_of
from sparseattn.selectors.abilities import FollowsLayers, LooksAhead, ReplaysNative
from sparseattn.selectors.base import Selector
from sparseattn.traces.trace import Trace
from sparseattn.utils.devices import usable_device


@dataclass(frozen=True)
class Replay:
    """How the last tokens of a trace are decoded.

    Args:
        sink, window: rows of the cache's dense zones; 0 or more.
        last: tokens to decode, from the end of the trace; the tokens before them are the prefill.
        layers: model layers to measure; None: all that attend to the whole context.
        seal: as in `KVCache`; None: the selector's unit, of roles each one's (with `rows` the least common multiple
            with a group), so that less than that of further dense rows flatters it.
        indexes: folder of index files, as in `KVCache`; None: none are kept.
        device: to replay on; None: a CUDA device if there is one, else the CPU, which it is for a selector that works
            in host memory.
        rows: as in `KVCache`: sealed rows are read as a codec keeps them, and compared with full attention over the
            rows as they are.
        every: n, measure the last of every n decoded tokens only. The method chooses at the others too, but these
            choices are not compared with full attention.
    """

    sink: int = 4
    window: int = 64
    last: int = 32
    layers: Sequence[int] | None = None
    seal: int | None = None
    indexes: str | os.PathLike[str] | None = None
    device: torch.device | str | None = None
    rows: RowCodec | str | None = None
    every: int = 1

    @property
    def codec(self) -> RowCodec | None:
        """What keeps the rows."""
        return as_codec(self.rows)

    def seal_rows(self, selector: Selector) -> int:
        """Return `seal`, or the unit of a selector."""
        return unit_of(selector, self.codec) if self.seal is None else self.seal

    def cache(self, selector: Selector) -> KVCache:
        """Return a cache of these settings that checks every selection, and with `rows` keeps exact rows too."""
        return KVCache(
            selector,
            sink=self.sink,
            window=self.window,
            seal=self.seal_rows(selector),
            indexes=self.indexes,
            rows=self.codec,
            exact=self.codec is not None,
            check=True,
        )


class ReplayOptions(TypedDict, total=False):
    """The fields of `Replay` as keyword arguments."""

    sink: int
    window: int
    last: int
    layers: Sequence[int] | None
    seal: int | None
    indexes: str | os.PathLike[str] | None
    device: torch.device | str | None
    rows: RowCodec | str | None
    every: int


def is_trace(trace: object) -> None:
    """ValueError for anything but a trace."""
    if not isinstance(trace, Trace):
        raise ValueError(f"trace is a Trace (Trace.open(path), builtin_trace(name), synthetic(...)), got {trace!r}")


def replay_device(method: Method, device: torch.device | str | None) -> torch.device:
    """Where `evaluate` replays traces for this selector; ValueError for a device on which it cannot."""
    if method.host and device is None:
        return torch.device("cpu")
    place = usable_device(device)
    if method.host and place.type != "cpu":
        raise ValueError(f"{method} works in host memory: its device is cpu, or none is named, got {place}")
    return place


def usable_layers(trace: Trace, layers: Sequence[int] | None) -> list[int]:
    """Return the layers to measure: those asked for, or all that attend to the whole context; else ValueError."""
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


def check_replay(trace: Trace, budgets: Sequence[Budget], method: Method, replay: Replay) -> None:
    """Check that the settings leave rows to select, the budgets fit the method, and it can serve the layers named, if
    any; else ValueError.

    A method that lacks a layer, such as SAAP where its artefact was not trained for it, is refused and not measured on
    the others: means over other layers compare with nothing.
    """
    which = usable_layers(trace, None) if replay.layers is None else replay.layers
    each = [(index, share) for index in which for share in shares_of(method, index, trace.shapes[index].heads)]
    methods = list({share.label: share for _, share in each}.values())  # not each layer's: checks of one take time
    _check_rows(trace, methods, replay)
    for share in methods:
        for budget in budgets:
            budget_of(share.selector, share.budget(budget), trace.tokens - replay.last)
    if replay.layers is not None:
        for index, share in each:
            _check_layer(trace, index, share, replay)
        without = [index for index, share in each if share.selector.find(ReplaysNative)]
        without = [index for index in without if trace.shapes[index].native is None]
        if without:
            raise ValueError(
                f"{method} replays what a model's own index chose, and {trace.name} holds nothing of it for layers "
                f"{without}: `sparseattn capture` records it of models that have one, for the layers that do; name "
                f"those with --layers"
            )
        blind = [index for index, share in each if share.selector.find(LooksAhead) and not trace.shapes[index].ahead]
        if blind:
            raise ValueError(
                f"{method} goes by queries foreseen from the layer before, and {trace.name} holds none for layers "
                f"{blind}: `sparseattn capture --ahead` records them for every layer but the first, which is to be "
                f"left out"
            )


def _check_rows(trace: Trace, methods: Sequence[Share], replay: Replay) -> None:
    """Check that the settings fit a cache of each method, and leave rows to select before the tokens that are
    decoded."""
    sink, window, last = replay.sink, replay.window, replay.last
    for share in methods:
        own = share.selector
        KVCache(own, sink=sink, window=window, seal=replay.seal_rows(own), rows=replay.codec)  # its own checks
    if not 1 <= last < trace.tokens:
        raise ValueError(f"last is 1 to {trace.tokens - 1} tokens of the trace's {trace.tokens}, got {last}")
    if not 1 <= replay.every <= last:
        raise ValueError(f"every is 1 to the {last} tokens that are decoded, got {replay.every}")
    left = trace.tokens - last - sink - window
    for share in methods:
        if left < (least := unit_of(share.selector, replay.codec)):
            raise ValueError(
                f"a sink of {sink} and a window of {window} rows leave {max(left, 0)} of the {trace.tokens - last} "
                f"rows before the replay to select from; {share.selector} needs at least {least}"
            )
    queries = min(shape.queries or trace.tokens for shape in trace.shapes.values())
    if last > queries:
        raise ValueError(
            f"{trace.name} holds the queries of its last {queries} tokens, so last is at most that, got {last}"
        )


def _check_layer(trace: Trace, index: int, share: Share, replay: Replay) -> None:
    """Check that the method of some heads of a layer can serve it, with the layers that it follows and the queries
    there are."""
    shape, layers = trace.shapes[index], list(replay.layers or ())
    own = share.fresh(LayerContext(index, trace.depth, rope=trace.ropes[index], scale=shape.scale))
    for part in own.find(FollowsLayers):
        if (anchor := part.follows) is not None and anchor not in layers[: layers.index(index)]:
            raise ValueError(
                f"{own} reads in layer {index} what layer {anchor} chose, so that layer is measured too, "
                f"before it; got layers {layers}"
            )
    own.check_shape(shape.heads if share.heads is None else len(share.heads.which), shape.group, shape.size)
    queries_share, last_queries = own.queries_wanted
    unread = 0 if queries_share else max(trace.tokens - replay.last - last_queries, 0)
    lacking = trace.tokens - (shape.queries or trace.tokens)  # the first tokens, whose queries it does not hold
    if own.learns and lacking > unread:
        raise ValueError(
            f"{own} learns from the queries of the prefill, and this trace holds only those of the last "
            f"{shape.queries} tokens of {trace.tokens}"
        )
