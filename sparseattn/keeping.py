"""What a selector keeps of the rows lies in `State`: looked at once, at its first seal.

The base class reorders, clones, moves and resets what is `State`. A tensor or a list beside it would stay as it was for
other sequences, which no result shows.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseattn.hashes import tensors_hash
from sparseattn.selectors.base import Rows, Selector
from sparseattn.storage import State

DEPTH = 4  # of objects within objects
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
WHOLE = (type, types.FunctionType, types.MethodType, types.ModuleType)  # not looked into


def append_first(selector: Selector, rows: Rows) -> Tensor | None:
    """`selector.append(rows)` of an empty selector; the order it returns.

    Raises:
        ValueError: it keeps tensors, arrays, lists, dicts, sets, modules or other objects of these rows that are no
            `State`, or a `State` that the constructor did not make. A plain number or text may change, and so may what
            the class names in `late`. What was put in place of an attribute is taken back.
    """
    before = {name: (value, _look(value, selector)) for name, value in _named(selector).items()}
    order = selector.append(rows)
    for name, value in _named(selector).items():
        if name in before and (isinstance(value, State) or before[name][1] == _look(value, selector)):
            continue
        if isinstance(value, PLAIN):
            continue
        if name in before:
            setattr(selector, name, before[name][0])
        else:
            delattr(selector, name)
        raise ValueError(
            f"append of {selector!r} has left a {type(value).__name__} in its attribute {name!r}: what it keeps of the "
            f"rows lies in State made in the constructor, tensors in a RowBuffer (sparseattn.storage), where reorder, "
            f"clone and reset find it; what no row decides, name in the class's `late`"
        )
    return order


def _named(selector: Selector) -> dict[str, Any]:
    return {name: value for name, value in vars(selector).items() if name != "stored" and name not in selector.late}


class _Held:
    """An object as it is now; equal to another look at the same one if nothing in it has changed since."""

    def __init__(self, value: Any, inside: object = None) -> None:
        self.value, self.inside = value, inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value and self.inside == other.inside

    __hash__ = None  # type: ignore[assignment]


class _HeldTensor(_Held):
    """A tensor; a copy of it, such as one on another device, is equal too."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value, self._version(value))

    @staticmethod
    def _version(value: Tensor) -> object:
        return tensors_hash({"": value}) if value.is_inference() else value._version  # the former count no versions

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _HeldTensor):
            return False
        if self.value is other.value:
            return self.inside == other.inside
        unchanged = self.inside == self._version(self.value)
        return unchanged and tensors_hash({"": self.value}) == tensors_hash({"": other.value})

    __hash__ = None


def _look(value: Any, selector: Selector, depth: int = DEPTH) -> object:
    """What is compared before and after: numbers and what containers hold, which object it is and what is in it."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, State):
        known = any(value is state for _, state in selector.buffers())
        return "state" if known else _Held(value, (value.rows, value.nbytes))
    if isinstance(value, Tensor):
        return _HeldTensor(value)
    if hasattr(value, "__array_interface__"):
        return type(value), value.shape, value.tobytes()
    if depth == 0 or isinstance(value, WHOLE):
        return _Held(value)
    if isinstance(value, Mapping):
        return type(value), [(_look(k, selector, depth - 1), _look(v, selector, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value), [_look(item, selector, depth - 1) for item in value]
    if isinstance(value, torch.nn.Module):
        return _Held(value, [_HeldTensor(part) for part in (*value.parameters(), *value.buffers())])
    named = getattr(value, "__dict__", {})
    return _Held(value, {n: _look(v, selector, depth - 1) for n, v in named.items() if not isinstance(v, PLAIN)})
