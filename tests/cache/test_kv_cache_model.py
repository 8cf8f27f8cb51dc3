"""KVCache against a model of plain lists: random appends with padding anywhere, crops, beams, clones and decodes, with
sealed rows beside the others and apart.

The model keeps every token of every sequence in a list and recomputes, by eye-sized code, which tokens are sealed, what
each selector would choose, and the attention over it.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, KVCache, Quest, Rows, Selector, attend, decode
from sparseattn.core.budget import budget_rows
from sparseattn.selectors.abilities import LearnsFromQueries
from tests.cases import Buckets, SampledBuckets, together

D = 4


class Watched(SampledBuckets):
    """Keeps what it was shown last, as numbers that stay."""

    late = ("last", "prompt")  # of one seal, whatever becomes of the sequences

    def __init__(self, queries_share: float, reverse: bool, last_queries: int, learns_once: bool = False) -> None:
        super().__init__(queries_share, reverse)
        self.last_queries, self.learns_once = last_queries, learns_once

    def append(self, rows: Rows) -> Tensor:
        assert (rows.queries is None) == (rows.query_positions is None)
        at = None if rows.query_positions is None else rows.query_positions.tolist()
        self.last = (rows.positions.tolist(), at, None if rows.queries is None else rows.queries.clone())
        handed = (rows.last_queries, rows.last_positions, rows.unsealed, rows.unsealed_positions)
        self.prompt = [part if part is None else part.clone() for part in handed]
        return super().append(rows)


def sampled(position: int, share: float) -> bool:
    return int((position + 1) * share) > int(position * share)


class Sequence:
    """Tokens (position, key [H,D], value [H,D], queries [H,G,D]), and the batches of token numbers sealed so far."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.batches: list[list[int]] = []
        self.asked: list[bool] = []  # whether a batch came with its queries
        self.next = 0

    @property
    def sealed(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def waiting(self, cache: KVCache) -> int:
        return max(len(self.tokens) - cache.sink - self.sealed - cache.window - cache.rollback, 0)

    def rows(self, ids: list[int], what: int, head: int) -> Tensor:
        return torch.stack([self.tokens[i][what][head] for i in ids])


def seal(model: list[Sequence], cache: KVCache, first: bool) -> None:
    span, waiting = cache.selector.unit, [one.waiting(cache) for one in model]
    slack = span - 1 if len({rows % span for rows in waiting}) > 1 else 0
    if max(waiting) < (1 if first else cache.seal_rows) + slack:
        return
    over = cache.selector.learns and cache.selector.all_learn_once and all(one.sealed for one in model)
    for one, rows in zip(model, waiting, strict=True):
        low = cache.sink + one.sealed
        one.asked.append(not over)
        one.batches.append(list(range(low, low + rows // span * span)))


def choice(selector: Selector, one: Sequence, head: int, group: int, query: Tensor, budget: int) -> list[int]:
    """Token numbers that `selector` chooses for query head `group` of `query` [G,D]."""
    sealed = [i for batch in one.batches for i in batch]
    if not sealed:
        return []
    if isinstance(selector, Exact):
        best = (one.rows(sealed, 1, head) @ query[group]).argsort(descending=True)
        return [sealed[i] for i in best[:budget].tolist()]
    if isinstance(selector, Quest):
        pages = [sealed[i : i + selector.page] for i in range(0, len(sealed), selector.page)]

        def bound(page: list[int]) -> float:
            keys = one.rows(page, 1, head)
            return float(torch.maximum(query * keys.amax(0), query * keys.amin(0)).sum())

        return [i for page in sorted(pages, key=bound, reverse=True)[: budget // selector.page] for i in page]
    assert isinstance(selector, Buckets)
    runs: list[list[int]] = []
    share = selector.queries_wanted[0]
    for batch, with_queries in zip(one.batches, one.asked, strict=True):
        if not batch:
            continue
        asked = [one.tokens[i][3][head] for i in batch if with_queries and sampled(one.tokens[i][0], share)]
        mean = torch.stack(asked).mean((0, 1)) if asked else torch.zeros(D, dtype=torch.float64)
        positive = ((one.rows(batch, 1, head) * mean).sum(-1) > 0).tolist()
        for side in (False, True):
            run = [i for i, up in zip(batch, positive, strict=True) if up == side]
            if run:
                runs.append(run[::-1] if selector.reverse else run)
    runs.sort(key=lambda run: float((query @ one.rows(run, 1, head).sum(0)).sum()), reverse=True)
    return [i for run in runs for i in run][:budget]


def check_shown(model: list[Sequence], selector: Watched) -> None:
    """The last seal showed each sequence's rows in order, and of the sampled ones the queries, then padding; none where
    they count once and every sequence had sealed rows."""
    positions, query_positions, queries = selector.last
    over = not model[0].asked[-1]
    assert (queries is None) == over
    for b, one in enumerate(model):
        tokens = [one.tokens[i] for i in one.batches[-1]]
        assert [at for at in positions[b] if at >= 0] == [token[0] for token in tokens]
        if over:
            continue
        chosen = [token for token in tokens if sampled(token[0], selector.queries_wanted[0])]
        padding = len(query_positions[b]) - len(chosen)
        assert query_positions[b] == [token[0] for token in chosen] + [-1] * padding
        for i, token in enumerate(chosen):
            assert torch.equal(queries[b, :, :, i], token[3])
        assert bool((queries[b, :, :, len(chosen) :] == 0).all())
    if not over:
        most = max(len(row) - row.count(-1) for row in query_positions)
        assert queries.shape[3] == most, "no more padding than the batch needs"


def check_prompt(model: list[Sequence], cache: KVCache, first: bool) -> None:
    """The first seal showed the last queries of all but the newest token, and the keys of what was not sealed."""
    assert isinstance(cache.selector, Watched)
    queries, at, keys, places = cache.selector.prompt
    if not (first and cache.selector.queries_wanted[1]):
        assert queries is at is keys is places is None
        return
    assert queries is not None
    assert at is not None
    assert keys is not None
    assert places is not None
    wanted = cache.selector.queries_wanted[1]
    if cache.selector.queries_wanted[0] == 1:  # those of every row behind the sealed ones
        wanted = max(wanted, cache.window + cache.rollback + cache.selector.unit)
    assert queries.shape[3] == at.shape[1] == wanted
    left = []
    for b, one in enumerate(model):
        prompt = one.tokens[:-1]
        asked = prompt[-wanted:]
        padding = at.shape[1] - len(asked)
        assert at[b].tolist() == [-1] * padding + [token[0] for token in asked]
        assert bool((queries[b, :, :, :padding] == 0).all())
        for i, token in enumerate(asked):
            assert torch.equal(queries[b, :, :, padding + i], token[3])
        left.append([token for i, token in enumerate(prompt) if not cache.sink <= i < cache.sink + one.sealed])
        real = places[b] >= 0
        assert places[b, real].tolist() == [token[0] for token in left[-1]]
        assert bool((keys[b, :, ~real] == 0).all())
        for i, token in zip(real.nonzero()[:, 0].tolist(), left[-1], strict=True):
            assert torch.equal(keys[b, :, i], token[1])


def check_step(model: list[Sequence], cache: KVCache, query: Tensor, budget: float | int | None) -> None:
    before = int(cache.sealed.sum())
    decoded = decode(query, cache.clone(), budget)
    selection = cache.select(query, budget)
    if isinstance(cache.selector, Watched) and int(cache.sealed.sum()) > before:
        check_shown(model, cache.selector)
        check_prompt(model, cache, before == 0)
    keys, values, bounds = together(cache)
    context = max(len(one.tokens) for one in model)
    rows = budget_rows(budget, context, cache.selector.span)
    assert cache.lengths.tolist() == [len(one.tokens) for one in model]
    assert cache.sealed.tolist() == [one.sealed for one in model]
    assert cache.positions.tolist() == [one.next - 1 for one in model]
    for impl in ("gather", "reference", None):
        out, lse = attend(query, keys, values, selection, bounds, impl=impl)
        torch.testing.assert_close(decoded, out)
        for b, one in enumerate(model):
            sealed = {i for batch in one.batches for i in batch}
            for h in range(query.shape[1]):
                for g in range(query.shape[2]):
                    ids = [i for i in range(len(one.tokens)) if i not in sealed]
                    ids += choice(cache.selector, one, h, g, query[b, h], rows)
                    if not ids:
                        assert bool((out[b, h, g] == 0).all())
                        assert bool(lse[b, h, g].isneginf())
                        continue
                    logits = one.rows(ids, 1, h) @ query[b, h, g] / D**0.5
                    torch.testing.assert_close(out[b, h, g], logits.softmax(0) @ one.rows(ids, 2, h))
                    torch.testing.assert_close(lse[b, h, g], logits.logsumexp(0))


def append(draw: random.Random, model: list[Sequence], cache: KVCache, heads: int, group: int, new: int) -> None:
    batch = len(model)
    keys, values = torch.randn(2, batch, heads, new, D, dtype=torch.float64)
    queries = torch.randn(batch, heads, group, new, D, dtype=torch.float64)
    share, gap = draw.choice([0, 0, 0.3, 0.9, 1.0]), draw.choice([1, 1, 3])
    padding = torch.rand(batch, new) < share
    explicit = bool(padding.any()) or draw.random() < 0.5
    at = torch.full((batch, new), -1)
    for b, one in enumerate(model):
        for j in range(new):
            if padding[b, j]:
                continue
            one.next += draw.randrange(gap) if explicit else 0
            at[b, j] = one.next
            one.tokens.append((one.next, keys[b, :, j], values[b, :, j], queries[b, :, :, j]))
            one.next += 1
    hidden = padding[:, None, :, None]
    cache.append(keys.masked_fill(hidden, 9.0), values.masked_fill(hidden, 9.0), queries, at if explicit else None)


@pytest.mark.parametrize("seed", [*range(48), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(48, 80))])
def test_a_cache_is_what_its_lists_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else True if made.dtype == torch.bool else 12345)

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    share = draw.choice([1.0, 0.5, 0.3, 0.07])
    watched = Watched(share, draw.random() < 0.5, draw.choice([0, 3]), draw.random() < 0.5)
    selector = draw.choice([Exact(), Quest(draw.choice([1, 2, 8])), watched, watched])
    span, heads, group = selector.span, draw.randint(1, 2), draw.randint(1, 3)
    settings = {
        "sink": draw.choice([0, 1, 5, 20, 60]),
        "window": draw.choice([0, 0, 1, 4, 40]),
        "seal": draw.choice([span, span, span + 3, 64]),
        "rollback": draw.choice([0, 0, 5]),
        "capacity": draw.choice([0, 300]),
        "sealed_device": draw.choice([None, "cpu"]),
    }
    pool = [(KVCache(selector, **settings), [Sequence() for _ in range(draw.randint(1, 4))], {"first": True})]
    for _ in range(draw.randint(5, 30)):
        cache, model, state = pool[draw.randrange(len(pool))]
        act = draw.choices(["append", "token", "decode", "crop", "beams", "clone", "reset"], [4, 5, 7, 2, 2, 1, 0.3])[0]
        if act in ("append", "token") or not cache.batch:
            append(draw, model, cache, heads, group, 1 if act == "token" else draw.choice([0, 1, 7, 30, 70]))
        elif act == "decode":
            seal(model, cache, state["first"])
            state["first"] = False
            query = torch.randn(len(model), heads, group, D, dtype=torch.float64)
            check_step(model, cache, query, draw.choice([span, 2 * span + 1, 40, 10**9, 0.5, None]))
        elif act == "crop":
            free = [
                max(len(one.tokens) - cache.sink - one.sealed, 0) if one.sealed else len(one.tokens) for one in model
            ]
            with pytest.raises(ValueError, match="rollback="):
                cache.crop(min(free) + 1)
            waits = cache.selector.queries_wanted[1] and not any(one.sealed for one in model)
            drop = [draw.randint(0, 0 if waits else min(rows, 6)) for rows in free]  # a series of drops may be refused
            cache.crop(torch.tensor(drop))
            for one, rows in zip(model, drop, strict=True):
                if rows:
                    one.next = one.tokens[-rows][0]
                    del one.tokens[-rows:]
        elif act == "beams":
            index = [draw.randrange(len(model)) for _ in range(draw.randint(1, 4))]
            cache.reorder(torch.tensor(index))
            model[:] = [copy.deepcopy(model[i]) for i in index]
        elif act == "clone" and len(pool) < 3:
            pool.append((cache.clone(), copy.deepcopy(model), dict(state)))
        elif act == "reset":
            cache.reset()
            model[:] = [Sequence() for _ in range(draw.randint(1, 4))]
            state["first"] = True


class Recorder(LearnsFromQueries, Selector):
    """Shows what it is shown, in two sizes of span."""

    late = ("shown",)  # the test's list, for one batch that is neither reordered nor reset

    def __init__(self, span: int, queries_share: float) -> None:
        self.span, self.queries_share = span, queries_share
        self.shown: list[Rows] = []

    def append(self, rows: Rows) -> None:
        assert rows.queries is not None
        kept = Rows(rows.keys.clone(), rows.values.clone(), rows.positions, rows.queries.clone(), rows.query_positions)
        self.shown.append(kept)

    def select(self, query, step, budget):
        raise AssertionError("not asked here")


@pytest.mark.parametrize("apart", [None, "cpu"])
@pytest.mark.parametrize(("span", "share"), [(1, 1.0), (4, 1), (4, 0.25)])
def test_a_selector_is_shown_each_sealed_token_once_with_its_own_key_value_and_queries(
    span: int, share: float, apart: str | None
) -> None:
    lengths, total = (90, 61, 33), 140
    keys, values = torch.randn(2, 3, 2, total, D)
    queries = torch.randn(3, 2, 2, total, D)
    recorder = Recorder(span, share)
    cache = KVCache(recorder, sink=3, window=5, seal=16, sealed_device=apart)
    at = torch.arange(total).expand(3, -1).clone()
    for b, n in enumerate(lengths):
        at[b, n:90] = -1
        at[b, 90:] -= 90 - n
    for start, stop in [(0, 40), (40, 90), *((t, t + 1) for t in range(90, total))]:
        part = slice(start, stop)
        cache.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part], at[:, part])
        if stop >= 90:
            cache.seal()
    assert len(recorder.shown) > 2
    for b in range(3):
        real = [i for i in range(total) if at[b, i] >= 0]
        expected = real[3 : 3 + int(cache.sealed[b])]
        shown = [rows.positions[b] >= 0 for rows in recorder.shown]
        assert torch.cat([rows.positions[b][s] for rows, s in zip(recorder.shown, shown, strict=True)]).tolist() == [
            int(at[b, i]) for i in expected
        ]
        asked = [rows.query_positions[b] >= 0 for rows in recorder.shown]
        learned = [i for i in expected if sampled(int(at[b, i]), share)]
        for name, whole, ids, real_rows in (
            ("keys", keys[b], expected, shown),
            ("values", values[b], expected, shown),
            ("queries", queries[b], learned, asked),
        ):
            pairs = zip(recorder.shown, real_rows, strict=True)
            got = torch.cat([getattr(rows, name)[b][..., kept, :] for rows, kept in pairs], -2)
            assert torch.equal(got, whole[..., ids, :]), name
    if share == 1:
        assert all(torch.equal(rows.query_positions, rows.positions) for rows in recorder.shown)


def test_padding_of_sequences_out_of_phase_stays_below_a_span_each() -> None:
    lengths = torch.tensor([200 - i for i in range(16)])
    at = torch.arange(200).expand(16, -1)
    at = torch.where(at < lengths[:, None], at, -1)
    cache = KVCache(Quest(16), sink=0, window=0, seal=16)
    cache.append(*torch.randn(2, 16, 1, 200, D), positions=at)
    for _ in range(320):
        cache.append(*torch.randn(2, 16, 1, 1, D))
        cache.seal()
    assert cache.keys.shape[2] <= 520 + 2 * 16


class _Composed(LearnsFromQueries, Selector):
    """Learns once itself, around a part that may not."""

    part_names = ("part",)
    queries_share, learns_once = 0.5, True

    def __init__(self, part: Selector) -> None:
        self.part = part

    def append(self, rows: Rows) -> None:
        self.part.append(rows)

    def select(self, query, step, budget):
        raise AssertionError("not asked here")


class _Behind(Quest, LearnsFromQueries):
    queries_share, learns_once = 0.5, True


@pytest.mark.parametrize(
    ("selector", "once"),
    [
        (_Composed(SampledBuckets(0.25)), False),  # which wants those of every seal
        (_Composed(Watched(0.25, True, 0, learns_once=True)), True),
        (_Composed(Quest(4)), True),
        (_Behind(), True),
    ],
    ids=["part does not", "both do", "part has no queries", "base behind"],
)
def test_a_method_learns_once_if_all_of_its_parts_do(selector: Selector, once: bool) -> None:
    assert selector.all_learn_once is once
    cache = KVCache(selector, sink=0, window=0, seal=16)
    at = torch.arange(32).expand(2, -1).clone()
    at[1, :] -= 28  # the second sequence has four rows, and seals none
    keys, values = torch.randn(2, 2, 1, 32, D)
    queries = torch.randn(2, 1, 2, 32, D)
    wanted = cache.stored.queries.wanted
    cache.append(keys, values, queries, at)
    assert wanted([16, 0])
    assert wanted([16, 4]) is not once
    cache.stored.zones.sealed = [16, 0]
    cache.reorder(torch.tensor([0, 0]))
    assert (cache.stored.queries.sampled.held.numel() == 0) is once, "what nobody will ask for is not kept"
