"""What a state read from a file must be before a selector is filled with it: names, shapes, dtypes, ranges.

Compiled code and kernels trust the numbers of an index: a row that is not there would be read all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Loaded: TypeAlias = "Mapping[str, Tensor]"  # attribute of the selector -> what its row buffer is to hold
Wanted: TypeAlias = "Mapping[str, tuple[torch.dtype, tuple[int, ...]]]"


def check_tensors(state: Loaded, wanted: Wanted) -> None:
    """Refuse a state that holds other than the `wanted` dtypes and shapes, or a NaN: ValueError."""
    if set(state) != set(wanted):
        raise ValueError(f"it holds {_words(state)} where {_words(wanted)} are wanted")
    for name, (dtype, shape) in wanted.items():
        tensor = state[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, wanted is {dtype} {list(shape)}")
        if dtype.is_floating_point and bool(tensor.isnan().any()):
            raise ValueError(f"{name} has entries that are no numbers")


def check_finite(state: Loaded, *names: str) -> None:
    """Refuse an infinity in any of these: ValueError."""
    for name in names:
        if name in state and not bool(state[name].isfinite().all()):
            raise ValueError(f"{name} has entries that are not finite")


def check_equal(state: Loaded, name: str, expected: Tensor) -> None:
    """Refuse what is not `expected`, which the rows themselves tell: ValueError."""
    if not torch.equal(state[name], expected):
        raise ValueError(f"{name} is not that of the rows shown")


def check_lists(state: Loaded, name: str, valid: Tensor) -> None:
    """Refuse lists `[B,A,n,W]` that name others than the `valid` `[B]` rows of a sequence, counted from 0, and then -1:
    ValueError."""
    for by_head, rows in zip(state[name], valid.tolist(), strict=True):
        for lists in by_head:  # a head at a time: lists may be gigabytes
            if lists.numel() and (int(lists.min()) < -1 or int(lists.max()) >= rows):
                raise ValueError(
                    f"{name} has entries from {int(lists.min())} to {int(lists.max())}; of {rows} rows it names 0 to "
                    f"{rows - 1}, and -1 is none"
                )
            if bool(((lists[:, 1:] >= 0) & (lists[:, :-1] < 0)).any()):
                raise ValueError(f"{name} has lists that go on behind their end")


def check_scored(state: Loaded, lists: str, scores: str) -> None:
    """Refuse `scores` that are not finite where `lists` name a row and -inf elsewhere: ValueError."""
    named, score = state[lists] >= 0, state[scores]
    if not bool(torch.where(named, score.isfinite(), score.isneginf()).all()):
        raise ValueError(f"{scores} are not those of the rows in {lists}")


def check_no_order(order: Tensor | None) -> None:
    """Refuse an order, for methods that leave rows as they are: ValueError."""
    if order is not None:
        raise ValueError("it holds an order of the rows where the method has none")


def of_parts(state: Loaded, *names: str) -> dict[str, Loaded]:
    """Return the state of each part by its own names, for a method whose state is its parts' alone; ValueError for what
    is no part's."""
    split: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name, tensor in state.items():
        part, dot, own = name.partition(".")
        if not dot or part not in split:
            raise ValueError(f"it holds {name}, which is of none of the parts {', '.join(names)}")
        split[part][own] = tensor
    return dict(split)


def _words(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "nothing"
