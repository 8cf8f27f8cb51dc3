"""Random lives of a cache, each decode held against laws that no method may break.

A case is a method of `cases.py` and a number, from which everything else is drawn: shapes, zones, padding, budgets,
bits, and what happens between two decodes. More of them, and one alone:

    SPARSEATTN_CASES=100000 pytest tests/cache/test_random_decodes.py
    SPARSEATTN_CASE=quest:17 pytest tests/cache/test_random_decodes.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, KVCache, Mass, Recent, Selection, Selector, decode
from sparseattn.cache.input_checks import check_codec, check_compactable
from sparseattn.cache.shown_rows import unit_of
from sparseattn.codecs.base import RowCodec
from sparseattn.codecs.registry import as_codec, make_codec
from sparseattn.core.context import StepContext
from sparseattn.selectors.abilities import Evicts, ReadsRoundedKeys
from tests.cases import CASES, Case, Heaviest, by_name, on_device

SHARE = 1 / 8  # of the cases that come with each rarer setting
BASE = 128
EACH = -(-int(os.environ.get("SPARSEATTN_CASES", 2 * len(CASES))) // len(CASES))  # lives of each method of `CASES`
NAME, _, NUMBER = os.environ.get("SPARSEATTN_CASE", "").partition(":")

pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass
class Sequence:
    """What one sequence of the batch has been given and has not dropped, apart from the cache.

    Attributes:
        keys, values: `[H,T,D]` of its T tokens.
        numbers: `[T]`, which rise; no token of a life has another's (`Life.rows`).
        gone: `[H,T]` bool, which of them the method no longer holds.
        next: the position after its newest token's.
    """

    keys: Tensor
    values: Tensor
    numbers: Tensor
    gone: Tensor
    next: int = 0

    @property
    def tokens(self) -> int:
        return len(self.numbers)

    def add(self, keys: Tensor, values: Tensor, numbers: Tensor) -> None:
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        self.numbers = torch.cat([self.numbers, numbers])
        self.gone = torch.cat([self.gone, torch.zeros(keys.shape[:2], dtype=torch.bool)], 1)

    def crop(self, drop: int) -> None:
        left = self.tokens - drop
        self.keys, self.values, self.gone = self.keys[:, :left], self.values[:, :left], self.gone[:, :left]
        self.numbers = self.numbers[:left]


class Life:
    """A cache and the plain record of what it was given, through the events of one case."""

    def __init__(self, case: Case, number: int) -> None:
        self.draw = draw = random.Random(f"{case.name}:{number}")
        self._modes = random.Random(f"{case.name}:{number}:modes")
        torch.manual_seed(draw.getrandbits(48))
        selector = case.make()
        self.dtype = torch.bfloat16 if self.rare() else torch.float32
        self.size = draw.choice(sizes(selector, self.dtype))
        self.batch, self.heads, self.group = (
            draw.choice((1, 1, 2, 3)),
            draw.choice((1, 2, 3)),
            draw.choice((1, 2, 3, 5)),
        )
        self.kind = draw.choice(("normal", "normal", "wide", "few", "outlier"))
        self.gaps, self.pauses = self.rare(), self.rare()
        self.cache = KVCache(selector, **self.settings(case, selector))
        self.budget = self.drawn_budget(selector)
        nothing = torch.zeros(self.heads, 0, self.size, dtype=self.dtype)
        self.sequences = [
            Sequence(nothing, nothing, nothing[0, :, 0].long(), nothing[..., 0].bool()) for _ in range(self.batch)
        ]
        self.given, self.freed = 1, 0  # padding may be zeros

    def mode(self) -> contextlib.AbstractContextManager[None]:
        """Inference mode for some of what happens: tensors that it makes may not be changed outside it."""
        return torch.inference_mode() if self._modes.random() < 0.3 else contextlib.nullcontext()  # type: ignore[return-value]

    def rare(self) -> bool:
        return self.draw.random() < SHARE

    def settings(self, case: Case, selector: Selector) -> dict:
        draw, settings = self.draw, {}
        settings["sink"] = draw.choice((0, 0, 1, 4, 7, 60))
        settings["window"] = draw.choice((0, 1, 5, 8, 33))
        settings["rollback"] = draw.choice((0, 0, 3, 6))
        bits, group = draw.choice((2, 4, 8)), draw.choice((8, 16, 32))
        for part in selector.find(ReadsRoundedKeys):
            group = part.rounded_group
        codec = f"kivi:bits={bits},group={group}"
        if selector.find(ReadsRoundedKeys) or (self.rare() and keeps(selector, make_codec(codec))):
            settings |= {"rows": codec, "exact": True}
        unit = unit_of(selector, as_codec(settings.get("rows")))
        settings["seal"] = unit * draw.choice((1, 1, 2)) + draw.choice((0, 0, 5))
        if self.rare():
            settings["sealed_device"] = "cpu"
        elif "rows" not in settings and self.rare() and on_device(case):
            settings |= {"fixed": True, "capacity": 1024 + settings["sink"]}
        elif self.rare():
            settings["capacity"] = draw.choice((1, 50, 700))
        return settings

    def drawn_budget(self, selector: Selector) -> int | float | str | Mass | None:
        draw, span = self.draw, selector.span
        rows = span * draw.choice((1, 1, 2, 3)) + draw.choice((0, 0, 1, 20))
        share = draw.choice((0.01, 0.1, 0.5, 1.0))
        budgets = [rows, rows, share, f"{draw.randint(1, 100)}%", None]
        if selector.estimates or not selector.uses_budget:
            budgets += [Mass(draw.choice((0.3, 0.9, 1.0)), draw.choice((None, rows, share)))] * 2
        return draw.choice(budgets)

    def allowed(self) -> int:
        """Rows that a head may read of the sealed ones, by the budget as it was given."""
        budget, context = self.budget, max(sequence.tokens for sequence in self.sequences)
        if isinstance(budget, Mass):
            budget = budget.most
        if isinstance(budget, str):
            budget = int(budget[:-1]) / 100
        if isinstance(budget, float):
            return max(math.floor(budget * context + 1e-9), self.cache.selector.span)
        return max(context, self.cache.selector.span) if budget is None else budget

    # -- what happens ------------------------------------------------------------------------------------------------

    def rows(self, new: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values `[B,H,n,D]`, queries `[B,H,G,n,D]`; numbers `[B,n]`, which values begin with."""
        shape = (self.batch, self.heads, new, self.size)
        keys, values, queries = torch.randn(shape), torch.randn(shape), torch.randn(*shape[:2], self.group, *shape[2:])
        if self.kind == "wide":
            keys *= 4
        elif self.kind == "few":  # equal keys, whose scores tie
            keys = keys.round()
        elif self.kind == "outlier":
            keys[..., 0] += 20
        numbers = torch.arange(self.given, self.given + self.batch * new).view(self.batch, new)
        self.given += self.batch * new
        for channel, digit in enumerate(self.digits(numbers)):
            values[..., channel] = digit[:, None] / BASE
        return keys.to(self.dtype), values.to(self.dtype), queries.to(self.dtype), numbers

    def digits(self, numbers: Tensor) -> list[Tensor]:
        """What a value's first channels hold, times `BASE`: numbers that its dtype holds exactly."""
        return [numbers] if self.dtype == torch.float32 else [numbers // BASE, numbers % BASE]

    def append(self, real: list[list[bool]]) -> Tensor:
        """Appends rows, of which `real` `[B][n]` says where padding is; returns the queries of the newest."""
        keys, values, queries, numbers = self.rows(len(real[0]))
        positions = torch.full(numbers.shape, -1)
        for b, sequence in enumerate(self.sequences):
            for at, is_real in enumerate(real[b]):
                if is_real:
                    positions[b, at] = sequence.next + self.draw.choice((0, 0, 0, 7)) * self.gaps
                    sequence.next = int(positions[b, at]) + 1
            mine = torch.tensor(real[b])
            sequence.add(keys[b, :, mine], values[b, :, mine], numbers[b, mine])
        plain = all(map(all, real)) and not self.gaps
        with self.mode():
            self.cache.append(keys, values, queries, None if plain else positions)
        return queries[:, :, :, -1]

    def prefill(self) -> None:
        draw, longest = self.draw, self.draw.choice((1, 2, 30, 150, 300))
        lengths = [draw.choice((longest, longest, draw.randint(1, longest))) for _ in range(self.batch)]
        first = [draw.choice((0, longest - n, draw.randint(0, longest - n))) for n in lengths]
        real = [[0 <= at - start < n for at in range(longest)] for n, start in zip(lengths, first, strict=True)]
        chunk = draw.choice((longest, longest, 1 if longest < 40 else 64, 37))
        for start in range(0, longest, chunk):
            self.append([row[start : start + chunk] for row in real])
        if self.rare():
            self.cache.seal()

    def token(self, decodes: bool = True) -> None:
        """One more token of every sequence, or of those that do not pause."""
        real = [[not (self.pauses and self.rare())] for _ in range(self.batch)]
        query = self.append(real)
        if decodes and min(sequence.tokens for sequence in self.sequences):
            self.decode(query)

    def event(self) -> None:
        cache, draw = self.cache, self.draw
        kind = draw.choice(("tokens", "tokens", "chunk", "crop", "reorder", "clone", "compact", "reset"))
        if kind == "tokens":
            for _ in range(draw.choice((1, 3, 20))):
                self.token(decodes=False)
        elif kind == "chunk":
            self.append([[True] * draw.choice((2, 17, 40))] * self.batch)
        elif kind == "crop" and cache.rollback:
            unsealed = [
                sequence.tokens - (cache.sink + sealed if sealed else 1)
                for sequence, sealed in zip(self.sequences, cache.counts[1], strict=True)
            ]  # since the last seal some may have been dropped already
            self.crop([min(draw.randint(0, cache.rollback), rows) for rows in unsealed])
        elif kind == "reorder":
            many = self.batch if cache.fixed else draw.choice((1, 2, 3))
            index = [draw.randrange(self.batch) for _ in range(many)]
            with self.mode():
                cache.reorder(torch.tensor(index))
            self.sequences = [dataclasses.replace(self.sequences[b]) for b in index]
            self.batch = many
        elif kind == "clone":
            with self.mode():
                self.cache = cache.clone()
                cache.reset()
        elif kind == "compact" and compacts(cache):
            with self.mode():
                self.freed += cache.compact()
            assert cache.freed == self.freed
        elif kind == "reset" and self.rare():
            cache.reset()
            self.freed = 0
            for sequence in self.sequences:
                sequence.crop(sequence.tokens)
                sequence.next = 0
            self.prefill()

    def crop(self, drop: list[int]) -> None:
        """Drops rows that no seal has taken: those that `rollback` keeps, and more where none is sealed."""
        with self.mode():
            self.cache.crop(torch.tensor(drop))
        for sequence, rows in zip(self.sequences, drop, strict=True):
            sequence.crop(rows)
            sequence.next -= rows

    # -- the laws ----------------------------------------------------------------------------------------------------

    def decode(self, query: Tensor) -> None:
        cache, sealed = self.cache, self.cache.counts[1]
        with self.mode():
            cache.prepare(query, self.budget)  # seals what is due: what is dropped there is gone already
        kept = cache.window + cache.rollback
        for sequence, before, after in zip(self.sequences, sealed, cache.counts[1], strict=True):
            left = sequence.tokens - cache.sink - after
            assert after == before or left >= kept, "a row of the window, or one that crop may drop, was sealed"
        self.note_gone()
        with self.mode():
            got = decode(query, cache, self.budget, impl=self.draw.choice((None, None, "gather", "reference")))
        assert cache.counts[0] == [sequence.tokens for sequence in self.sequences]
        self.check(query, got)
        self.note_gone()

    def note_gone(self) -> None:
        """What the method holds no more, by token: it never comes back."""
        (selector,) = self.cache.selector.find(Evicts) or [None]
        if selector is None or not max(self.cache.counts[1]):
            return
        if (held := selector.held()) is None:
            return
        for b, (sequence, zone) in enumerate(zip(self.sequences, self.zone(), strict=True)):
            left = self.unsealed(b).expand(self.heads, -1).clone()  # [H,T]
            for h in range(self.heads):
                left[h, zone[h][held[b, h] & (zone[h] >= 0)]] = True
            assert not bool((sequence.gone & left).any()), "a row that was dropped is held again"
            sequence.gone = ~left

    def unsealed(self, b: int) -> Tensor:
        """`[T]`: which tokens every query reads: the sink, and those that are not sealed."""
        tokens = torch.arange(self.sequences[b].tokens)
        return (tokens < self.cache.sink) | (tokens >= self.cache.sink + self.cache.counts[1][b])

    def zone(self) -> list[Tensor]:
        """For each sequence `[H,N]`: which token lies at each place of the sealed zone; -1 for none."""
        found = []
        for b, sequence in enumerate(self.sequences):
            stored = self.cache.stored
            keys, values = (part[b].float() for part in (stored.sealed_keys, stored.sealed_values))
            number = (values[..., 0] * BASE).nan_to_num(-1).long()
            if self.dtype != torch.float32:
                number = number * BASE + (values[..., 1] * BASE).nan_to_num(-1).long()
            at = torch.searchsorted(sequence.numbers, number).clamp(max=sequence.tokens - 1)
            stored = torch.cat([keys, values], -1)
            given = torch.cat([sequence.keys, sequence.values], -1).float()
            same = stored == given.gather(1, at[..., None].expand(-1, -1, given.shape[2]))
            found.append(torch.where(same.all(-1), at, -1))
        return found

    def check(self, query: Tensor, got: Tensor) -> None:
        cache, selection, tail = self.cache, self.cache.search.latest, self.cache.search.latest_tail
        assert selection is not None
        nothing = torch.zeros(self.heads, 0, dtype=torch.int64)
        zone = self.zone() if max(cache.counts[1]) else [nothing] * self.batch
        places, used = zone[0].shape[1], selection.length > 0  # [B,Hs,S]
        assert bool((selection.length >= 0).all()), "a span of less than no row"
        assert bool((selection.length <= selection.span).all()), "a span longer than the longest"
        assert bool((selection.start[used] >= 0).all()), "a span begins before the first row"
        assert bool(((selection.start + selection.length)[used] <= places).all()), "a span ends behind the sealed rows"
        assert bool((selection.attended <= self.allowed()).all()), "more rows than the budget"
        chosen = self.of_each(selection.mask(places))  # [B,H,G,N]
        assert torch.equal(chosen.sum(-1), self.of_each(selection.attended)), "a row is named twice"
        keys, values = self.sealed(places)
        for b, sequence in enumerate(self.sequences):
            near, read = self.unsealed(b), chosen[b].any(1)  # [T], [H,N]
            assert bool((zone[b][read] >= 0).all()), "a row of padding, or of a token that was dropped, is named"
            at = zone[b].clamp(min=0)
            assert not bool((near[at] & read).any()), "a row that every query reads is named too"
            assert not bool((sequence.gone.gather(1, at) & read).any()), "a row that the method dropped is read"
            every = torch.ones(self.heads, self.group, int(near.sum()), dtype=torch.bool)
            parts = [(sequence.keys[:, near], sequence.values[:, near], every, torch.zeros(every.shape))]
            parts.append((keys[b], values[b], chosen[b], self.of_each(selection.row_bias(places))[b]))
            if tail is not None:
                own, rows = tail.selection, tail.keys.shape[2]
                biases = self.of_each(own.row_bias(rows))[b]
                parts.append((tail.keys[b], tail.values[b], self.of_each(own.mask(rows))[b], biases))
            logits = [
                (query[b].double() @ rows.double().mT / self.size**0.5 + bias).masked_fill(~which, -torch.inf)
                for rows, _, which, bias in parts
            ]
            summed = torch.cat([rows.double() for _, rows, _, _ in parts], 1)
            every_logit = torch.cat(logits, -1)  # [H,G,R]
            nothing = every_logit.isneginf().all(-1, keepdim=True)  # who reads no row gets zeros
            weights = torch.softmax(every_logit, -1).masked_fill(nothing, 0)
            summed = summed.masked_fill((weights == 0).all(1)[..., None], 0)  # what nobody reads may be anything
            tolerance = 1e-4 if self.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got[b].double(), weights @ summed, rtol=tolerance, atol=tolerance)

    def of_each(self, heads: Tensor) -> Tensor:
        """`[B,H,G,...]`: what is of each selection head `[B,Hs,...]`, for each query head."""
        return heads.unflatten(1, (self.heads, -1)).expand(-1, -1, self.group, *heads.shape[2:])

    def sealed(self, places: int) -> tuple[Tensor, Tensor]:
        """Sealed keys and values `[B,H,N,D]` as a step reads them: with a codec what their codes say."""
        if not places:  # as where the sequences that are left have no row in the zone
            return self.rows(0)[:2]
        codes = self.cache.stored.sealed_codes
        return (self.cache.stored.sealed_keys, self.cache.stored.sealed_values) if codes is None else codes.decoded()


