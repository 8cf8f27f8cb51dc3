"""Prepare a transformers model for sparse attention and give it back: a route for its calls, a frame for its passes.

Threads may share a prepared model if each has a cache of its own: what is known of a pass lies in context variables.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from sparseattn.models.attention_layers import attention_layers
from sparseattn.models.attention_routing import Call, Route, delegate, implementation, name_of
from sparseattn.models.cache_argument import cache_in, cache_name
from sparseattn.models.dense_decoding import decode_densely
from sparseattn.models.errors import ModelError
from sparseattn.models.exclusive import alone
from sparseattn.models.sparse_layer import RUNNING, SparseLayer

# How many of the last tokens the pass in progress returns logits of; 0: all.
_LOGITS_TO_KEEP: ContextVar[int] = ContextVar("sparseattn_logits_to_keep", default=0)


class Prepared:
    """A model whose attention calls `_attend` answers, and whose passes say which cache they run with.

    Attributes:
        original: the name of its own attention implementation.
        layers: its softmax attention layers, by number.
        undone: whether it has its own attention back.
        due: whether the `SparseCache` that it was prepared for is done with it.
    """

    def __init__(self, model: Any) -> None:
        self.undone = self.due = False
        self._depth = getattr(_inner(model).config, "num_hidden_layers", None)
        with alone(model, "prepared for sparse attention"):
            self.original = implementation(model)
            if self.original not in ("sdpa", "eager") and "flash" not in self.original:
                raise ModelError(
                    f"the attention of {name_of(model)} is {self.original!r}; sparse attention goes with sdpa, eager "
                    f"and flash attention: model.set_attn_implementation('sdpa') first"
                )
            self.layers = attention_layers(model, self.original)
            self._route = Route(model, self.original, "sparse", _attend)
            inner = _inner(model)
            try:
                if inner is not model:
                    _Whole.put_on(model, self)
                _Inner.put_on(inner, self)
                self._route.set()
            except BaseException:
                self.undo(model)
                raise

    def undo(self, model: Any) -> None:
        """Give the model its own attention and its own `forward` back."""
        self.undone = True
        self._route.undo()
        for module in (model, _inner(model)):
            _Around.take_off(module)

    def cache_of(self, module: Any, inputs: dict[str, Any]) -> Any:
        """Return the `SparseCache` among the arguments, by name, of a pass of the model's inner part.

        Raises:
            RuntimeError: there is another cache or none, or the model is being trained.
            ModelError: it drafts with fewer layers (`assistant_early_exit`).
        """
        cache = cache_in(inputs)
        if getattr(cache, "prepared", None) is not self:
            self._check_depth(module.config)
            what = "no cache" if cache is None else f"a {type(cache).__name__} that was not made for it"
            raise RuntimeError(
                f"this model is prepared for sparse attention and was run with {what}: pass {cache_name()}=a "
                f"SparseCache made for it, or give it its own attention back with restore(model)"
            )
        if module.training:
            raise RuntimeError("sparse attention is for inference: put the model in eval() mode")
        return cache

    def _check_depth(self, config: Any) -> None:
        """Refuse, by ModelError, a pass with fewer layers, and give the model all of them back: transformers does that
        behind a pass of its `assistant_early_exit`, but not where the pass ends in an error."""
        if self._depth is None or getattr(config, "num_hidden_layers", self._depth) == self._depth:
            return
        config.num_hidden_layers, fewer = self._depth, config.num_hidden_layers
        raise ModelError(
            f"assistant_early_exit drafts with the model's first {fewer} layers and a cache of transformers' own, "
            f"which a model prepared for sparse attention does not run: take prompt_lookup_num_tokens=, an "
            f"assistant_model= or generate_lossless"
        )


class _Around(ABC):
    """Stand in for a module's `forward`, so that the end of every pass is seen, also by an error or Ctrl-C.

    Hooks do not see such ends. A copy or a pickle of the module takes one of its own along.

    Args:
        module: whose `forward` it stands in for; held weakly, as the module holds this.
        prepared: the preparation of its model.
        own: the `forward` that the module itself had in place of its class's, if any.
    """

    def __init__(self, module: nn.Module, prepared: Prepared, own: Callable[..., Any] | None) -> None:
        self._module, self.prepared, self._own = weakref.ref(module), prepared, own
        self.__signature__ = inspect.signature(self._forward())  # generate() looks which arguments there are
        parameters = self.__signature__.parameters.values()
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] or ["input_ids"]

    @classmethod
    def put_on(cls, module: nn.Module, prepared: Prepared) -> None:
        """Stand in for the module's `forward` from now on."""
        vars(module)["forward"] = cls(module, prepared, vars(module).get("forward"))

    @staticmethod
    def take_off(module: nn.Module) -> None:
        """Give a module its `forward` back; where that has been wrapped again since, this stays and only passes on."""
        around = vars(module).get("forward")
        if isinstance(around, _Around):
            if around._own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = around._own

    def _forward(self) -> Callable[..., Any]:
        module: Any = self._module()
        return types.MethodType(type(module).forward, module) if self._own is None else self._own

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        forward = self._forward()
        return forward(*args, **inputs) if self.prepared.undone else self._run(forward, args, inputs)

    @abstractmethod
    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Run the pass."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self.prepared, self._own)


