"""Capture what the attention layers of a transformers causal LM see as a trace.

`transformers` is imported when a function runs, and by no file of the package outside this folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from sparseattn import __version__
from sparseattn.integrations import rotary
from sparseattn.integrations.models import ModelError
from sparseattn.rope import Rope
from sparseattn.traces import LayerShape, Trace, TraceError, TraceWriter

COMPARED = 8  # last tokens whose attention is recomputed to see whether a trace holds all of it


def capture(
    model: Any,
    input_ids: Tensor,
    path: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    queries: int | None = None,
    chunk: int = 1024,
    dtype: torch.dtype | None = None,
    model_id: str | None = None,
    text: Mapping[str, Any] | None = None,
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
        chunk: tokens per forward pass.
        dtype: what to store; by default what attention received.
        model_id: recorded; the name that the model was loaded under by default.
        text: recorded as given, for example `{"name": ..., "sha256": ...}`.
        keep: where `path` is already what this call would write, by model, tokens, layers and dtype, leave it so.
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
    with _alone(model), _quiet(model):
        original = _implementation(model)
        _check_range(model, input_ids, layers or ())
        seen = _probe(model, original, input_ids[:, :2])
        wanted = sorted(seen if layers is None else layers)
        absent = [index for index in wanted if index not in seen]
        if absent:
            raise ModelError(
                f"layer {absent[0]} of {_name(model)} has no softmax attention to record, layers "
                f"{', '.join(map(str, sorted(seen)))} have"
            )
        shapes = [_shape(seen[index], min(queries or tokens, tokens)) for index in wanted]
        stored = dtype or seen[wanted[0]].key.dtype
        meta = _meta(model, input_ids, original, stored, model_id, text)
        if keep and os.path.exists(path):
            return _kept(path, shapes, stored, meta)
        with TraceWriter(path, shapes, positions, stored, meta) as writer:
            modules = {i: seen[i].module for i in wanted}
            recorder = _Recorder(model, original, writer, modules, positions, min(queries or tokens, tokens))
            _prefill(model, original, recorder, input_ids, chunk, progress)
            for index in wanted:
                writer.rope(index, recorder.ropes.get(index))
            assert isinstance(writer.meta, dict)
            writer.meta["rope_absent"] = {str(i): reason for i, reason in recorder.absent.items()}
            writer.meta["attention_differs"] = {str(i): reason for i, reason in recorder.differs.items()}
    return Trace.open(path)


@dataclass
class _Call:
    """One call of an attention function."""

    module: nn.Module
    query: Tensor  # [1,HG,n,D]
    key: Tensor  # [1,H,N,D]
    value: Tensor  # [1,H,N,D]
    mask: Any
    options: dict[str, Any]

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        return float(self.options.get("scaling") or self.query.shape[-1] ** -0.5)

    @property
    def window(self) -> int | None:
        return self.options.get("sliding_window")


class _Enough(Exception):
    """Ends a forward pass whose later layers nobody wants."""


# What transformers' attention calls go to while a capture runs. One per thread, so that captures of several models do
# not mix; that calls come here at all is said in the model's config, so a model takes one capture at a time (`_alone`).
_LISTENER: ContextVar[Callable[[_Call], tuple[Tensor, Any]]] = ContextVar("sparseattn_capture")


def _intercept(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    return _LISTENER.get()(_Call(module, query, key, value, attention_mask, options))


# What an attention function may be given that changes its output and that a trace does not hold.
NOT_HELD = {
    "softcap": "soft-caps its logits (softcap)",
    "s_aux": "adds a learned sink to its softmax (s_aux)",
    "position_bias": "adds a bias to its logits (position_bias)",
}


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
        self._embeddings: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        # Hooks of a device map bring weights in before a layer and out behind it: such a model runs to its end.
        self._stops = not hasattr(model, "hf_device_map")

    def chunk(self, start: int) -> None:
        """Say where the next forward pass begins."""
        self._start = start

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch what the wanted layers are given and, in the first chunk, what their submodules put out."""
        handles = []
        for index, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._given(index), with_kwargs=True))
            handles += [child.register_forward_hook(self._put_out(index)) for child in module.children()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _given(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            pairs = [options.get("position_embeddings"), *args]
            tensors = (x for x in pairs if isinstance(x, tuple) and [type(y) for y in x] == [Tensor, Tensor])
            self._embeddings[index] = next(tensors, None)
            self._outputs[index] = []

        return hook

    def _put_out(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._start == 0 and isinstance(output, Tensor) and output.ndim in (3, 4):
                self._outputs.setdefault(index, []).append(output)

        return hook

    def __call__(self, call: _Call) -> tuple[Tensor, Any]:
        index = call.layer
        if index not in self._modules or call.module is not self._modules[index]:
            return _delegate(call, self._original)
        start, n = self._start, call.query.shape[2]
        # A cache may hand out more keys than the new ones; these come last, in sliding layers too.
        query, keys, values = call.query[0], call.key[0, :, -n:], call.value[0, :, -n:]
        self._verify(index, query, keys)
        self._write_queries(index, start, query.unflatten(0, (keys.shape[0], -1)))
        self._writer.write(index, "keys", start, keys)
        self._writer.write(index, "values", start, values)
        ends = start + n == len(self._positions)
        if index == self._last and self._stops and not ends:
            raise _Enough
        out, weights = _delegate(call, self._original)
        if ends:
            self._compare(call, out)
            if index == self._last and self._stops:
                raise _Enough
        return out, weights

    def _write_queries(self, index: int, start: int, query: Tensor) -> None:
        """Write those of the queries `[H,G,n,D]` of tokens `start` and up that the trace holds."""
        first = len(self._positions) - self._queries
        rows = query[:, :, max(0, first - start) :]
        if rows.shape[2]:
            self._writer.write(index, "query", max(0, start - first), rows)

    def _verify(self, index: int, query: Tensor, keys: Tensor) -> None:
        """Find the layer's rope in the first chunk; drop it when a later one is given another.

        Frequencies may follow the length (dynamic NTK, LongRoPE), so the model's are looked up while the chunk runs,
        and what was found first must hold until the end.
        """
        given = self._embeddings.get(index)
        positions = self._positions[self._start : self._start + keys.shape[1]].to(keys.device)
        if self._start == 0:
            try:
                self.ropes[index] = rotary.find(
                    rotary.ropes_of(self._model), given, positions, query, keys, self._outputs.pop(index, [])
                )
            except rotary.NoRope as reason:
                self.absent[index] = str(reason)
        elif index in self.ropes and (given is None or not rotary.applied(self.ropes[index], given, positions)):
            del self.ropes[index]
            self.absent[index] = f"the frequencies change with the length, at the latest at token {self._start}"

    def _compare(self, call: _Call, out: Tensor) -> None:
        """Say what the layer was given that a trace does not hold; else recompute the attention of the last tokens."""
        reasons = [words for name, words in NOT_HELD.items() if call.options.get(name) is not None]
        if reasons:
            self.differs[call.layer] = f"the layer {' and '.join(reasons)}, which a trace does not hold"
            return
        keys, values = call.key[0].float(), call.value[0].float()
        query = call.query[0, :, -COMPARED:].float().unflatten(0, (keys.shape[0], -1))  # [H,G,n,D]
        row = torch.arange(keys.shape[1], device=keys.device)
        token = row[-query.shape[2] :, None]
        seen = row <= token if call.window is None else (row <= token) & (row > token - call.window)
        logits = (query.flatten(1, 2) @ keys.mT * call.scale).unflatten(1, query.shape[1:3])  # [H,G,n,N]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        ours = (weights.flatten(1, 2) @ values).view_as(query)
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
    with recorder.hooks(), _listening(model, original, recorder):
        for start in range(0, tokens, chunk):
            recorder.chunk(start)
            ids = input_ids[:, start : start + chunk].to(model.device)
            try:
                model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            except _Enough:
                pass
            except torch.OutOfMemoryError as error:
                raise ModelError(
                    f"{model.device} is out of memory at token {start} of {tokens}, try a smaller chunk than {chunk}"
                ) from error
            if progress is not None:
                progress(min(start + chunk, tokens), tokens)


def _probe(model: Any, original: str, input_ids: Tensor) -> dict[int, _Call]:
    """The first attention call of every layer, on the first two tokens."""
    calls: dict[int, _Call] = {}

    def listener(call: _Call) -> tuple[Tensor, Any]:
        if getattr(call.module, "layer_idx", None) is not None:
            calls.setdefault(call.layer, call)
        return _delegate(call, original)

    with _listening(model, original, listener):
        model.base_model(input_ids=input_ids.to(model.device), use_cache=False)
    if not calls:
        raise ModelError(
            f"{_name(model)} runs no softmax attention through transformers' AttentionInterface, so there is nothing "
            "to record"
        )
    return calls


def _kept(
    path: str | os.PathLike[str], shapes: Sequence[LayerShape], dtype: torch.dtype, meta: Mapping[str, Any]
) -> Trace:
    """The trace at `path`, which has to be what a capture would write."""
    trace = Trace.open(path)
    for name in ("config_hash", "tokens_sha256"):
        if trace.meta.get(name) != meta[name]:
            what = "model" if name == "config_hash" else "text"
            raise TraceError(f"{os.fspath(path)} is a trace of another {what}: move it, or write elsewhere")
    if (list(trace.shapes.values()), trace.dtype) != (list(shapes), dtype):
        raise TraceError(
            f"{os.fspath(path)} is a trace of other layers, queries or dtype (layers "
            f"{', '.join(map(str, trace.layers))}, {trace.dtype}): move it, or write elsewhere"
        )
    return trace


def _shape(call: _Call, queries: int) -> LayerShape:
    _, heads, _, size = call.key.shape
    if call.value.shape[-1] != size:
        raise ModelError(
            f"layer {call.layer} has keys of {size} dimensions and values of {call.value.shape[-1]}; a trace holds "
            "layers whose keys and values are of one size"
        )
    return LayerShape(call.layer, heads, call.query.shape[1] // heads, size, call.scale, call.window, queries)


def _delegate(call: _Call, original: str) -> tuple[Tensor, Any]:
    """The attention that the model would have run, which sees its own name in the config (flash attention reads it)."""
    home: Any = sys.modules[type(call.module).__module__]
    function = home.ALL_ATTENTION_FUNCTIONS.get_interface(original, getattr(home, "eager_attention_forward", None))
    if function is None:
        raise ModelError(f"{home.__name__} has no eager_attention_forward to run")
    config: Any = call.module.config
    ours = config._attn_implementation_internal
    config._attn_implementation_internal = original
    try:
        out, weights = function(call.module, call.query, call.key, call.value, call.mask, **call.options)
    finally:
        config._attn_implementation_internal = ours
    return out, weights


@contextlib.contextmanager
def _listening(model: Any, original: str, listener: Callable[[_Call], tuple[Tensor, Any]]) -> Iterator[None]:
    """Route the model's attention through `listener`, with the masks of its own implementation."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    # Names cannot be unregistered: one for each implementation, all the same function. It contains the original's,
    # which models look for "flash" in. Without a mask function of the same name there would be no mask at all.
    name = f"sparseattn_capture_{original.replace('/', '_')}"
    AttentionInterface.register(name, _intercept)
    if original in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    # Not through set_attn_implementation, which would look on the hub for a kernel of a name with "flash" in it, and
    # not through the configs' property, which would change the sub-configs of a config with it.
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    token = _LISTENER.set(listener)
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield
    finally:
        _LISTENER.reset(token)
        for config, implementation in before:
            config._attn_implementation_internal = implementation


@contextlib.contextmanager
def _quiet(model: Any) -> Iterator[None]:
    """No gradients, no dropout; every module's mode is given back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


_CAPTURED: set[int] = set()  # ids of the configs of models that are being captured
_CAPTURED_LOCK = threading.Lock()


@contextlib.contextmanager
def _alone(model: Any) -> Iterator[None]:
    """Refuse a second capture of a model that is being captured, or that shares its config with such a one."""
    config = id(model.config)
    with _CAPTURED_LOCK:
        if config in _CAPTURED:
            raise ModelError("this model is being captured already")
        _CAPTURED.add(config)
    try:
        yield
    finally:
        _CAPTURED.remove(config)


def _check_range(model: Any, input_ids: Tensor, layers: Sequence[int]) -> None:
    """Refuse ids and layers that the model does not have."""
    config = model.config.get_text_config(decoder=True)
    low, high = input_ids.min().item(), input_ids.max().item()
    if low < 0 or high >= config.vocab_size:
        raise ModelError(
            f"ids of {_name(model)} are 0 to {config.vocab_size - 1}, the text has {low if low < 0 else high}"
        )
    for index in layers:
        if not 0 <= index < config.num_hidden_layers:
            raise ModelError(f"{_name(model)} has no layer {index}, it has layers 0 to {config.num_hidden_layers - 1}")


def _implementation(model: Any) -> str:
    """The name of the attention implementation of the model's text part."""
    if model.config.is_encoder_decoder:
        raise ModelError(f"{_name(model)} is an encoder-decoder, capture takes decoder-only models")
    if not model._can_set_attn_implementation():
        raise ModelError(f"{_name(model)} has attention code of its own, outside transformers' AttentionInterface")
    return model.config.get_text_config(decoder=True)._attn_implementation or "eager"


def _meta(
    model: Any,
    input_ids: Tensor,
    original: str,
    stored: torch.dtype,
    model_id: str | None,
    text: Mapping[str, Any] | None,
) -> dict[str, Any]:
    import transformers

    # What a config says of where and by which version it was loaded is no property of the model.
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    ids = input_ids.cpu().to(torch.int64).flatten().tolist()
    return {
        "model": model_id or _name(model),
        "config_hash": hashlib.sha256(canonical.encode()).hexdigest(),
        "text": dict(text or {}),
        "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "attention": original,
        "dtype": str(stored).removeprefix("torch."),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"sparseattn": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _name(model: Any) -> str:
    return model.config._name_or_path or type(model).__name__