def sizes(selector: Selector, dtype: torch.dtype) -> list[int]:
    """Head sizes that the method takes; in 16 bits those of which no two values are alike."""
    rotated = 0 if selector.layer_context.rope is None else selector.layer_context.rope.rotated
    least = max(rotated, 16 if dtype == torch.bfloat16 else 1)
    return [size for size in (1, 5, 16, 17, 32, 40, 64) if size >= least and takes(selector, size)]


def takes(selector: Selector, size: int) -> bool:
    """Whether it serves heads of this size."""
    try:
        selector.check_shape(1, None, size)
    except ValueError:
        return False
    return True


def keeps(selector: Selector, codec: RowCodec) -> bool:
    """Whether a codec may keep the cache's sealed rows."""
    try:
        check_codec(selector, codec, fixed=False)
    except ValueError:
        return False
    return True


def compacts(cache: KVCache) -> bool:
    """Whether dropped rows can be freed."""
    try:
        check_compactable(cache.selector, cache.fixed, cache.codec)
    except ValueError:
        return False
    return True


def live(case: Case, number: int) -> None:
    """One case, from its first row to its last decode."""
    life = Life(case, number)
    life.prefill()
    for _ in range(life.draw.choice((1, 3, 6))):
        for _ in range(life.draw.choice((1, 1, 4))):
            life.token()
        life.event()
    life.token()


