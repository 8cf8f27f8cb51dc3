"""A class that is written for the contract as it was is refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest

from sparseattn import Selector


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
        ({"observe": select}, "Mine defines observe, which nobody calls unless the class names Observes in its bases"),
    ],
    ids=["ability", "learns", "select", "cost", "method"],
)
def test_a_class_of_the_old_form_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        type("Mine", (Selector,), attributes)
