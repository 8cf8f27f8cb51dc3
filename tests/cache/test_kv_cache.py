"""KVCache: storage, growth, editing and its sentences. What it computes is in tests/selectors/test_laws.py."""

from __future__ import annotations

import array
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from sparseattn import (
    Exact,
    KVCache,
    LayerContext,
    Quest,
    Random,
    Rows,
    Selection,
    Selector,
    Window,
    decode,
    make_selector,
)
from sparseattn.cache import state_checks
from sparseattn.cache.query_buffers import sampled
from sparseattn.core.budget import budget_rows, parse_budget
from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.abilities import LearnsFromQueries, LooksAhead
from sparseattn.selectors.registry import SELECTORS
from tests.cases import Buckets, Heaviest, SampledBuckets, full, heads


def test_appending_a_token_does_not_copy_the_cache() -> None:
    _, keys, values = heads(1, 2, 2, 1000, 32)
    cache = KVCache(Exact(), sink=4, window=16, seal=64)
    cache.append(keys, values)
    places, token = set(), torch.zeros(1, 2, 1, 32)
    for _ in range(3000):
        cache.append(token, token)
        places.add(cache.keys.data_ptr())
    assert len(places) <= 5, "storage moved more than log(4) / log(1.5) + 1 times"
    grown = KVCache(Exact(), capacity=4000)
    grown.append(keys, values)
    place = grown.keys.data_ptr()
    for _ in range(3000):
        grown.append(token, token)
    assert grown.keys.data_ptr() == place


def test_decode_in_half_precision_follows_float64() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        queries, keys, values = heads(2, 2, 4, 300, 64, dtype)
        cache = KVCache(Exact(), sink=4, window=16)
        cache.append(keys, values)
        out = decode(queries[:, :, :, -1], cache, None)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), full(queries[:, :, :, -1], keys, values), rtol=0.02, atol=0.01)


def test_a_context_inside_sink_and_window_is_dense() -> None:
    queries, keys, values = heads(2, 2, 4, 30, 32)
    for sink, window in ((100, 0), (0, 100), (10, 20)):
        cache = KVCache(Quest(), sink=sink, window=window)
        for t in range(30):
            cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
            out = decode(queries[:, :, :, t], cache, 16)
            torch.testing.assert_close(
                out.double(),
                full(queries[:, :, :, t], keys[:, :, : t + 1], values[:, :, : t + 1]),
                rtol=1e-5,
                atol=1e-5,
            )
        assert int(cache.sealed.max()) == 0


def test_unsealed_rows_are_at_most_window_and_seal() -> None:
    """The rows read densely beyond the window stay below `seal` plus a span, as the docstring says."""
    _, keys, values = heads(1, 1, 1, 400, 32)
    for seal in (16, 64, 100):
        cache = KVCache(Quest(), sink=0, window=10, seal=seal)
        cache.append(keys[:, :, :50], values[:, :, :50])
        for t in range(50, 400):
            cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
            cache.seal()
            waiting = int(cache.lengths[0] - cache.sealed[0]) - 10
            assert 0 <= waiting < seal
            assert int(cache.sealed[0]) % 16 == 0


def test_quest_in_the_papers_setting_reads_the_current_page_and_the_budgets_pages() -> None:
    queries, keys, values = heads(1, 2, 2, 500, 32)
    cache = KVCache(**Quest.paper())
    cache.append(keys[:, :, :400], values[:, :, :400])
    for t in range(400, 500):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        selection = cache.select(queries[:, :, :, t], 64 - 16)
        current = t // 16 * 16
        assert int(cache.bounds.sealed[0]) == current, "the unsealed rows are exactly the current page"
        assert selection.attended.unique().tolist() == [48]
        assert selection.start.shape[1] == 4, "every query head has its own pages"


def test_a_batch_that_was_reset_takes_another_shape_and_dtype() -> None:
    cache = KVCache(Quest(), sink=1, window=2, seal=16)
    for batch, dtype in ((2, torch.float32), (3, torch.float16)):
        _, keys, values = heads(batch, 2, 1, 100, 32, dtype)
        cache.append(keys, values)
        cache.seal()
        assert cache.keys.shape == (batch, 2, 100, 32)
        cache.reset()


def test_to_moves_everything() -> None:
    _, keys, values = heads(1, 1, 1, 64, 32)
    cache = KVCache(Buckets(), sink=0, window=0, seal=16)
    cache.append(keys, values, keys[:, :, None])
    cache.seal()
    assert cache.to("meta") is cache
    assert cache.keys.device.type == "meta"
    assert cache.bounds.rows.device.type == "meta"
    assert cache.selector.mean.full.device.type == "meta"  # type: ignore[attr-defined]


def test_crop_continues_at_the_positions_of_what_was_dropped() -> None:
    _, keys, values = heads(1, 1, 1, 10, 32)
    cache = KVCache(Random(), rollback=4)
    cache.append(keys, values, positions=torch.arange(10)[None] * 3)
    cache.crop(2)
    assert cache.lengths.tolist() == [8]
    cache.append(keys[:, :, :1], values[:, :, :1])
    assert cache.positions.tolist() == [24]


