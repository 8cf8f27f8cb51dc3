"""Intervals of means; what they say of servers is in tests/serving/test_endpoint.py."""

from __future__ import annotations

import math

from sparseattn.evaluation.intervals import draws_for, student


def half_of(count: int) -> float:
    """Half of Student's interval of so many draws, 0 and 1 by turns."""
    interval = student([float(n % 2) for n in range(count)])
    assert interval is not None
    return (interval[1] - interval[0]) / 2


def test_as_many_draws_as_an_interval_of_a_width_takes() -> None:
    count, wanted = 10, half_of(40)
    assert 40 <= draws_for(wanted, half_of(count), count) <= 44  # ten such draws spread 4 % wider than forty
    assert draws_for(half_of(count), half_of(count), count) == count
    assert draws_for(0.0, 1.0, count) == math.inf
