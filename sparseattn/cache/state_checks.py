"""What a selector keeps of the rows lies in `State`: looked at once, at its first seal.

The base class reorders, clones, moves and resets what is `State`. A tensor or a list beside it would stay as it was for
other sequences, which no result shows.

Not seen: what lies deeper than `DEPTH` objects within objects, what C code keeps out of Python's sight, and a tensor's
`.data` written to so that the sum of its bits stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import types
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparseattn.core.row_buffer import State
from sparseattn.selectors.base import Rows, Selector
from sparseattn.utils.hashing import tensors_hash

DEPTH = 8  # of objects within objects
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
WHOLE = (type, types.FunctionType, types.MethodType, types.ModuleType)  # not looked into
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
Seen: TypeAlias = "dict[int, tuple[int, object]]"  # the object with its depth, as an id lasts as long as its object


def append_first(selector: Selector, rows: Rows) -> Tensor | None:
    """`selector.append(rows)` of an empty selector; the order it returns.

    Raises:
        ValueError: it keeps tensors, arrays, lists, dicts, sets, modules or other objects of these rows that are no
            `State`, or a `State` that the constructor did not make. A plain number or text may change, and so may what
            the class names in `late`. What was put in place of an attribute is taken back.
    """
    before = {name: (state, _look(state.value, selector)) for name, state in _named(selector).items()}
    order = selector.append(rows)
    for name, state in _named(selector).items():
        if name in before and before[name][1] == _look(state.value, selector):
            continue
        if isinstance(state.value, PLAIN):
            continue
        if name in before:
            setattr(state.owner, state.attribute, before[name][0].value)
        else:
            delattr(state.owner, state.attribute)
        raise ValueError(
            f"append of {selector!r} has left a {type(state.value).__name__} in its attribute {name!r}: what it keeps "
            f"of the rows lies in State made in the constructor, tensors in a RowBuffer (sparseattn.core.row_buffer), "
            f"where reorder, clone and reset find it; what no row decides, name in the class's `late`"
        )
    return order


class _Kept(NamedTuple):
    """What an attribute of a selector, or of a part of it, holds."""

    owner: Selector
    attribute: str
    value: Any


def _named(selector: Selector) -> dict[str, _Kept]:
    """Return what a selector and its parts keep, by names as in `Selector.buffers`."""
    own = {
        name: _Kept(selector, name, value)
        for name, value in _attributes(selector).items()
        if name not in ("stored", "rounded", "layer_context") and name not in selector.late
    }
    inner = {f"{name}.{n}": state for name, part in selector.parts() for n, state in _named(part).items()}
    return own | inner


def _is_of(value: object, selector: Selector) -> bool:
    """Whether it is the selector, or a part of it."""
    return value is selector or any(_is_of(value, part) for _, part in selector.parts())


def _attributes(value: object) -> dict[str, Any]:
    """Return what an object keeps by name, in its `__dict__` and in the `__slots__` of its classes."""
    named = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
                    named[name] = slot.__get__(value)
    return named


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
        """Return the count of writes and, as none through `.data` counts, a sum of the bits, which is found on the
        device."""
        if value.is_inference():  # has no count
            return tensors_hash({"": value})
        integers = INTEGERS.get(value.element_size())
        if integers is None or value.layout != torch.strided or value.is_meta:
            return value._version
        plain = value.detach().resolve_conj().resolve_neg()
        return value._version, int(plain.view(integers).sum(dtype=torch.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _HeldTensor):
            return False
        if self.value is other.value:
            return self.inside == other.inside
        unchanged = self.inside == self._version(self.value)
        return unchanged and tensors_hash({"": self.value}) == tensors_hash({"": other.value})

    __hash__ = None


def _look(value: Any, selector: Selector, depth: int = DEPTH, seen: Seen | None = None) -> object:
    """Return what is compared before and after: numbers and what containers hold, which object it is and what is in it.

    Args:
        depth: how much deeper it looks.
        seen: what was looked into and how deep, by id, so that a circle ends.
    """
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, State):
        known = any(value is state for _, state in selector.buffers())
        return "state" if known else _Held(value, (value.rows, value.nbytes))
    if isinstance(value, Tensor):
        return _HeldTensor(value)
    if hasattr(value, "__array_interface__"):
        return type(value), value.shape, value.tobytes()
    if (content := _writable_bytes(value)) is not None:
        return type(value), hashlib.sha256(content).digest()
    seen = {} if seen is None else seen
    if isinstance(value, WHOLE) or _is_of(value, selector):  # whose attributes are looked at, one after the other
        return _Held(value)
    if depth <= seen.get(id(value), (0, None))[0]:
        return _Held(value)
    seen[id(value)] = depth, value

    def inside(part: object) -> object:
        return _look(part, selector, depth - 1, seen)

    if isinstance(value, Mapping):
        return type(value), [(inside(k), inside(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value), [inside(item) for item in value]
    if isinstance(value, torch.nn.Module):
        return _Held(value, [_HeldTensor(part) for part in (*value.parameters(), *value.buffers())])
    return _Held(value, {n: inside(v) for n, v in _attributes(value).items() if not isinstance(v, PLAIN)})


def _writable_bytes(value: object) -> bytes | None:
    """Return the content of an array.array, a bytearray or the like; None where nothing can be written."""
    try:
        with memoryview(value) as view:  # type: ignore[arg-type]
            return None if view.readonly else view.tobytes()
    except (TypeError, ValueError, BufferError):  # it shows no bytes, or not any more
        return None
