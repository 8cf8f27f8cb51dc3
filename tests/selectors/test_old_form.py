"""A class that is written for the contract as it was is refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest

from sparseattn import KVCache, Selector, Window


def select(self: Selector, query: Any, positions: Any, budget: int) -> Any:
    """As it was."""


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"evicts": True}, "Mine sets evicts = True: a class now names Evicts in its bases"),
        ({"queries_share": 0.25}, "Mine sets queries_share = 0.25: a class now names LearnsFromQueries"),
        (
            {"select": select},
            r"Mine.select takes \(query, positions, budget\): it is select\(query, step, budget\) now",
        ),
        ({"cost": select}, "Mine has cost: the Scan that scan returns names launches, lists and rows now"),
    ],
    ids=["ability", "learns", "select", "cost"],
)
def test_a_class_of_the_old_form_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        type("Mine", (Selector,), attributes)


def test_a_method_of_an_ability_that_is_not_named_is_refused_by_a_cache() -> None:
    class Shared:
        def observe(self, *given: Any) -> None:
            """What nobody calls."""

    class Mine(Shared, Window):
        keep = 0.5  # no method

    with pytest.raises(ValueError, match="Mine has observe, which nobody calls unless the class names Observes"):
        KVCache(Mine())
