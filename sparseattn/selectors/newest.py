"""The newest rows of those that a method holds."""

from __future__ import annotations

from torch import Tensor


def newest(stored: Tensor, count: int | Tensor) -> Tensor:
    """Return which rows, or pages, are the newest `count` (or `[..,1]` of them) of those that are `stored` `[..,N]`
    bool: `[..,N]` bool."""
    newer = stored.flip(-1).cumsum(-1).flip(-1)  # stored from this one on
    return stored & (newer <= count)
