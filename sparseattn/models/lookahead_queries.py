"""The queries that a layer would make of the input of the attention layer before, as InfiniGen speculates with them.

InfiniGen, https://arxiv.org/abs/2406.19707. The layer's own code makes them, its norms and RoPE included: it is run on
the other input up to its attention call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparseattn.models.attention_routing import Call
from sparseattn.models.errors import ModelError


class _Caught(Exception):
    """Brings a query out of a layer before it attends."""

    def __init__(self, query: Tensor) -> None:
        super().__init__()
        self.query = query


def _catch(call: Call) -> NoReturn:
    raise _Caught(call.query)


class Foresight:
    """While it is open, each layer's queries ahead, of the forward pass that this thread has in progress.

    Args:
        modules: the attention module of every layer that has one, up to the last one wanted.
        listening: a context in which attention calls of this thread go to the function given to it.

    Attributes:
        queries: layer -> `[B,HG,n,D]`, of every layer but the first, from the time that the layer is called.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        listening: Callable[[Callable[[Call], Any]], AbstractContextManager[None]],
    ) -> None:
        self.queries: dict[int, Tensor] = {}
        self._modules, self._listening = dict(sorted(modules.items())), listening
        self._before: Tensor | None = None  # the input of the layer called last
        self._handles: list[RemovableHandle] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Foresight:
        for index, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._called(index), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _called(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            from sparseattn.models.transformers_classes import Cache

            if threading.get_ident() != self._thread:
                return

            named = "hidden_states" in options
            own: Tensor = options["hidden_states"] if named else args[0]
            before, self._before = self._before, own
            if index == min(self._modules):
                return
            assert before is not None  # that of the layer before, in this pass
            # Without the cache, which would take the keys for the layer's.
            given = {name: None if isinstance(value, Cache) else value for name, value in options.items()}
            if named:
                given["hidden_states"] = before
            try:
                with self._listening(_catch):
                    module.forward(*(args if named else (before, *args[1:])), **given)
            except _Caught as caught:
                self.queries[index] = caught.query
            else:
                raise ModelError(f"layer {index} makes no attention call of the input of the layer before")

        return hook
