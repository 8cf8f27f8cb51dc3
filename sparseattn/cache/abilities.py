"""Which parts of a selector can do what: looked up once for a cache, so that no step walks through them."""

from __future__ import annotations

from dataclasses import dataclass

from sparseattn.selectors.abilities import (
    Evicts,
    FollowsChecks,
    FollowsMoves,
    HasTail,
    LooksAhead,
    Observes,
    ReadsKeys,
    ReadsRoundedKeys,
    WeighsUnsealed,
)
from sparseattn.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class Abilities:
    """Those of a selector and its parts that have an ability.

    Args:
        observers: are shown what a step's selection got.
        tail: has rows of its own to attend to; None: nobody has.
        evictors: drop rows.
        check_followers: are shown the queries of dense passes.
        followers: follow rows that are moved when others are freed.
        key_readers, rounded_readers: have a view of the sealed keys, or of their codes.
        looks_ahead, weighs_unsealed: whether any part asks for a query foreseen, or for the weight of what is read
            anyway.
    """

    observers: tuple[Observes, ...]
    tail: HasTail | None
    evictors: tuple[Evicts, ...]
    check_followers: tuple[FollowsChecks, ...]
    followers: tuple[FollowsMoves, ...]
    key_readers: tuple[ReadsKeys, ...]
    rounded_readers: tuple[ReadsRoundedKeys, ...]
    looks_ahead: bool
    weighs_unsealed: bool

    @classmethod
    def of(cls, selector: Selector) -> Abilities:
        """Look them up.

        Raises:
            ValueError: more than one part has a tail.
        """
        tails = selector.find(HasTail)
        if len(tails) > 1:
            raise ValueError(f"{selector!r} is made of {len(tails)} methods that have a tail, and a step has one")
        return cls(
            tuple(selector.find(Observes)),
            tails[0] if tails else None,
            tuple(selector.find(Evicts)),
            tuple(selector.find(FollowsChecks)),
            tuple(selector.find(FollowsMoves)),
            tuple(selector.find(ReadsKeys)),
            tuple(selector.find(ReadsRoundedKeys)),
            bool(selector.find(LooksAhead)),
            bool(selector.find(WeighsUnsealed)),
        )
