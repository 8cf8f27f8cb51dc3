"""Capture what the attention layers of a transformers causal LM see as a trace.

`transformers` is imported when a function runs, and by no file of the package outside this folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparseattn.core.rope import Rope
from sparseattn.models import rotary
from sparseattn.models.attention_routing import (
    Call,
    Route,
    beyond_softmax,
    check_causal,
    delegate,
    implementation,
    name_of,
    own_implementation,
)
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.errors import ModelError
from sparseattn.models.exclusive import alone, quiet
from sparseattn.models.input_device import input_device
from sparseattn.models.lookahead_queries import Foresight
from sparseattn.models.native_choice import NativeChoice, choice_of
from sparseattn.models.native_index import key_bytes, native_lists
from sparseattn.models.trace_origin import origin
from sparseattn.traces.trace import LayerShape, Trace, TraceError
from sparseattn.traces.trace_format import NATIVE
from sparseattn.traces.trace_writer import TraceWriter

COMPARED = 8  # last tokens whose attention is recomputed to see whether a trace holds all of it


def capture(
    model: Any,
    input_ids: Tensor,
    path: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    queries: int | None = None,
    ahead: bool = False,
    chunk: int = 1024,
    dtype: torch.dtype | None = None,
    model_id: str | None = None,
    text: Mapping[str, Any] | None = None,
    pieces: Sequence[str] | None = None,
    keep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Run a causal LM over a text with its own attention and write what its attention layers see.

    The text passes in chunks with a KV cache, and each chunk's rows go to the file at once: besides the model, memory
    holds the KV cache of the layers up to the last one wanted (later layers do not run) and one chunk. No logits are
    computed.

    Args:
        model: a causal LM of transformers whose attention goes through its `AttentionInterface`.
        input_ids: `[1,T]`.
        path: the trace file to make.
        layers: the layers to record; all by default (of a hybrid model, those with softmax attention).
        queries: record the queries of the last tokens alone, as many as this; those of all by default. With four query
            heads to a KV head they are two thirds of a trace.
        ahead: record too, of the same tokens, the queries that each layer would make of the input of the attention
            layer before, which InfiniGen goes by; the first layer with attention has none before.
        chunk: tokens per forward pass.
        dtype: what to store; by default what attention received.
        model_id: recorded; the name that the model was loaded under by default.
        text: recorded as given, for example `{"name": ..., "sha256": ...}`.
        pieces: the text of each token (`load.pieces`), for people to read beside the attention; None: the trace
            holds no text.
        keep: where `path` is already what this call would write, by model, tokens, layers, dtype and whether it holds
            text, leave it so.
        progress: called with (tokens done, T) after each chunk.

    Returns:
        The trace, opened from the file.

    Raises:
        ModelError: the model's attention cannot be recorded, there is no such layer, the ids are not `[1,T]` of the
            model's vocabulary, the GPU is full, or the model is being captured already.
        TraceError: the file cannot be written, or cannot hold what attention received (NaN, too large for `dtype`);
            with `keep`, the file is there and another one.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise ModelError(f"capture takes one text as input_ids [1,T], got {list(input_ids.shape)}")
    if chunk < 1:
        raise ModelError(f"a chunk has at least 1 token, got {chunk}")
    if queries is not None and queries < 1:
        raise ModelError(f"a trace holds the queries of at least 1 token, got {queries}")
    if layers is not None and (not layers or len(set(layers)) != len(layers)):
        raise ModelError(f"layers are one or more different indices, got {list(layers)}")
    tokens = input_ids.shape[1]
    positions = torch.arange(tokens)
    with alone(model, "captured"), quiet(model):
        original = implementation(model)
        _check_range(model, input_ids, layers or ())
        seen = probe(model, original, input_ids[:, :2])
        wanted = sorted(seen if layers is None else layers)
        absent = [index for index in wanted if index not in seen]
        if absent:
            raise ModelError(
                f"layer {absent[0]} of {name_of(model)} has no softmax attention to record, layers "
                f"{', '.join(map(str, sorted(seen)))} have"
            )
        lists = native_lists({i: (call.module, call.options) for i, call in seen.items()}, tokens)
        queries = min(queries or tokens, tokens)
        shapes = [_shape(seen[i], queries, ahead and i > min(seen), lists.get(i)) for i in wanted]
        stored = dtype or seen[wanted[0]].key.dtype
        meta = origin(model, input_ids, original, stored, model_id, text)
        if lists:
            meta["native_row_bytes"] = {str(i): key_bytes(seen[i].module) for i in lists}
        if keep and os.path.exists(path):
            return _kept(path, shapes, stored, meta, pieces is not None)
        with TraceWriter(path, shapes, positions, stored, meta, pieces) as writer:
            modules = {i: seen[i].module for i in wanted}
            recorder = _Recorder(model, original, writer, modules, positions, queries)
            recorder.lists = lists
            if ahead:
                recorder.foresight = Foresight({i: seen[i].module for i in seen if i <= wanted[-1]}, _listens)
            _prefill(model, original, recorder, input_ids, chunk, progress)
            for index in wanted:
                writer.rope(index, recorder.ropes.get(index))
            assert isinstance(writer.meta, dict)
            writer.meta["rope_absent"] = {str(i): reason for i, reason in recorder.absent.items()}
            writer.meta["attention_differs"] = {str(i): reason for i, reason in recorder.differs.items()}
    return Trace.open(path)


class _Enough(Exception):
    """Ends a forward pass behind the last layer that is recorded."""


# What transformers' attention calls go to while a capture runs. One per thread, so that captures of several models do
# not mix; that calls come here at all is said in the model's config, so a model takes one capture at a time (`alone`).
_LISTENER: ContextVar[Callable[[Call], tuple[Tensor, Any]] | None] = ContextVar("sparseattn_capture", default=None)


def _intercept(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    call, listener = Call(module, query, key, value, attention_mask, options), _LISTENER.get()
    return (
        delegate(call, own_implementation(module)) if listener is None else listener(call)
    )  # None: another thread's own pass


class _Recorder:
    """Writes the rows of every attention call of the wanted layers, and finds and verifies their RoPE."""

    def __init__(
        self,
        model: Any,
        original: str,
        writer: TraceWriter,
        modules: dict[int, nn.Module],
        positions: Tensor,
        queries: int,
    ) -> None:
        self.ropes: dict[int, Rope] = {}
        self.absent: dict[int, str] = {}
        self.differs: dict[int, str] = {}
        self._original = original
        self._writer = writer
        self._modules = modules
        self._positions = positions
        self._queries = queries
        self._start = 0
        self._last = max(modules)
        self._model = model
        self.watch = rotary.Watch(modules)
        self.foresight = Foresight({}, _listens)
        self.lists: dict[int, tuple[int, int]] = {}  # of layers that have an index of their own, see `native_lists`
        # Hooks of a device map bring weights in before a layer and out behind it: such a model runs to its end.
        self._stops = not hasattr(model, "hf_device_map")

    def chunk(self, start: int) -> None:
        """Say where the next forward pass begins."""
        self._start = start
        self.watch.outputs_too = start == 0

    def __call__(self, call: Call) -> tuple[Tensor, Any]:
        index = call.layer
        if index not in self._modules or call.module is not self._modules[index]:
            return delegate(call, self._original)
        start, n = self._start, call.query.shape[2]
        # A cache may hand out more keys than the new ones; these come last, in sliding layers too.
        query, keys, values = call.query[0], call.key[0, :, -n:], call.value[0, :, -n:]
        values = F.pad(values, (0, keys.shape[-1] - values.shape[-1]))  # of MLA, see `_shape`
        self._verify(index, query, keys)
        self._write_queries(index, "query", start, query.unflatten(0, (keys.shape[0], -1)))
        if index in self.foresight.queries:
            foreseen = self.foresight.queries.pop(index)[0]
            self._write_queries(index, "ahead", start, foreseen.unflatten(0, (keys.shape[0], -1)))
        self._write_choice(call, start)
        self._writer.write(index, "keys", start, keys)
        self._writer.write(index, "values", start, values)
        ends = start + n == len(self._positions)
        if index == self._last and self._stops and not ends:
            raise _Enough
        out, weights = delegate(call, self._original)
        if ends:
            self._compare(call, out)
            if index == self._last and self._stops:
                raise _Enough
        return out, weights

    def _write_queries(self, index: int, name: str, start: int, query: Tensor) -> None:
        """Write those of the queries `[H,G,n,D]` of tokens `start` and up that the trace holds, as its `name`."""
        first = len(self._positions) - self._queries
        rows = query[:, :, max(0, first - start) :]
        if rows.shape[2]:
            self._writer.write(index, name, max(0, start - first), rows)

    def _choice(self, call: Call) -> NativeChoice | None:
        """Return what the layer's own index chose, None where it has none."""
        if call.layer not in self.lists:
            return None
        tokens, columns = call.query.shape[2], call.key.shape[2]
        return choice_of(call.module, call.options, call.mask, tokens, columns, padded=False)

    def _write_choice(self, call: Call, start: int) -> None:
        """Write what the layer's own index chose for the queries that the trace holds."""
        if (choice := self._choice(call)) is None:
            return
        first = len(self._positions) - self._queries
        _, slots = self.lists[call.layer]
        for token in range(max(0, first - start), choice.tokens):
            self._writer.write(call.layer, NATIVE, start + token - first, choice.packed(token, slots)[0, :, None])

    def _verify(self, index: int, query: Tensor, keys: Tensor) -> None:
        """Find the layer's rope in the first chunk; drop it when a later one is given another.

        Frequencies may follow the length (dynamic NTK, LongRoPE), so the model's are looked up while the chunk runs,
        and what was found first must hold until the end.
        """
        given = self.watch.embeddings.get(index)
        positions = self._positions[self._start : self._start + keys.shape[1]].to(keys.device)
        if self._start == 0:
            try:
                self.ropes[index] = rotary.find(
                    rotary.ropes_of(self._model), given, positions, query, keys, self.watch.outputs.pop(index, [])
                )
            except rotary.NoRope as reason:
                self.absent[index] = str(reason)
        elif index in self.ropes and (given is None or not rotary.applied(self.ropes[index], given, positions)):
            del self.ropes[index]
            self.absent[index] = f"the frequencies change with the length, at the latest at token {self._start}"

    def _compare(self, call: Call, out: Tensor) -> None:
        """Say what the layer was given that a trace does not hold; else recompute the attention of the last tokens."""
        if (beyond := beyond_softmax(call)) is not None:
            self.differs[call.layer] = f"the layer {beyond}, which a trace does not hold"
            return
        keys, values = call.key[0].float(), call.value[0].float()
        query = call.query[0, :, -COMPARED:].float().unflatten(0, (keys.shape[0], -1))  # [H,G,n,D]
        row = torch.arange(keys.shape[1], device=keys.device)
        token = row[-query.shape[2] :, None]
        seen = row <= token if call.window is None else (row <= token) & (row > token - call.window)
        if (choice := self._choice(call)) is not None:
            seen = seen & choice.allowed()[0, :, None, -query.shape[2] :]  # [Hs,1,n,N]
        logits = (query.flatten(1, 2) @ keys.mT * call.scale).unflatten(1, query.shape[1:3])  # [H,G,n,N]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        ours = (weights.flatten(1, 2) @ values).unflatten(1, query.shape[1:3])
        theirs = out[0, -COMPARED:].float().movedim(0, -2).view_as(ours)
        off = ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()
        if not off <= max(1e-3, 8 * torch.finfo(out.dtype).eps):
            self.differs[call.layer] = (
                f"attention recomputed from the trace is off by {off:.2g} of its norm: the layer does something that a "
                "trace does not hold (a bias, another mask)"
            )


