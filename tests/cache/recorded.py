"""A CUDA graph's rules on the CPU: a recording of the operations of a step, which can be run again on the same tensors.

What the host would have to wait for is refused while recording. Whatever the host computed from data, and every address
and shape, stays as it was when recorded, as in a graph: a replay shows if that was right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparseattn import A2ATS, Indexer, Selector
from sparseattn.kernels import implementations
from sparseattn.selectors.tokens.sign_base import SignCodes

aten = torch.ops.aten
WAITS = {  # the host reads a number, or the size of the result is one
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.nonzero_static,
    aten.masked_select,
    aten.bincount,
    aten.histc,
    aten.repeat_interleave,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.unique_dim_consecutive,
}
SIZED = {aten.repeat_interleave.self_int}  # by a number of the host's: the result's size is known


class HostWaits(RuntimeError):
    """An operation for which the host waits for the device, whose result's size is data, or that copies what only the
    host has, which a capture refuses."""


class Recording(TorchDispatchMode):
    """Records the operations inside `with recording:`.

    Attributes:
        steps: function, arguments and results of each, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func.overloadpacket in WAITS and func not in SIZED:
            raise HostWaits(f"{func} makes the host wait for the device")
        by_places = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
        if by_places and any(place is not None and place.dtype in (torch.bool, torch.uint8) for place in args[1]):
            raise HostWaits(f"{func} by a mask has a result whose size is data")
        out = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, out))
        return out

    def __enter__(self) -> Recording:
        # These read a CPU tensor's memory without an operation that could be seen.
        self._hidden = [mock.patch.object(Tensor, name, self._refuse(name)) for name in ("tolist", "numpy")]
        made = ((torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (Tensor, "new_tensor"))
        self._hidden += [
            mock.patch.object(where, name, self._refuse_made(getattr(where, name))) for where, name in made
        ]
        for patch in self._hidden:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._hidden:
            patch.stop()

    def _refuse(self, name: str) -> Callable[..., Any]:
        real = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                raise HostWaits(f"Tensor.{name} makes the host wait for the device")
            return real(tensor, *args, **kwargs)

        return read

    def _refuse_made(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                raise HostWaits(f"torch's {real.__name__} copies what only the host has, which a capture refuses")
            return real(*args, **kwargs)

        return make

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` recorded as one step, whatever it does inside: a kernel, whose interpreter works on the host."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                out = function(*args, **kwargs)
            finally:
                self._inside = False
            self.steps.append((function, args, kwargs, out))
            return out

        return run

    def replay(self) -> None:
        """Runs all of it again on what the same tensors hold now; results land where they did."""
        for function, args, kwargs, held in self.steps:
            schema = getattr(function, "_schema", None)
            alias = [part.alias_info for part in schema.returns] if schema is not None else None
            if alias and all(info is not None and not info.is_write for info in alias):
                continue  # a view shows what it shows
            out = function(*args, **kwargs)
            if alias and alias[0] is not None:
                continue  # written in place
            for new, old in zip(_tensors(out), _tensors(held), strict=True):
                old.copy_(new)


def _tensors(found: Any) -> list[Tensor]:
    return [part for part in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(part, Tensor)]


def choose_without_numba(patch: pytest.MonkeyPatch) -> None:
    """To choose as the recording does."""
    patch.setattr(implementations, "choose", implementations.choose.__wrapped__)  # what it has found is kept
    patch.setattr(implementations, "why_not_numba", lambda *_: "off")


def break_ties(patch: pytest.MonkeyPatch) -> None:
    """Part scores of sign codes by fractions on their tables, the same at every step, and the indexer's and a2ats's by
    fractions of rows. The first are whole numbers, the others those of few codes, and it is left open which of the rows
    with equal ones is read: torch finds them in an order that depends on how long the storage is."""
    tables, parts = SignCodes.tables, torch.rand(512, 16, generator=torch.Generator().manual_seed(0)) / 1000

    def parted(selector: SignCodes, query: Tensor) -> Tensor:
        found = tables(selector, query)
        return found + parts[: found.shape[-2]].to(found.device)

    patch.setattr(SignCodes, "tables", parted)
    for kind in (A2ATS, Indexer):
        patch.setattr(kind, "logits", _parted_by_row(kind.logits, parts.flatten()))


def _parted_by_row(logits: Callable[..., Tensor], parts: Tensor) -> Callable[..., Tensor]:
    def parted(selector: Selector, query: Tensor, valid: Tensor) -> Tensor:
        return logits(selector, query, valid) + parts[: valid.shape[1]].to(query.device)

    return parted