def good() -> KVCache:
    cache = KVCache(Quest(), sink=2, window=4)
    cache.append(torch.zeros(1, 2, 40, 32), torch.zeros(1, 2, 40, 32))
    return cache


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda c: c.append(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 2, 32)), r"one shape \[B,H,n,D\]"),
        (lambda c: c.append(torch.zeros(2, 32), torch.zeros(2, 32)), r"\[B,H,n,D\]"),
        (lambda c: c.append(torch.zeros(1, 3, 1, 32), torch.zeros(1, 3, 1, 32)), r"got keys \[1, 3, 1, 32\]"),
        (lambda c: c.append(*torch.zeros(2, 1, 2, 1, 32).half()), "storage is torch.float32"),
        (lambda c: c.append(*torch.zeros(2, 1, 2, 1, 32).long()), "floating dtype"),
        (
            lambda c: c.append(*torch.zeros(2, 1, 2, 1, 32).to(torch.float8_e4m3fn)),
            "float32, float16, bfloat16 or float64; got torch.float8_e4m3fn",
        ),
        (lambda c: c.append(*torch.full((2, 1, 2, 1, 32), torch.nan)), "keys must be finite, got nan"),
        (lambda c: c.append(torch.zeros(1, 2, 1, 32), torch.full((1, 2, 1, 32), torch.inf)), "values must be finite"),
        (lambda c: c.append(*torch.zeros(2, 1, 2, 1, 32), positions=torch.tensor([[7]])), "continue after 39"),
        (lambda c: c.append(*torch.zeros(2, 1, 2, 2, 32), positions=torch.tensor([[50, 50]])), "rise from row to row"),
        (lambda c: c.append(*torch.zeros(2, 1, 2, 1, 32), positions=torch.tensor([41])), r"\[B,n\] = \[1, 1\]"),
        (lambda c: decode(torch.zeros(1, 2, 3, 64), c, 16), r"\[B,H,G,D\] = \[1, 2, 'G', 32\]"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32).half(), c, 16), "torch.float16"),
        (lambda c: decode(torch.zeros(1, 2, 0, 32), c, 16), r"G 1 or more, .*, got \[1, 2, 0, 32\]"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, 0), "at least 1 row, got 0"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, 1.5), r"\(0, 1\], got 1.5"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, True), "got True"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, 8), "less than one span"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, "5"), "less than one span"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, "5 %%"), r'a share \("1%"\) or "all", got .5 %%.'),
        (lambda c: decode(torch.zeros(1, 6, 1, 32), c, 16), r"\[B,Hq,1,D\] is query.view\(1, 2, 3, 32\) here"),
        (lambda c: c.select(torch.zeros(1, 6, 1, 32), 16), r"query.view\(1, 2, 3, 32\)"),
        (lambda c: decode(np.zeros((1, 2, 3, 32)), c, 16), r"query is a torch.Tensor, got a numpy.ndarray"),
        (
            lambda c: c.append(*np.zeros((2, 1, 2, 1, 32), np.float32)),
            r"keys is a torch.Tensor, got a numpy.ndarray: torch.from_numpy\(keys\)",
        ),
        (lambda c: c.append(torch.zeros(1, 2, 1, 32), [[0.0]]), r"values is a .*, got a list: torch.tensor\(values\)"),
        (
            lambda c: c.append(*torch.zeros(2, 1, 2, 1, 32), positions=np.array([[50]])),
            r"positions is a .*torch.from_numpy\(positions\)",
        ),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, 16, scale=math.nan), "scale is a finite number.* got nan"),
        (lambda c: decode(torch.zeros(1, 2, 3, 32), c, 16, scale="x"), "scale is a finite number.* got 'x'"),
        (lambda c: c.crop(-1), "0 or more"),
        (lambda c: c.reorder(torch.tensor([1])), "below the batch of 1"),
        (lambda c: c.reorder(torch.tensor([], dtype=torch.int64)), r"B' 1 or more, got tensor\(\[\]"),
        (lambda c: c.reorder([0]), r"index is a torch.Tensor, got a list: torch.tensor\(index\) makes one"),
        (lambda c: c.reorder(np.array([0])), r"index is a .*, got a numpy.ndarray: torch.from_numpy\(index\)"),
        (lambda c: c.append(None, torch.zeros(1, 2, 1, 32)), "keys is a torch.Tensor, got None"),
        (lambda c: c.append(torch.zeros(1, 2, 1, 32), None), "values is a torch.Tensor, got None"),
        (lambda c: c.select(None, 4), "query is a torch.Tensor, got None"),
        (lambda c: c.crop(torch.tensor(1.5)), r"an int or as integers \[B\] = \[1\], got tensor\(1.5"),
        (lambda c: c.crop(1.5), r"an int or as integers \[B\] = \[1\], got 1.5"),
        (lambda c: c.crop(True), "got True"),
        (lambda c: c.crop(None), "got None"),
        (lambda c: c.crop(torch.tensor([1, 1])), r"\[B\] = \[1\], got tensor\(\[1, 1"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_stored(act, sentence: str) -> None:
    cache = good()
    with pytest.raises(ValueError, match=sentence):
        act(cache)
    assert cache.lengths.tolist() == [40]
    assert decode(torch.zeros(1, 2, 3, 32), cache, 16).shape == (1, 2, 3, 32)


def test_a_head_size_that_attend_refuses_is_refused_before_it_is_stored() -> None:
    with pytest.raises(ValueError, match="1 to 256, got 300"):
        KVCache(Quest()).append(*torch.zeros(2, 1, 1, 4, 300))


class Wanting(LearnsFromQueries, Window):
    def __init__(self, last_queries: int) -> None:
        self.last_queries = last_queries


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sink": -1}, "sink is 0 or more"),
        ({"sink": 2.5}, "an int, got 2.5"),
        ({"window": True}, "an int, got True"),
        ({"seal": 100.5}, "an int, got 100.5"),
        ({"window": -1}, "window is 0 or more"),
        ({"seal": 8}, "at least the unit"),
        ({"selector": Quest}, "an instance of a Selector"),
        ({"selector": SampledBuckets(1.5)}, "from 0 to 1, got 1.5"),
        ({"selector": SampledBuckets(float("nan"))}, "from 0 to 1, got nan"),
        ({"selector": SampledBuckets(True)}, "from 0 to 1, got True"),
        ({"selector": Wanting(-1)}, "last_queries of .* is a number of queries, 0 or more, got -1"),
        ({"selector": Wanting(2.5)}, "0 or more, got 2.5"),
    ],
)
def test_bad_construction(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KVCache(**{"selector": Quest(), **arguments})


def test_a_cache_takes_a_selector_by_name() -> None:
    cache = KVCache("quest:page=8", sink=2, window=4)
    assert repr(cache.selector) == repr(Quest(8))
    with pytest.raises(ValueError, match=r"no selector is called 'qest' \(did you mean 'quest'\?\)"):
        KVCache("qest")


def test_a_query_of_other_heads_is_not_told_to_be_reshaped() -> None:
    for shape in ((1, 5, 1, 32), (2, 6, 1, 32), (1, 6, 1, 16), (1, 6, 2, 32)):
        with pytest.raises(ValueError, match=r"a query of this cache") as refused:
            decode(torch.zeros(shape), good(), 16)
        assert "view" not in str(refused.value)


def test_an_empty_cache_says_so() -> None:
    for act in (lambda c: c.seal(), lambda c: c.bounds, lambda c: decode(torch.zeros(1, 1, 1, 32), c, 4)):
        with pytest.raises(RuntimeError, match="append a prefill first"):
            act(KVCache(Window()))


def test_a_selector_that_learns_from_queries_asks_for_them() -> None:
    with pytest.raises(ValueError, match="learns from queries"):
        KVCache(Buckets()).append(torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 4, 32))


