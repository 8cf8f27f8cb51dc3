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
    """The state holds exactly the `wanted` dtypes and shapes, and no NaN; else ValueError."""
    if set(state) != set(wanted):
        raise ValueError(f"it holds {_words(state)} where {_words(wanted)} are wanted")
    for name, (dtype, shape) in wanted.items():
        given = state[name]
        if given.dtype != dtype or tuple(given.shape) != shape:
            raise ValueError(f"{name} is {given.dtype} {list(given.shape)}, wanted is {dtype} {list(shape)}")
        if dtype.is_floating_point and bool(given.isnan().any()):
            raise ValueError(f"{name} has entries that are no numbers")


def check_finite(state: Loaded, *names: str) -> None:
    """No infinity in any of these; else ValueError."""
    for name in names:
        if name in state and not bool(state[name].isfinite().all()):
            raise ValueError(f"{name} has entries that are not finite")


def check_equal(state: Loaded, name: str, expected: Tensor) -> None:
    """What the rows themselves tell; else ValueError."""
    if not torch.equal(state[name], expected):
        raise ValueError(f"{name} is not that of the rows shown")


def check_lists(state: Loaded, name: str, real: Tensor) -> None:
    """Lists `[B,A,n,W]` name rows that are real, `real` `[B]` of them counted from 0, and then -1; else ValueError."""
    for lists, rows in zip(state[name], real.tolist(), strict=True):
        for one in lists:  # a head at a time: lists may be gigabytes
            if one.numel() and (int(one.min()) < -1 or int(one.max()) >= rows):
                raise ValueError(
                    f"{name} has entries from {int(one.min())} to {int(one.max())}; of {rows} rows it names 0 to "
                    f"{rows - 1}, and -1 is none"
                )
            if bool(((one[:, 1:] >= 0) & (one[:, :-1] < 0)).any()):
                raise ValueError(f"{name} has lists that go on behind their end")


def check_scored(state: Loaded, lists: str, scores: str) -> None:
    """`scores` are finite where `lists` name a row and -inf elsewhere; else ValueError."""
    named, score = state[lists] >= 0, state[scores]
    if not bool(torch.where(named, score.isfinite(), score.isneginf()).all()):
        raise ValueError(f"{scores} are not those of the rows in {lists}")


def check_no_order(order: Tensor | None) -> None:
    """For methods that leave rows as they are: there is no order; else ValueError."""
    if order is not None:
        raise ValueError("it holds an order of the rows where the method has none")


def of_parts(state: Loaded, *names: str) -> dict[str, Loaded]:
    """What is whose, for a method whose state is its parts' alone: part -> its state by its own names; ValueError for
    what is no part's."""
    split: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name, tensor in state.items():
        part, dot, own = name.partition(".")
        if not dot or part not in split:
            raise ValueError(f"it holds {name}, which is of none of the parts {', '.join(names)}")
        split[part][own] = tensor
    return dict(split)


def _words(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "nothing"