@by_name([case for case in CASES if case.name == NAME] if NAME else CASES)
def test_every_decode_of_a_random_life_keeps_the_laws(case: Case) -> None:
    for number in [int(NUMBER)] if NUMBER else range(EACH):
        try:
            live(case, number)
        except Exception as error:
            raise AssertionError(f"SPARSEATTN_CASE={case.name}:{number} repeats this alone: {error}") from error


class Twice(Exact):
    """Names its first row twice."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        rows = super().select(query, step, budget).rows
        return Selection.tokens(torch.cat([rows[..., :1], rows[..., : budget - 1]], -1))


class Greedy(Exact):
    """Names a row more than its budget."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return super().select(query, step, budget + 1)


class Careless(Exact):
    """Names places in the order they come, padding among them."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        ids = torch.arange(min(budget, self.stored_keys().shape[2]))
        return Selection.tokens(ids.expand(*query.shape[:2], -1))


class Returning(Heaviest):
    """Names rows that it has dropped."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        chosen = super().select(query, step, budget)
        gone = (~self.held()).byte().argmax(-1, keepdim=True) if self.weight.rows else chosen.rows
        return Selection.tokens(gone) if self.weight.rows > self.rows else chosen


class Forgiving(Heaviest):
    """Says after a while that it holds all again."""

    def held(self) -> Tensor:
        held = super().held()
        return held if held.shape[2] < 150 else torch.ones_like(held)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Twice, "a row is named twice"),
        (Greedy, "more rows than the budget"),
        (Careless, "a row of padding"),
        (Returning, "a row that the method dropped is read"),
        (Forgiving, "a row that was dropped is held again"),
    ],
)
def test_the_laws_tell_a_method_that_breaks_them(
    method: type[Selector], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KVCache.__init__.__kwdefaults__, "check", False)
    assert told(Case(method.__name__, method, None), sentence)


def test_the_laws_tell_a_step_that_is_not_attention_over_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode
    monkeypatch.setitem(globals(), "decode", lambda *given, **settings: right(*given, **settings) * 1.01)
    assert told(Case("recent", Recent, None), "not close")


def told(case: Case, sentence: str) -> bool:
    """Whether one of a method's first lives breaks the law of that sentence."""
    for number in range(30):
        try:
            live(case, number)
        except AssertionError as error:
            if sentence in str(error):
                return True
    return False