def test_rows_are_sampled_evenly_by_position() -> None:
    at = torch.arange(1000)[None]
    for share in (0.0, 1e-4, 0.1, 0.3, 0.5, 0.99, 1, 1.0):
        chosen = sampled(at, share)
        assert abs(int(chosen.sum()) - int(1000 * share)) <= 1
        gaps = chosen[0].nonzero()[:, 0].diff().unique()
        assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1
        assert not bool(sampled(-1 - at, share).any()), "padding is not"
    assert sampled(torch.arange(8)[None], 0.25).nonzero()[:, 1].tolist() == [3, 7]


def test_no_queries_are_asked_for_where_none_are_wanted() -> None:
    selector = SampledBuckets(0)
    cache = KVCache(selector, sink=0, window=0, seal=16)
    cache.append(*torch.zeros(2, 1, 1, 4, 32))
    shown: list[Rows] = []
    selector.append = shown.append  # type: ignore[assignment]
    cache.seal()
    assert shown[0].queries is shown[0].query_positions is None


def test_few_sampled_queries_may_be_none_at_all() -> None:
    """A share so low that no row of a seal is sampled: `queries` has no row then, and G is still checked."""
    selector = SampledBuckets(0.01)
    cache = KVCache(selector, sink=0, window=0, seal=16)
    queries, keys, values = heads(1, 2, 3, 40, 8)
    cache.append(keys, values, queries)
    shown: list[Rows] = []
    selector.append = shown.append  # type: ignore[assignment]
    cache.seal()
    assert shown[0].queries is not None
    assert shown[0].query_positions is not None
    assert shown[0].queries.shape == (1, 2, 3, 0, 8)
    assert shown[0].query_positions.shape == (1, 0)
    with pytest.raises(ValueError, match=r"\[1, 2, 3, 40, 8\], got \[1, 2, 2, 40, 8\]"):
        cache.append(keys, values, queries[:, :, :2])


