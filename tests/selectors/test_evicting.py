"""Methods that drop rows: what they may not do, what `compact` refuses, and that storage is given back.

That what is decoded stays as it is, is a law (tests/selectors/test_laws.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, KVCache, Selection, Selector, Window, decode
from sparseattn.cache.selection_checks import ContractError
from sparseattn.core.context import StepContext
from sparseattn.evaluation.step_measures import compare
from sparseattn.selectors.abilities import Evicts, FollowsMoves
from tests.cases import Heaviest, Same, attention

B, H, G, D = 2, 2, 3, 32


def prefilled(selector: Selector, rows: int = 200, **settings) -> tuple[KVCache, Tensor]:
    """A cache of sink 4 and window 8 that holds rows, nothing of them sealed, and a query."""
    queries, keys, values = attention(B, H, G, rows, D)
    cache = KVCache(selector, sink=4, window=8, seal=32, **settings)
    cache.append(keys, values, queries)
    return cache, queries[:, :, :, -1]


class Forgetful(Heaviest):
    """Names rows that it has dropped."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        held = self.weight
        self.weight = held.clone()
        self.weight.data.zero_()
        chosen = super().select(query, step, budget)
        self.weight = held
        return chosen


class Repentant(Heaviest):
    """Takes back what it has dropped, at its second query."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__(rows)
        self.asked = 0

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if self.asked:
            self.weight.data.zero_()
        self.asked += 1
        return super().select(query, step, budget)


def test_a_row_that_was_dropped_is_never_named_again() -> None:
    sentence = r"it names row \d+, among them padding or what it had dropped"
    for selector, steps in ((Forgetful(), 0), (Same(Forgetful()), 0), (Repentant(), 1)):
        cache, query = prefilled(selector, check=True)
        for _ in range(steps):
            decode(query, cache, None)
        with pytest.raises(ContractError, match=sentence):
            decode(query, cache, None)


def test_storage_is_given_back_whatever_was_asked_for_at_first() -> None:
    for settings in ({}, {"capacity": 5000}, {"sealed_device": "cpu"}, {"sealed_device": "cpu", "capacity": 5000}):
        cache, query = prefilled(Heaviest(), 1000, **settings)
        cache.seal()
        stored = cache.stored.sealed_keys.untyped_storage().nbytes()
        assert cache.compact() == 1000 - 12 - 40
        left = cache.stored.sealed_keys.untyped_storage().nbytes()
        assert left <= B * H * D * 4 * (40 + 12 + 64) < stored / 8
        assert cache.selector.stored is not None
        assert cache.selector.stored.shape[2] == 40
        for _ in range(65):  # past the spare rows
            cache.append(*torch.randn(2, B, H, 1, D))
        assert decode(query, cache, 20).isfinite().all()
        assert cache.stored.sealed_keys.untyped_storage().nbytes() < stored / 4, "the capacity does not come back"
        assert cache.compact() == 65, "a seal later"
        assert cache.compact() == 0
        assert cache.freed == 1000 - 12 - 40 + 65
        cache.reset()
        assert cache.freed == 0


def test_nothing_is_compared_with_rows_that_are_gone() -> None:
    cache, query = prefilled(Heaviest())
    query = query[:1]
    cache.reorder(torch.tensor([0]))
    selection = cache.select(query, 20)
    assert 0 < float(compare(query, cache, selection, D**-0.5)["recall@100"].mean()) < 0.5, "of all rows, few are held"
    cache.compact()
    with pytest.raises(ValueError, match="compare reads every row, and compact has freed 148 of each head"):
        compare(query, cache, cache.select(query, 20), D**-0.5)


class Silent(Heaviest):
    """Does not say how its state follows."""

    def has(self, ability: type) -> bool:
        return super().has(ability) and ability is not FollowsMoves


class Fixed(Evicts, Window):
    def held(self) -> None:
        return None


class Odd(Heaviest):
    """Says what it holds by sequence, not by head."""

    def held(self) -> Tensor:
        return super().held()[:, 0]


class Failing(Heaviest):
    def keep(self, ids: Tensor) -> None:
        raise ArithmeticError("a fault of the method")


@pytest.mark.parametrize(
    ("selector", "settings", "sentence"),
    [
        (Exact(), {}, r"exact:.* drops no rows \(Evicts\), so there are none to free"),
        (
            Silent(),
            {},
            r":Silent:rows=40 does not say, or a part of it, how its state follows rows that move \(FollowsMoves\)",
        ),
        (Same(Silent()), {}, r":Same:.* does not say, or a part of it"),
        (
            Fixed(),
            {"capacity": 300, "fixed": True},
            "a fixed cache keeps its storage .* build the KVCache without fixed",
        ),
        (
            Odd(),
            {},
            r"held of .*:Odd:rows=40 is bool \[B,H,N\] = \[2, 2, 188\] on cpu or None, got torch.bool \[2, 188\]",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Selector) else None,
)
def test_what_cannot_be_freed_is_refused_and_the_cache_serves_on(
    selector: Selector, settings: dict, sentence: str
) -> None:
    cache, query = prefilled(selector, check=False, **settings)
    before = decode(query, cache, 20)
    with pytest.raises(ValueError, match=sentence):
        cache.compact()
    assert torch.equal(decode(query, cache, 20), before)


def test_a_method_that_fails_to_follow_voids_the_cache() -> None:
    cache, query = prefilled(Failing())
    cache.seal()
    with pytest.raises(ArithmeticError):
        cache.compact()
    with pytest.raises(RuntimeError, match="failed while rows were sealed or freed, so this cache is void"):
        decode(query, cache, 20)
