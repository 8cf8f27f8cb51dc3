"""What `PageSelector` says to a subclass whose entries are not as they must be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import PageSelector, evaluate
from sparseattn.selectors.pages.base import Entries
from sparseattn.traces.synthetic import synthetic


class MeanKey(PageSelector):
    entry_names = ("mean",)

    def __init__(self, page: int = 16, group: str = "sum") -> None:
        super().__init__(page, group)

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.unflatten(2, (-1, self.page)).mean(3)}

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        return (query @ entries["mean"].mT).sum(2).masked_fill(~real[:, None], -torch.inf)


class WrongAxis(MeanKey):
    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.unflatten(2, (-1, self.page)).mean(2)}


class WrongName(MeanKey):
    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {"means": super().entries(keys)["mean"]}


class NotInitialised(MeanKey):
    def __init__(self, page: int = 16, group: str = "sum") -> None:
        self.page, self.group = page, group


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        (WrongAxis(), r"entries of WrongAxis returned mean as \[1, 2, 16, 32\] .* must be .* = \[1, 2, 8,..\]"),
        (WrongName(), "entries of WrongName returned means, and its entry_names are mean: they must be the same"),
        (NotInitialised(), r"NotInitialised.__init__ has not called super\(\).__init__\(page, group\)"),
    ],
    ids=repr,
)
def test_entries_that_are_not_as_they_must_be(selector: PageSelector, said: str) -> None:
    trace = synthetic(200, heads=2, group=2, size=32, clusters=8)
    assert evaluate(trace, MeanKey(), 64, window=64, last=2).mean("mass") > 0
    with pytest.raises(ValueError, match=said):
        evaluate(trace, selector, 64, window=64, last=2)