def test_the_row_of_the_step_that_is_decoded_is_not_of_the_prompt() -> None:
    """Nor is what comes later: `seal` takes all that is stored as the prompt, `decode` all but the newest row."""
    queries, keys, values = heads(2, 2, 3, 60, 8)
    query, shown = queries[:, :, :, 0], {}
    for act in (lambda c: c.seal(), lambda c: decode(query, c, 8), lambda c: c.select(query, 8)):
        cache = KVCache(Heaviest(20), sink=4, window=8, seal=16)
        cache.append(keys[:, :, :50], values[:, :, :50], queries[:, :, :, :50])
        append = cache.selector.append
        shown[act] = []
        cache.selector.append = lambda rows, append=append, to=shown[act]: (to.append(rows), append(rows))[1]
        act(cache)
        assert cache.stored.queries.last.nbytes == 0, "what was handed over is not kept"
        for t in range(50, 60):
            cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])  # no queries are asked for any more
            cache.seal()
    for (first, *later), newest in zip(shown.values(), (49, 48, 48), strict=True):
        assert first.last_positions is not None
        assert first.last_positions.tolist() == [list(range(newest - 2, newest + 1))] * 2
        assert torch.equal(first.last_queries, queries[:, :, :, newest - 2 : newest + 1])
        everything = torch.cat([first.positions, first.unsealed_positions], 1).sort().values
        assert everything[everything >= 0].tolist() == [*range(newest + 1)] * 2
        assert all(rows.last_queries is rows.unsealed is None for rows in later)


def test_the_last_queries_survive_what_window_and_rollback_allow_to_drop() -> None:
    queries, keys, values = heads(1, 1, 2, 40, 8)
    for window, rollback in ((0, 0), (5, 0), (0, 5)):
        cache, most = KVCache(Heaviest(), sink=0, window=window, rollback=rollback), window + rollback
        cache.append(keys, values, queries)
        with pytest.raises(ValueError, match=f"the last 3 queries of the prompt .* rollback={most + 1} or more"):
            cache.crop(most + 1)
        cache.crop(most)
        assert cache.lengths.tolist() == [40 - most]
    cache.crop(35)  # all: nothing is lacking
    cache.append(keys[:, :, :2], values[:, :, :2], queries[:, :, :, :2])
    assert cache.stored.queries.last.at.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match=r"tests.cases:Heaviest:rows=40 learns from queries: append"):
        cache.append(keys, values)


@pytest.mark.parametrize("apart", [None, "cpu"])
def test_crop_and_reset_forget_the_queries_of_what_they_drop(apart: str | None) -> None:
    """In sequences of different lengths, each its own number of rows."""
    selector = SampledBuckets(0.5)
    cache = KVCache(selector, sink=1, window=0, seal=16, rollback=0, sealed_device=apart)
    queries, keys, values = heads(2, 1, 2, 40, 8)
    junk = torch.full_like(queries, 9.0)
    cache.append(keys, values, junk)
    cache.reset()
    at = torch.arange(30).expand(2, -1).clone()
    at[1, 13:] = -1
    cache.append(keys[:, :, :30], values[:, :, :30], queries[:, :, :, :30], at)
    cache.append(keys[:, :, :8], values[:, :, :8], junk[:, :, :, :8])
    cache.crop(torch.tensor([8, 8]))
    cache.crop(torch.tensor([3, 0]))
    cache.append(keys[:, :, 30:], values[:, :, 30:], queries[:, :, :, 30:])
    shown: list[Rows] = []
    selector.append = shown.append  # type: ignore[assignment]
    cache.seal()
    assert shown[0].query_positions is not None
    assert shown[0].queries is not None
    for b, tokens in enumerate(([*range(27), *range(30, 40)], [*range(13), *range(30, 40)])):
        sealed = range(1, 1 + int(cache.sealed[b]))
        wanted = [position for position in sealed if position % 2]  # the other one of two
        assert [p for p in shown[0].query_positions[b].tolist() if p >= 0] == wanted
        expected = queries[b][:, :, [tokens[position] for position in wanted]]
        assert torch.equal(shown[0].queries[b][:, :, : len(wanted)], expected)


class BadOrder(Selector):
    def append(self, rows: Rows) -> torch.Tensor:
        return torch.zeros(*rows.keys.shape[:3], dtype=torch.int64)

    def select(self, query, step, budget) -> Selection:
        return Selection.none(*query.shape[:2])


def test_an_order_that_is_no_permutation_is_refused() -> None:
    cache = KVCache(BadOrder(), sink=0, window=0)
    cache.append(torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 4, 32))
    with pytest.raises(ValueError, match="permutation of the 4 rows"):
        cache.seal()


class Reversing(BadOrder):
    """Reverses all rows that it was ever shown, or `more` than the new ones."""

    def __init__(self, more: int | None = None) -> None:
        self.more, self.shown = more, 0

    def append(self, rows: Rows) -> torch.Tensor:
        self.shown += rows.keys.shape[2]
        moved = self.shown if self.more is None else rows.keys.shape[2] + self.more
        return torch.arange(moved).flip(0).expand(*rows.keys.shape[:2], -1)


