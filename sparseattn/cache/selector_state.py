"""What files say of the selector whose state they hold, and the state itself: its tensors and its plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer, State
from sparseattn.selectors.base import Selector
from sparseattn.selectors.identity import identity

NUMBERS = (bool, int, float)
OF_CACHE = ("fixed_for_cache", "rows_of_cache")  # what a cache sets of its selector


def described(selector: Selector) -> dict[str, str]:
    """Return what tells the index of given rows from others', as entries of a file's metadata."""
    return {
        "selector": identity(type(selector)),
        "arguments": json.dumps(selector.index_arguments(), sort_keys=True),
    }


def check_described(said: Mapping[str, Any], selector: Selector, **more: str) -> None:
    """Refuse what was written of another selector than this one, or has other entries than `more`: ValueError, whose
    sentence goes on behind the name of a file."""
    wording = {"selector": "an index of", "arguments": "built with", "rows": "of the rows with SHA-256"}
    wording["source"] = "made by"
    for name, mine in {**described(selector), **more}.items():
        if said.get(name) != mine:
            raise ValueError(f"{wording[name]} {said.get(name)}, here it would be {mine}")


def filled(selector: Selector) -> list[tuple[str, RowBuffer]]:
    """Return its row buffers that hold something, by name."""
    return [(name, state) for name, state in selector.buffers() if isinstance(state, RowBuffer) and state.rows]


def saved_states(states: Mapping[str, State]) -> dict[str, Tensor]:
    """Return what all of them hold, as `state.part`. ValueError where one is not kept in tensors."""
    tensors: dict[str, Tensor] = {}
    for name, state in states.items():
        try:
            tensors |= {f"{name}/{part}": tensor for part, tensor in state.saved().items()}
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return tensors


def restore_states(states: Mapping[str, State], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Make empty states hold what `saved_states` gave. ValueError for what none of them holds."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        state, _, part = name.rpartition("/")
        parts.setdefault(state, {})[part] = tensor
    if unknown := parts.keys() - states.keys():
        raise ValueError(f"it holds {', '.join(sorted(unknown))}, which nothing here keeps")
    for name, each in parts.items():
        try:
            states[name].restore(each, device)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{name} does not fit: {error}") from error


def counted(selector: Selector) -> dict[str, Any]:
    """Return the plain numbers that it and its parts keep beside states, such as how many rows they were shown."""
    own = {
        name: value
        for name, value in vars(selector).items()
        if type(value) in NUMBERS and name not in OF_CACHE and name not in selector.arguments()
    }
    return own | {
        f"{name}.{inside}": count for name, part in selector.parts() for inside, count in counted(part).items()
    }


def set_counted(selector: Selector, given: Mapping[str, Any]) -> None:
    """Set what `counted` gave. ValueError for what is no number of the selector's."""
    mine = counted(selector)
    for name, count in given.items():
        if type(mine.get(name)) is not type(count):
            raise ValueError(f"it says {name} = {count!r}, and {selector!r} keeps {', '.join(mine) or 'no number'}")
        *inner, attribute = name.split(".")
        part: Any = selector
        for step in inner:
            part = getattr(part, step)
        setattr(part, attribute, count)
