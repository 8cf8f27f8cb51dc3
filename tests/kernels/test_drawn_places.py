"""Places drawn at random: each set as probable as another, and the same ones by each implementation."""

from __future__ import annotations

import pytest
import torch

from sparseattn.kernels.drawn_places.dispatch import places_drawn
from sparseattn.kernels.random_draws import streams


@pytest.mark.parametrize("count", [1, 5, 200, 700])
def test_places_are_drawn_without_replacement_and_every_pair_as_often(count: int) -> None:
    places = min(count, 40)
    drawn = places_drawn(
        streams(3, 0, range(50), torch.device("cpu")), torch.arange(40), torch.tensor(40 * [count]), places
    )
    assert drawn.shape == (40, 50, places)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < count
    there = torch.zeros(2000, count).scatter_(1, drawn.flatten(0, 1), 1.0)
    assert bool((there.sum(1) == places).all()), "distinct"
    together = (there.mT @ there / 2000)[~torch.eye(count, dtype=torch.bool)]  # of each pair
    if count > 1:
        chance = places * (places - 1) / count / (count - 1)
        assert float((together - chance).abs().max()) < 6.5 * (chance * (1 - chance) / 2000) ** 0.5 + 5e-3
    one = streams(3, 0, [0], torch.device("cpu"))
    fewer = places_drawn(one, torch.tensor([9]), torch.tensor([count]), count + 3)
    assert fewer.sort().values.tolist() == [[[-1, -1, -1, *range(count)]]], "and no more than there are"


@pytest.mark.parametrize(("count", "places"), [(0, 4), (3, 10), (256, 256), (257, 257), (65_536, 300), (131_073, 2048)])
def test_compiled_draws_are_those_of_torch(count: int, places: int) -> None:
    """Around powers of two, where the network gets a bit more, and of sequences of other lengths in one batch."""
    stream = streams(-5, 2, range(3), torch.device("cpu"))
    asked = stream, torch.tensor([7, 2**40]), torch.tensor([count, count // 2]), places
    assert torch.equal(places_drawn(*asked, impl="torch"), places_drawn(*asked, impl="numba"))
