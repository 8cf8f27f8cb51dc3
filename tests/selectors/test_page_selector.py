"""What `PageSelector` says to a subclass whose entries or scores are not as they must be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import PageSelector, evaluate
from sparseattn.selectors.base import vote
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


class NoVote(MeanKey):
    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        return (query @ entries["mean"].mT).masked_fill(~real[:, None, None], -torch.inf)


class OneList(MeanKey):
    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        return super().scores(query, entries, real)[:, :1]


class Length(MeanKey):
    """With one number for each entry, `[B,H,E]`, and scores for each query head."""

    entry_names = ("length",)

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {"length": keys.unflatten(2, (-1, self.page)).mean(3).norm(dim=-1)}

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        found = query.norm(dim=-1, keepdim=True) * entries["length"][:, :, None]
        return vote(found.masked_fill(~real[:, None, None], -torch.inf), "each")


class NoGroup(Length):
    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        found = query.norm(dim=-1, keepdim=True) * entries["length"]  # [1,2,2,1] * [1,2,P]: heads are mixed up
        return vote(found.masked_fill(~real[:, None, None], -torch.inf), self.group)


class GroupForHead(Length):
    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        found = query.norm(dim=-1, keepdim=True) * entries["length"][:, None]  # [1,2,2,1] * [1,1,2,P]
        return vote(found.masked_fill(~real[:, None, None], -torch.inf), self.group)


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        (NoVote(), r"scores of NoVote returned \[5, 2, 7, 11\] for .* 11 pages: it must be \[B,Hs,P\] .* vote\("),
        (OneList(), r"scores of OneList returned \[5, 1, 11\] .* Hs = 2 \(per KV head\) or 14 \(per query head\)"),
        (NoGroup(), r"scores of NoGroup fails for 5 sequences, .* length \[5, 2, 11\] and real \[B,E\] = \[5, 11\]"),
        (GroupForHead(), r"scores of GroupForHead fails .* is written \[:, :, None\]"),
        (WrongAxis(), r"entries of WrongAxis returned mean as \[1, 2, 16, 32\] .* must be .* = \[1, 2, 8,..\]"),
        (WrongName(), "entries of WrongName returned means, and its entry_names are mean: they must be the same"),
        (NotInitialised(), r"NotInitialised.__init__ has not called super\(\).__init__\(page, group\)"),
    ],
    ids=repr,
)
def test_entries_and_scores_that_are_not_as_they_must_be(selector: PageSelector, said: str) -> None:
    trace = synthetic(200, heads=2, group=2, size=32, clusters=8)
    for right in (MeanKey(), Length()):
        assert evaluate(trace, right, 64, window=64, last=2).mean("mass") > 0
    with pytest.raises(ValueError, match=said):
        evaluate(trace, selector, 64, window=64, last=2)


def test_scores_of_the_wrong_shape_are_refused_without_check_too() -> None:
    query, entries, real = torch.randn(1, 2, 3, 32), {"mean": torch.randn(1, 2, 11, 32)}, torch.ones(1, 11) > 0
    with pytest.raises(ValueError, match=r"scores of NoVote returned \[1, 2, 3, 11\] .* Hs = 2 .* or 6"):
        NoVote().page_logits(query, entries, real)