def _prefill(
    model: Any,
    original: str,
    recorder: _Recorder,
    input_ids: Tensor,
    chunk: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    from transformers import DynamicCache

    tokens = input_ids.shape[1]
    cache = DynamicCache(config=model.config)
    # Foresight first: what it makes submodules put out is gone before the watch looks at the layer's own pass.
    with recorder.foresight, recorder.watch, _listening(model, original, recorder):
        for start in range(0, tokens, chunk):
            recorder.chunk(start)
            ids = input_ids[:, start : start + chunk].to(input_device(model))
            try:
                model.base_model(input_ids=ids, use_cache=True, **cache_argument(cache))
            except _Enough:
                pass
            except torch.OutOfMemoryError as error:
                raise ModelError(
                    f"{ids.device} is out of memory at token {start} of {tokens}, try a smaller chunk than {chunk}"
                ) from error
            if progress is not None:
                progress(min(start + chunk, tokens), tokens)


def probe(model: Any, original: str, input_ids: Tensor, **inputs: Any) -> dict[int, Call]:
    """Return the first attention call of every layer in a pass over a few tokens `[1,n]`; no cache by default.

    Raises:
        ModelError: no call comes, or a layer attends to later tokens too.
    """
    calls: dict[int, Call] = {}

    def listener(call: Call) -> tuple[Tensor, Any]:
        if getattr(call.module, "layer_idx", None) is not None:
            calls.setdefault(call.layer, call)
        return delegate(call, original)

    with _listening(model, original, listener):
        model.base_model(**{"input_ids": input_ids.to(input_device(model)), "use_cache": False, **inputs})
    if not calls:
        raise ModelError(
            f"{name_of(model)} runs no softmax attention through transformers' AttentionInterface, so there is none to "
            f"follow"
        )
    check_causal(model, calls.values())
    return calls


def _kept(
    path: str | os.PathLike[str], shapes: Sequence[LayerShape], dtype: torch.dtype, meta: Mapping[str, Any], text: bool
) -> Trace:
    """Return the trace at `path`, or refuse one that is not what this capture would write."""
    trace = Trace.open(path)
    for name, what in (("config_hash", "model"), ("weights", "model"), ("tokens_sha256", "text")):
        unknown = name == "weights" and None in (trace.meta.get(name), meta[name])  # of before traces said it
        if trace.meta.get(name) != meta[name] and not unknown:
            raise TraceError(f"{os.fspath(path)} is a trace of another {what}: move it, or write elsewhere")
    if (list(trace.shapes.values()), trace.dtype) != (list(shapes), dtype):
        raise TraceError(
            f"{os.fspath(path)} is a trace of other layers, queries or dtype (layers "
            f"{', '.join(map(str, trace.layers))}, {trace.dtype}): move it, or write elsewhere"
        )
    if text and trace.pieces is None:
        raise TraceError(f"{os.fspath(path)} is a trace without its text: move it, or write elsewhere")
    return trace


def _shape(call: Call, queries: int, ahead: bool, native: tuple[int, int] | None) -> LayerShape:
    _, heads, _, size = call.key.shape
    if call.value.shape[-1] != size and (native is None or call.value.shape[-1] > size):
        raise ModelError(
            f"layer {call.layer} has keys of {size} dimensions and values of {call.value.shape[-1]}; a trace holds "
            "layers whose keys and values are of one size"
        )
    group = call.query.shape[1] // heads
    return LayerShape(call.layer, heads, group, size, call.scale, call.window, queries, ahead, native)


@contextlib.contextmanager
def _listening(model: Any, original: str, listener: Callable[[Call], tuple[Tensor, Any]]) -> Iterator[None]:
    """Route the model's attention through `listener`."""
    route = Route(model, original, "capture", _intercept)
    try:
        route.set()
        with _listens(listener):
            yield
    finally:
        route.undo()


@contextlib.contextmanager
def _listens(listener: Callable[[Call], tuple[Tensor, Any]]) -> Iterator[None]:
    """Send this thread's attention calls, routed already, to `listener`."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def _check_range(model: Any, input_ids: Tensor, layers: Sequence[int]) -> None:
    """Refuse ids and layers that the model does not have."""
    config = model.config.get_text_config(decoder=True)
    low, high = input_ids.min().item(), input_ids.max().item()
    if low < 0 or high >= config.vocab_size:
        raise ModelError(
            f"ids of {name_of(model)} are 0 to {config.vocab_size - 1}, the text has {low if low < 0 else high}"
        )
    for index in layers:
        if not 0 <= index < config.num_hidden_layers:
            raise ModelError(
                f"{name_of(model)} has no layer {index}, it has layers 0 to {config.num_hidden_layers - 1}"
            )