@pytest.mark.parametrize("apart", [None, "cpu"])
def test_an_order_may_move_rows_of_earlier_seals(apart: str | None) -> None:
    _, keys, values = heads(2, 2, 1, 60, 32)
    cache = KVCache(Reversing(), sink=2, window=3, seal=7, sealed_device=apart)
    expected = torch.zeros(2, 0, dtype=torch.int64)  # the token of every sealed row; -1 for padding
    cache.append(keys[:, :, :20], values[:, :, :20], positions=torch.arange(20) - torch.tensor([[0], [20 - 12]]))
    done = torch.tensor([2, 8 + 2])
    for t in range(20, 60):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        before = cache.sealed
        cache.seal()
        each = cache.sealed - before
        new = torch.arange(int(each.max())) + done[:, None]
        expected = torch.cat([expected, new.masked_fill(new >= (done + each)[:, None], -1)], 1)
        if len(new[0]):
            expected = expected.flip(1)
        done += each
        for stored, rows in ((cache.stored.sealed_keys, keys), (cache.stored.sealed_values, values)):
            for b in range(2):
                real = expected[b].clamp(min=0)
                assert torch.equal(stored[b], rows[b][:, real].masked_fill(expected[b][:, None] < 0, 0))
    assert cache.sealed.tolist() == [51, 43]
    for more, sentence in ((-1, r"\[2, 2, 15\], got .*\[2, 2, 14\]"), (1, r"\[2, 2, 15\], got .*\[2, 2, 16\]")):
        bad = KVCache(Reversing(more), sink=2, window=3, seal=7, sealed_device=apart)
        bad.append(keys[:, :, :20], values[:, :, :20])
        with pytest.raises(ValueError, match=sentence):
            bad.seal()


def test_budgets() -> None:
    assert budget_rows(7, 100) == 7
    assert budget_rows(0.05, 1000) == 50
    assert budget_rows(0.001, 10) == 1
    assert budget_rows(0.29, 100) == 29
    assert budget_rows(0.5, 33) == 16
    with pytest.raises(ValueError, match="one span of quest, which reads 16"):
        budget_rows(8, 100, 16, "quest")
    assert budget_rows(None, 33) == 33
    assert parse_budget("64") == 64
    assert parse_budget("1%") == 0.01
    assert parse_budget("all") is None
    assert parse_budget(0.05) == parse_budget(" 5%") == 0.05
    for text, same in (("64", 64), ("5%", 0.05), ("all", None)):
        assert budget_rows(text, 1000) == budget_rows(same, 1000)
    for text in ("", "x", "0", "-3", "0%", "101%", "1.5"):
        with pytest.raises(ValueError, match="budget"):
            parse_budget(text)


def test_reset_starts_over() -> None:
    queries, keys, values = heads(1, 2, 2, 200, 32)
    cache = KVCache(Quest(), sink=0, window=8, seal=64)
    for _ in range(2):
        for start in range(0, 100, 25):
            cache.append(keys[:, :, start : start + 25], values[:, :, start : start + 25])
            assert int(cache.sealed[0]) == 0
        decode(queries[:, :, :, 99], cache, 32)
        assert int(cache.sealed[0]) == 80, "the first decode seals every whole span before the window"
        cache.reset()
    cache.append(*torch.randn(2, 3, 1, 8, 16))
    cache.reorder(torch.tensor([2, 0, 1, 1]))
    assert cache.batch == 4


def test_a_bad_first_append_leaves_the_cache_usable() -> None:
    for selector, bad in ((Quest(), {"positions": torch.tensor([[3, 2, 1, 0]])}), (Buckets(), {})):
        cache = KVCache(selector, sink=0, window=0, seal=16)
        rows = torch.randn(2, 1, 1, 4, 8)
        with pytest.raises(ValueError, match=r"rise from row to row|learns from queries"):
            cache.append(*rows, **bad)
        assert cache.batch == 0
        cache.append(*rows, queries=rows[0][:, :, None])
        assert cache.lengths.tolist() == [4]


@pytest.mark.parametrize(
    ("spec", "setting"),
    [
        ("kmeans", "artefact=FILE of rows without RoPE"),
        ("saap", "artefact=FILE of rows without RoPE"),
        ("moments", "artefact=FILE of rows without RoPE"),
        ("twostage:pages=saap", "artefact=FILE of rows without RoPE"),
        ("kmeans:artefact=reference", "artefact of roped keys"),
        ("loki:before=True", "before=False"),
        ("a2ats", "such as querypq"),
        ("locret", "such as snapkv"),
        ("seer", "such as mean"),
        ("infllm:distance=64,page=16", "distance=None"),
    ],
)
def test_a_method_that_needs_the_layers_rope_is_refused_before_rows_are_stored(spec: str, setting: str) -> None:
    cache = KVCache(spec, sink=0, window=0)
    queries, keys, values = heads(1, 2, 4, 40, 64)
    with pytest.raises(ValueError, match=rf"no fixed RoPE of layer 0 is known here.+LayerContext.+{setting}"):
        cache.append(keys, values, queries)
    assert cache.batch == 0