class _Whole(_Around):
    """Around a model: notes how many logits are wanted, which its inner part is not told."""

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        keep = inputs.get("logits_to_keep", 0)
        try:
            _LOGITS_TO_KEEP.set(keep if isinstance(keep, int) else 0)
            return forward(*args, **inputs)
        finally:
            _LOGITS_TO_KEEP.set(0)


class _Inner(_Around):
    """Around the part of a model that its layers are in: says to this thread alone which cache the pass runs with."""

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        named = {**dict(zip(self._positional, args, strict=False)), **inputs} if args else inputs
        cache = self.prepared.cache_of(self._module(), named)
        before = RUNNING.get()
        run = cache.begin(named, _LOGITS_TO_KEEP.get())
        try:
            RUNNING.set(run)
            out = forward(*args, **inputs)
            cache.end()
        except BaseException:
            cache.cut_short()
            raise
        finally:
            RUNNING.set(before)
        return out


def _inner(model: Any) -> Any:
    """Return the part of a model that its layers are in and that every pass goes through."""
    decoder = model.get_decoder()  # OPT's forward goes past its base_model to this
    holds_layers = any(hasattr(part, "layer_idx") for part in decoder.modules())
    return decoder if holds_layers else model.base_model  # the decoder of ModernBERT is its head


# Models are prepared and given back by one thread at a time.
_CHANGING = threading.RLock()
# Which preparation a SparseCache has and which thread made it, until it is done with its model.
_HOLDERS: weakref.WeakKeyDictionary[Any, tuple[Prepared, threading.Thread]] = weakref.WeakKeyDictionary()


def preparation(model: Any) -> Prepared | None:
    """Return the model's preparation, None without one. A copy of a prepared model has one of its own."""
    if not hasattr(model, "get_decoder"):
        return None
    around = vars(_inner(model)).get("forward")
    return around.prepared if isinstance(around, _Around) else None


def prepare(model: Any, cache: Any) -> tuple[Prepared, bool]:
    """Prepare the model for a `SparseCache`, unless it is, and return the preparation and whether it was there before.

    Another thread that leaves the model (see `leave`) does not undo it while this cache has it.
    """
    with _CHANGING:
        prepared = preparation(model)
        was_prepared = prepared is not None
        if prepared is None:
            prepared = Prepared(model)
        _HOLDERS[cache] = prepared, threading.current_thread()
        return prepared, was_prepared


def leave(cache: Any, was_prepared: bool) -> None:
    """Say that a `SparseCache` is done with its model.

    The model then gets its own attention back, unless the cache had found it prepared (`was_prepared`). Where other
    threads decode with it, the last of them that leaves gives it back.
    """
    with _CHANGING:
        prepared: Prepared = cache.prepared
        _HOLDERS.pop(cache, None)
        prepared.due = prepared.due or not was_prepared
        current = threading.current_thread()
        threads = [thread for holder, thread in list(_HOLDERS.values()) if holder is prepared]
        in_use = any(thread is not current and thread.is_alive() for thread in threads)
        if prepared.due and not in_use and preparation(cache.model) is prepared:
            restore(cache.model)


def restore(model: Any) -> None:
    """Give a prepared model its own attention back.

    Its SparseCaches can then only be read; make new ones to go on. A pass that another thread runs at that moment ends
    with an error.
    """
    with _CHANGING:
        prepared = preparation(model)
        if prepared is not None:
            prepared.undo(model)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    """Answer an attention call of a prepared model."""
    run = RUNNING.get()
    if run is None:
        raise RuntimeError(
            "a layer of a model prepared for sparse attention was called outside a pass of the model, or in a pass "
            "that began before it was prepared"
        )
    call = Call(module, query, key, value, attention_mask, options)
    index, layers = call.layer, run.cache.layers  # some releases have no entry for a layer that shares another's keys
    layer = layers[index] if index < len(layers) else None
    if isinstance(layer, SparseLayer):
        return layer.attend(call, run), None
    run.cache.count_dense(index)
    out = decode_densely(call, run.original, run.cache.impl, run.cache.dense_rows)
    return delegate(call, run.original) if out is None else (out, None)
