"""What Quest keeps of each page: the least and the largest of its keys in every channel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PageBounds:
    """Channelwise bounds of the keys of P pages, views of storage.

    Args:
        minimum, maximum: `[B,H,P,D]` of the keys' dtype, or int8 with a `step`. Pages that are not valid may hold
            anything. In a store that sequences share, as a serving engine's blocks do: `[pages,H,D]`.
        valid: `[B,P]` bool, which pages are there and no padding; None in a store, where a table says it.
        step: `[B,H,D]` float32, what 1 of a channel of int8 bounds stands for; None: bounds are the numbers themselves.
    """

    minimum: Tensor
    maximum: Tensor
    valid: Tensor | None = None
    step: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VotedBounds:
    """Bounds in a store, and how a query group votes by them, see `dispatch.page_scores_at`.

    Args:
        bounds: of pages.
        group: "sum", "max" or "each".
        temperature: what bounds of logits are divided by.
        of_keys: whether they are the least and largest keys of their pages, and nothing that a method makes of them.
    """

    bounds: PageBounds
    group: str
    temperature: float
    of_keys: bool = False