@pytest.mark.parametrize(
    "spec",
    ["loki:before=True", "a2ats", "locret", "seer", "infllm:distance=64,page=16", "querypq", "topp:inner=a2ats"],
)
def test_a_rope_wider_than_the_keys_is_refused_before_rows_are_stored(spec: str) -> None:
    selector = make_selector(spec)
    selector.bind(LayerContext(0, rope=Rope.of(32)))
    cache = KVCache(selector, sink=4, window=8, seal=64)
    queries, keys, values = heads(1, 2, 4, 40, 16)
    with pytest.raises(ValueError, match="the layer's RoPE turns 32 dimensions, and its keys have 16"):
        cache.append(keys, values, queries)
    assert cache.batch == 0


@pytest.mark.parametrize("spec", ["tova", "infllm:page=16", "freekv"])
def test_a_query_of_another_number_of_query_heads_is_refused(spec: str) -> None:
    """Also where that is a multiple: these methods keep something of each query head."""
    queries, keys, values = heads(1, 2, 4, 120, 16)
    cache = KVCache(spec, sink=4, window=8, seal=16)
    cache.append(keys, values, queries[:, :, :2])
    decode(queries[:, :, :2, -1], cache, 32)
    for group in (1, 3, 4):
        with pytest.raises(ValueError, match=f"2 query heads per KV head, got a query of {group}"):
            decode(queries[:, :, :group, -1], cache, 32)
    assert bool(decode(queries[:, :, :2, -1], cache, 32).isfinite().all())


@pytest.mark.parametrize("spec", ["exact", "tova", "tailed:inner=quest"])
def test_a_scale_that_is_no_number_is_refused(spec: str) -> None:
    queries, keys, values = heads(1, 2, 3, 120, 16)
    cache = KVCache(spec, sink=4, window=8, seal=16)
    cache.append(keys, values, queries)
    with pytest.raises(ValueError, match=r"scale is a finite number.* got 'x'"):
        decode(queries[:, :, :, -1], cache, 32, scale="x")


NEEDS_A_MODEL = ("a2ats", "kascade", "kmeans", "locret", "moments", "saap", "seer")  # its RoPE, a file, or its layers


@pytest.mark.parametrize("spec", [name for name in SELECTORS if name not in NEEDS_A_MODEL])
def test_every_other_method_decodes_over_plain_tensors_as_it_comes(spec: str) -> None:
    """Through a second seal. Kascade takes arguments always."""
    queries, keys, values = heads(1, 2, 3, 240, 16)
    cache = KVCache(spec, sink=2, window=4, seal=128)
    cache.append(keys[:, :, :100], values[:, :, :100], queries[:, :, :, :100])
    for t in range(100, 240):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1], queries[:, :, :, t : t + 1])
        if cache.selector.find(LooksAhead):
            cache.search.foresee(queries[:, :, :, t])
        if t % 69 == 32:
            assert bool(decode(queries[:, :, :, t], cache, 128).isfinite().all())


@pytest.mark.parametrize(
    ("queries", "sentence"),
    [
        (torch.zeros(1, 1, 2, 4, 8), r"\[1, 1, 3, 4, 8\], got \[1, 1, 2, 4, 8\]"),
        (torch.zeros(1, 1, 1, 4, 8), "got"),
        (torch.zeros(1, 1, 3, 4, 8).double(), "torch.float64"),
        (torch.full((1, 1, 3, 4, 8), torch.nan), "queries must be finite"),
    ],
)
def test_queries_fit_those_before_them(queries: torch.Tensor, sentence: str) -> None:
    cache = KVCache(Buckets(), sink=0, window=0, seal=16)
    rows = torch.randn(2, 1, 1, 4, 8)
    cache.append(*rows, torch.randn(1, 1, 3, 4, 8))
    with pytest.raises(ValueError, match=sentence):
        cache.append(*rows, queries)
    assert cache.lengths.tolist() == [4]


def test_queries_are_of_one_query_head_or_more() -> None:
    cache = KVCache(Buckets(), sink=0, window=0, seal=16)
    rows = torch.randn(2, 1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"\[1, 1, 'G', 4, 8\], G 1 or more, got \[1, 1, 0, 4, 8\]"):
        cache.append(*rows, torch.zeros(1, 1, 0, 4, 8))
    assert cache.batch == 0


def test_one_selector_serves_one_cache() -> None:
    selector = Quest()
    caches = [KVCache(selector) for _ in range(2)]
    caches[0].append(*torch.randn(2, 1, 1, 4, 8))
    with pytest.raises(ValueError, match="for_layer"):
        caches[1].append(*torch.randn(2, 1, 1, 4, 8))
    own = KVCache(selector.for_layer(1))
    own.append(*torch.randn(2, 1, 1, 4, 8))


