"""Prepare a transformers model for sparse attention and give it back: a route for its attention calls, two hooks."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from sparseattn.integrations.errors import ModelError
from sparseattn.integrations.layers import attention_layers
from sparseattn.integrations.routing import Call, Route, delegate, implementation, name_of
from sparseattn.integrations.sparse_layer import RUNNING, SparseLayer


class Prepared:
    """A model whose attention calls come to `_attend`, and whose passes tell which cache they were given."""

    def __init__(self, model: Any) -> None:
        self.original = implementation(model)
        if self.original not in ("sdpa", "eager") and "flash" not in self.original:
            raise ModelError(
                f"the attention of {name_of(model)} is {self.original!r}; sparse attention goes with sdpa, eager and "
                f"flash attention: model.set_attn_implementation('sdpa') first"
            )
        self.layers = attention_layers(model, self.original)
        self._logits = 0
        self._route = Route(model, self.original, "sparse", _attend)
        inner = _inner(model)
        self._handles = [
            inner.register_forward_pre_hook(self._begin, with_kwargs=True),
            inner.register_forward_hook(self._end, always_call=True),
        ]
        if inner is not model:
            self._handles.append(model.register_forward_pre_hook(self._wanted, with_kwargs=True))

    def undo(self) -> None:
        """Takes everything back."""
        self._route.undo()
        for handle in self._handles:
            handle.remove()

    def _wanted(self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        wanted = inputs.get("logits_to_keep", 0)
        self._logits = wanted if isinstance(wanted, int) else 0

    def _begin(self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        cache: Any = inputs.get("past_key_values")
        logits, self._logits = self._logits, 0
        if getattr(cache, "prepared", None) is not self:
            what = "no cache" if cache is None else f"a {type(cache).__name__} that was not made for it"
            raise RuntimeError(
                f"this model is prepared for sparse attention and was run with {what}: pass past_key_values=a "
                f"SparseCache made for it, or give it its own attention back with restore(model)"
            )
        if module.training:
            raise RuntimeError("sparse attention is for inference: put the model in eval() mode")
        if args and "input_ids" not in inputs and isinstance(args[0], Tensor):
            inputs = {**inputs, "input_ids": args[0]}
        RUNNING.set(cache.begin(inputs, logits))

    def _end(self, *_: Any) -> None:
        RUNNING.set(None)


def _inner(model: Any) -> Any:
    """The part of a model that its layers are in and that every pass goes through."""
    decoder = model.get_decoder()  # OPT's forward goes past its base_model to this
    holds_layers = any(hasattr(part, "layer_idx") for part in decoder.modules())
    return decoder if holds_layers else model.base_model  # the decoder of ModernBERT is its head


PREPARED: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()


def prepare(model: Any) -> Prepared:
    """The model's preparation, made now if there is none."""
    prepared = PREPARED.get(model)
    if prepared is None:
        prepared = PREPARED[model] = Prepared(model)
    return prepared


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    """What the attention calls of prepared models come to."""
    run = RUNNING.get()
    if run is None:
        raise RuntimeError("a layer of a model prepared for sparse attention was called outside a pass of the model")
    call = Call(module, query, key, value, attention_mask, options)
    layers = run.cache.layers  # some releases have none for a layer that shares another's keys
    if call.layer < len(layers) and isinstance(layers[call.layer], SparseLayer):
        return layers[call.layer].attend(call, run), None
    run.cache.count_dense(call.layer)
    return delegate(call, run.original)


def restore(model: Any) -> None:
    """Gives a prepared model its own attention back. Its SparseCaches can then only be read; make new ones to go on."""
    prepared = PREPARED.pop(model, None)
    if prepared is not None:
        prepared.undo()