class Failing(BadOrder):
    def append(self, rows: Rows) -> torch.Tensor:
        raise ArithmeticError("a fault of the method")


def test_a_selector_that_fails_voids_the_cache_until_reset() -> None:
    cache = KVCache(Failing(), sink=0, window=0)
    cache.append(*torch.zeros(2, 1, 1, 4, 8))
    with pytest.raises(ArithmeticError):
        cache.seal()
    for act in (cache.seal, lambda: cache.append(*torch.zeros(2, 1, 1, 1, 8)), lambda: cache.keys):
        with pytest.raises(RuntimeError, match=r":Failing failed while rows were sealed"):
            act()
    cache.reset()
    cache.append(*torch.zeros(2, 1, 1, 4, 8))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_budget_is_the_same_as_text_and_as_number(fixed: bool) -> None:
    _, keys, values = heads(1, 1, 2, 300, 16)
    cache = KVCache(Quest(), sink=4, window=8, capacity=400, fixed=fixed)
    cache.append(keys, values)
    query = torch.randn(1, 1, 2, 16)
    for text, same in (("64", 64), ("30%", 0.3), ("all", None)):
        assert torch.equal(decode(query, cache, text), decode(query, cache, same))
        assert cache.select(query, text).start.shape == cache.select(query, same).start.shape


def test_nbytes_names_its_parts() -> None:
    cache = KVCache(Quest(), sink=4, window=8)
    assert cache.nbytes == {"kv": 0, "books": 0, "low": 0, "high": 0, "step": 0}
    cache.append(*torch.randn(2, 1, 2, 100, 16))
    assert cache.nbytes["kv"] == 2 * 2 * 100 * 16 * 4
    cache.seal()  # 80 rows, 5 pages
    assert cache.nbytes == {
        "kv": 2 * 2 * 100 * 16 * 4,
        "books": 100 * 8 + 3 * 80,
        "low": 2 * 5 * 16 * 4,
        "high": 2 * 5 * 16 * 4,
        "step": 0,
    }


@dataclass(slots=True)
class Slotted:
    """An object without `__dict__`."""

    rows: list[int] = field(default_factory=list)
    made: torch.Tensor | None = None


class Below(Slotted):
    """One that has both, the slots in the class above."""


class Wrong(Window):
    """Keeps something of the rows outside `State`, in one of the ways of `HOW`."""

    __slots__ = ("__own",)

    def __init__(self, how: str) -> None:
        self.how = how
        self.list: list[torch.Tensor] = []
        self.dict: dict[str, torch.Tensor] = {}
        self.set: set[int] = set()
        self.tensor = torch.zeros(8)
        self.array = np.zeros(8)
        self.nested = ([[]], {"a": {}})
        self.made: torch.Tensor | None = None
        self.slotted, self.below = Slotted(), Below()
        self.numbers, self.bytes = array.array("d", [0.0]), bytearray(8)
        self.view = memoryview(bytearray(8))
        self.deep = [[[[[[[]]]]]]]
        self.__own = RowBuffer(1)

    def fill_own(self, rows: torch.Tensor) -> None:
        self.__own.append(rows)

    def append(self, rows: Rows) -> None:
        HOW[self.how](self, rows.keys[0, 0])


HOW = {
    "a tensor": lambda s, keys: setattr(s, "mean", keys.mean(0)),
    "a tensor in place of None": lambda s, keys: setattr(s, "made", keys.mean(0)),
    "a tensor in place of another": lambda s, keys: setattr(s, "tensor", keys.mean(0)),
    "a tensor written to": lambda s, keys: s.tensor.copy_(keys.mean(0)),
    "a list": lambda s, keys: s.list.append(keys.mean(0)),
    "a list of numbers": lambda s, keys: setattr(s, "means", keys.mean(0).tolist()),
    "a dict": lambda s, keys: s.dict.update(mean=keys.mean(0)),
    "a set": lambda s, keys: s.set.add(float(keys[0, 0])),
    "an array": lambda s, keys: setattr(s, "means", keys.mean(0).numpy()),
    "an array written to": lambda s, keys: np.copyto(s.array, keys.mean(0).numpy()),
    "a list in a list": lambda s, keys: s.nested[0][0].append(len(keys)),
    "a dict in a dict": lambda s, keys: s.nested[1]["a"].update({float(keys[0, 0]): 1}),
    "a module": lambda s, keys: setattr(s, "linear", torch.nn.Linear(2, 2)),
    "an object": lambda s, keys: setattr(s, "thing", object()),
    "a state that the constructor did not make": lambda s, keys: setattr(s, "late_one", RowBuffer(1)),
    "a state in a slot, which reorder does not find": lambda s, keys: s.fill_own(keys.mean(1)[None]),
    "a list in a slot": lambda s, keys: s.slotted.rows.append(len(keys)),
    "a tensor in a slot": lambda s, keys: setattr(s.slotted, "made", keys.mean(0)),
    "a list in a slot of the class above": lambda s, keys: s.below.rows.append(len(keys)),
    "numbers in an array.array": lambda s, keys: s.numbers.__setitem__(0, float(keys[0, 0])),
    "more numbers in an array.array": lambda s, keys: s.numbers.append(0.0),
    "bytes in a bytearray": lambda s, keys: s.bytes.__setitem__(0, s.bytes[0] + 1),
    "bytes in a view": lambda s, keys: s.view.__setitem__(0, s.view[0] + 1),
    "a list deep in lists": lambda s, keys: s.deep[0][0][0][0][0][0].append(len(keys)),
    "a tensor's data written to": lambda s, keys: s.tensor.data.add_(1),
    "a tensor's data in place of its own": lambda s, keys: setattr(s.tensor, "data", keys.mean(0)),
}


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", HOW)
def test_what_a_selector_keeps_outside_state_is_refused_at_its_first_seal(how: str, grad) -> None:
    wrong = Wrong(how)
    with grad():
        cache = KVCache(wrong, sink=0, window=0)
        for _ in range(2):  # a reset does not make it right
            cache.append(*torch.randn(2, 1, 1, 64, 8))
            with pytest.raises(ValueError, match=r"State made in the constructor, tensors in a RowBuffer"):
                cache.seal()
            for act in (cache.seal, lambda: cache.keys, lambda: decode(torch.randn(1, 1, 1, 8), cache, 4)):
                with pytest.raises(RuntimeError, match=r"void: reset\(\) it"):
                    act()
            cache.reset()
            assert cache.batch == 0


class Right(Window):
    """Keeps a counter, `State`, a parameter that follows the rows' device, and a model that is loaded at first use."""

    late = ("model",)

    def __init__(self) -> None:
        self.count, self.label_of, self.found = 0, "", None
        self.mean = RowBuffer(1)
        self.basis = torch.randn(8, 8)
        self.tables = {"steps": [1, 2], "basis": self.basis}
        self.module = torch.nn.Linear(8, 8)
        self.slotted, self.numbers, self.bytes = Slotted([1]), array.array("d", [1.0]), bytearray(8)
        self.views = [torch.randn(2, 8).T, torch.randn(3, dtype=torch.complex64).conj(), torch.empty(2, device="meta")]
        self.views += [torch.eye(2).to_sparse(), torch.tensor(1, dtype=torch.bfloat16), torch.zeros(2, 0).bool()]
        self.circle: list[object] = [self]
        self.circle.append(self.circle)
        self.model: torch.Tensor | None = None

    def append(self, rows: Rows) -> None:
        self.count, self.label_of, self.found = self.count + 1, f"{self.count}", 0.5
        self.mean.append(rows.keys.mean((1, 2))[:, None])
        self.basis = self.basis.clone()  # as on another device
        self.model = torch.randn(8)


def test_counters_states_and_parameters_may_be_kept() -> None:
    cache = KVCache(Right(), sink=0, window=0, seal=1)
    for _ in range(3):
        cache.append(*torch.randn(2, 1, 1, 4, 8))
        cache.seal()
    assert cache.selector.count == cache.selector.mean.rows == 3


def test_state_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = state_checks._named
    monkeypatch.setattr(state_checks, "_named", lambda selector: (looked.append(1), real(selector))[1])
    cache = KVCache(Quest(), sink=0, window=0, seal=16)
    for _ in range(5):
        cache.append(*torch.randn(2, 1, 1, 16, 8))
        cache.seal()
    assert cache.selector.low.rows == 5
    assert len(looked) == 2, "before and after the first"


@pytest.mark.parametrize("how", ["a tensor", "a list"])
def test_no_index_file_is_written_of_what_is_refused(how: str, tmp_path: Path) -> None:
    class Kept(Wrong):
        def check_state(self, state, rows, order) -> None:
            return None

    cache = KVCache(Kept(how), sink=0, window=0, indexes=tmp_path)
    cache.append(*torch.randn(2, 1, 1, 64, 8))
    with pytest.raises(ValueError, match="RowBuffer"):
        cache.seal()
    assert not list(tmp_path.iterdir())


def test_a_refused_budget_seals_nothing_and_a_share_is_at_least_a_span() -> None:
    cache = KVCache(Quest(), sink=0, window=0)
    cache.append(*torch.randn(2, 1, 1, 96, 8))
    query = torch.randn(1, 1, 1, 8)
    for budget in (0, 8):
        with pytest.raises(ValueError, match="budget"):
            cache.select(query, budget)
    assert int(cache.sealed[0]) == 0
    assert cache.select(query, 0.01).attended.tolist() == [[16]]
    assert cache.select(query, 10**12).start.shape == (1, 1, 6)
    with pytest.raises(ValueError, match="at least 16 rows, got 8"):
        cache.selector.select(query, cache.search.step(), 8)
