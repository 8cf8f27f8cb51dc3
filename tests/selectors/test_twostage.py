"""Two stages: what they choose, what parts of a selector are, and how one is written in a text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseattn import (
    SAAP,
    Exact,
    KVCache,
    LowBit,
    Quest,
    RetrievalAttention,
    Rows,
    Selection,
    Selector,
    TwoStage,
    Window,
    decode,
    make_selector,
)
from sparseattn.cache.index_files import kept
from sparseattn.cache.selection_checks import ContractError
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.kernels.encode_keys.dispatch import encode
from sparseattn.kernels.encode_keys.reference import quantise
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys import reference as quantized_keys_reference
from sparseattn.kernels.quantized_keys.packing import pack
from sparseattn.selectors.base import vote
from tests.cases import Buckets, Same, SampledBuckets, drawn, heads

B, H, G, N, D = 2, 2, 3, 256, 32


def filled(selector: Selector, rows: int = N, padding: int = 0, **settings) -> tuple[KVCache, torch.Tensor]:
    """A cache of random rows, all sealed, the last sequence shorter by `padding`, and a query."""
    queries, keys, values = heads(B, H, G, rows, D)
    at = torch.arange(rows).repeat(B, 1)
    at[-1, : rows - padding] = torch.arange(rows - padding)
    at[-1, rows - padding :] = -1
    cache = KVCache(selector, sink=0, window=0, seal=selector.unit, **settings)
    cache.append(keys, values, queries, at)
    cache.seal()
    return cache, queries[:, :, :, -1 - padding]


def sets(rows: torch.Tensor) -> list[set[int]]:
    return [set(one[one >= 0].tolist()) for one in rows.flatten(0, 1)]


# -- the rows of listed pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 4, 16, 32, 128])
@pytest.mark.parametrize(("bits", "rows", "size"), [(1, 64, 64), (2, 48, 33), (4, 16, 80)])
def test_listed_logits_are_those_of_their_rows(bits: int, rows: int, size: int, page: int) -> None:
    draw = torch.Generator().manual_seed(bits)
    n = 4 * rows
    keys, query = torch.randn(B, H, n, size, generator=draw), torch.randn(B, H, G, size, generator=draw)
    index = encode(keys, rows, bits, "bins" if bits > 1 else "means", torch.bfloat16, impl="torch")
    index = replace(index, valid=torch.arange(n) < torch.tensor([[n], [n - 21]]))
    every = quantized_keys.logits(query, index)
    for listed in (H, H * G):
        pages = torch.randint(-1, -(-n // page), (B, listed, 5), generator=draw)
        found = quantized_keys.listed_logits(query, index, pages, page)
        assert found.shape == (B, H, G, 5 * page)
        row = (pages[..., None] * page + torch.arange(page)).flatten(2)
        row = row.view(B, H, -1, 5 * page).expand(-1, -1, G, -1)
        unused = (row < 0) | (row >= n)
        expected = every.gather(3, row.clamp(0, n - 1)).masked_fill(unused, -torch.inf)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("page", [1, 8, 32, 128])
def test_the_best_listed_rows_and_the_groups_read(page: int) -> None:
    draw = torch.Generator().manual_seed(page)
    n, rows = 256, 64
    keys, query = torch.randn(B, H, n, D, generator=draw), torch.randn(B, H, G, D, generator=draw)
    valid = torch.arange(n) < torch.tensor([[n], [n - 21]])
    index = query, replace(encode(keys, rows, 2, "bins", torch.bfloat16), valid=valid)
    pages = torch.stack([torch.randperm(n // page, generator=draw)[:7] for _ in range(B * H)]).view(B, H, -1)
    pages[0, 0, -1] = -1
    ids, groups = quantized_keys.best_listed(*index, "softmax", pages, page, 5, impl="numba")
    best = vote(quantized_keys.listed_logits(*index, pages, page, impl="numba"), "softmax").topk(5)
    rows_of = pages.gather(2, best.indices // page) * page + best.indices % page
    assert sets(ids) == sets(rows_of.where(~best.values.isneginf(), -1))
    assert torch.equal(groups, quantized_keys.best_listed(*index, "softmax", pages, page, 5, impl="torch")[1])
    named = [set(one[one >= 0].tolist()) for one in pages.flatten(0, 1)]
    brute = [{(p * page + i) // rows for p in one for i in range(page)} for one in named]
    assert groups.flatten().tolist() == [len(one) for one in brute]


def test_listed_logits_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, query = torch.randn(1, 2, 64, 32), torch.randn(1, 2, 4, 32)
    index = encode(keys, 16, 2, "bins", torch.bfloat16, impl="torch")
    index = replace(index, valid=torch.ones(1, 64, dtype=torch.bool))
    pages = torch.tensor([[[3, -1, 0], [1, 2, -1]]])
    whole = quantized_keys.listed_logits(query, index, pages, 16)
    monkeypatch.setattr(quantized_keys_reference, "CHUNK", 1)
    torch.testing.assert_close(quantized_keys.listed_logits(query, index, pages, 16), whole)
    assert quantized_keys.listed_logits(query, index, pages[:, :, :0], 16).shape == (1, 2, 4, 0)
    with pytest.raises(ValueError, match="impl is one of"):
        quantized_keys.listed_logits(query, index, pages, 16, impl="cuda")


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pages",
    [lambda: Quest(16), lambda: Quest(8, "each", True), lambda: LowBit(1, 32, 8), lambda: Exact("sum")],
    ids=["quest", "quest-each", "lowbit", "exact"],
)
@pytest.mark.parametrize("group", ["softmax", "sum", "each"])
@pytest.mark.parametrize("budget", [5, 40])
def test_the_best_proposed_rows_are_chosen(pages, group: str, budget: int) -> None:
    cache, query = filled(TwoStage(pages(), 3, 2, 32, group), padding=60)
    chosen = cache.select(query, budget)
    two, span = cache.selector, cache.selector.pages.span
    proposed = two.pages.select(query, cache.search.step(), -(-3 * budget // span) * span).mask(N)
    listed = proposed.view(B, H, -1, N)
    if group != "each":
        listed = listed.any(2, keepdim=True)  # the union of what the query heads propose
    listed = listed.expand(-1, -1, G, -1)
    inside = two.inside
    logits = quantized_keys.logits(query, inside.index(cache.search.step().valid))
    scores = vote(logits.masked_fill(~listed, -torch.inf), group)  # [B,Hs,N]
    best = scores.topk(budget, -1).indices
    assert sets(chosen.rows) == sets(best)
    assert chosen.span == 1
    assert int(chosen.attended.min()) == budget


def test_many_times_is_the_choice_of_the_codes_alone() -> None:
    two, query = filled(TwoStage(times=1 << 20, bits=1))
    alone, _ = filled(LowBit(1))
    assert sets(two.select(query, 24).rows) == sets(alone.select(query, 24).rows)
    few, _ = filled(TwoStage(times=2, bits=1))
    assert sets(few.select(query, 24).rows) != sets(alone.select(query, 24).rows)


def proposed_by(cache: KVCache, query: torch.Tensor, rows: int) -> Selection:
    """What the first stage proposes, with what that cost."""
    pages, step = cache.selector.pages, cache.search.step(counted=True)
    return pages.counted(pages.select(query, step, rows), query, step, rows)


def test_costs_are_those_of_both_stages() -> None:
    """Levels are counted once for each group in which a row is proposed."""
    cache, query = filled(TwoStage(Quest(8), 2, 2, 32), padding=64)
    chosen = cache.select(query, 16)
    first = proposed_by(cache, query, 32)
    groups = torch.tensor([len({row // 32 for row in rows}) for rows in sets(first.rows)]).view(B, H)
    assert torch.equal(chosen.scanned, first.scanned + 32)
    assert torch.equal(chosen.scan_bytes, first.scan_bytes + 32 * (2 * D // 8) + groups * 4 * D)
    assert int(groups.max()) > 1


@pytest.mark.parametrize(("first", "second", "lists"), [("each", "each", G), ("sum", "each", 1), ("each", "sum", 1)])
def test_costs_of_query_heads(first: str, second: str, lists: int) -> None:
    cache, query = filled(TwoStage(Quest(16, first), 2, 2, 16, second))
    chosen = cache.select(query, 8)
    proposed = proposed_by(cache, query, 16)
    pages = torch.tensor([len(one) for one in sets(proposed.start)]).view(B, -1)
    if (first, second) == ("each", "sum"):
        pages = torch.tensor([len(set(one.flatten().tolist())) for one in proposed.start.view(B * H, G)]).view(B, H)
    assert chosen.scan_bytes.tolist() == [[int(n) for n in one] for one in proposed.scan_bytes + _per_head(pages)]
    scored = (pages * 16).repeat_interleave(chosen.scanned.shape[1] // pages.shape[1], 1)
    assert torch.equal(chosen.scanned, N // 16 + scored)
    assert pages.shape[1] == H * (lists if second == "each" else 1)


def _per_head(pages: torch.Tensor) -> torch.Tensor:
    """Bytes of `pages` `[B,L]` pages of 16 rows, each a group, of codes and levels, `[B,H]`."""
    return pages.view(B, H, -1).sum(2) * (16 * D // 4 + 4 * D)


class Silent(Exact):
    """Says nothing of its cost."""

    def scan(self, query, sealed, budget):
        return None


def test_a_first_stage_may_be_silent_or_propose_nothing() -> None:
    cache, query = filled(TwoStage(Silent("sum"), 2))
    chosen = cache.select(query, 8)
    assert chosen.scanned is None
    assert chosen.scan_bytes is None
    assert int(chosen.attended.min()) == 8
    nothing, _ = filled(TwoStage(Window()))
    assert nothing.select(query, 8).rows.numel() == 0
    empty = KVCache(TwoStage(), sink=4, window=64)
    empty.append(*torch.randn(2, 1, 2, 10, 8))
    assert empty.select(torch.randn(1, 2, 1, 8), 8).rows.numel() == 0


def test_runs_in_an_order_of_their_own_are_proposed_too() -> None:
    """The codes follow the rows that a first stage moves, those of earlier seals too."""
    _, keys, values = heads(B, H, G, 320, D)
    cache = KVCache(TwoStage(drawn(SAAP, probes=1 << 20), 1, rows=32), sink=0, window=0, seal=32)
    for start in range(0, 320, 32):
        part = slice(start, start + 32)
        cache.append(keys[:, :, part], values[:, :, part])
        cache.seal()
        inside = cache.selector.inside
        codes, low, step = quantise(cache.stored.sealed_keys, 32, 2, inside.levels, torch.bfloat16)
        assert torch.equal(inside.codes.data, pack(codes, 32, 2))
        assert torch.equal(inside.low.data, low)
        assert torch.equal(inside.step.data, step)


def test_a_batch_of_unequal_lengths_in_an_order_names_no_padding() -> None:
    for reverse in (False, True):
        cache, query = filled(TwoStage(Buckets(reverse), 2, rows=16), padding=100)
        chosen = cache.select(query, 200)
        assert sorted(map(len, sets(chosen.rows))) == [144, 144, 200, 200], "whole groups are sealed"


def test_selections_say_whether_they_are_whole_pages() -> None:
    cache, query = filled(Quest(8))
    assert cache.select(query, 16).whole
    runs, _ = filled(Buckets())
    assert not runs.select(query, 16).whole

    class Boasting(Buckets):
        def select(self, query, step, budget):
            found = super().select(query, step, budget)
            return Selection(found.start, found.length, found.span, whole=True)

    boasting, _ = filled(Boasting())
    with pytest.raises(ContractError, match="calls that a whole page, where a page has 4 rows"):
        boasting.select(query, 18)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_parts_are_told_what_the_selector_is_told() -> None:
    outer = Same(TwoStage(Exact("sum"), 2))
    two = outer.inner
    fresh = outer.for_layer(5)
    assert isinstance(fresh.inner, TwoStage)
    assert (fresh.layer, fresh.inner.layer, fresh.inner.pages.layer) == (5, 5, 5)
    assert (two.layer, two.pages.layer) == (0, 0)
    fresh.count_in(2)
    widths = [part.layer_context.key_bytes for part in (fresh.inner.pages, fresh.inner.inside, two.pages)]
    assert widths == [2, 2, None]
    cache, _ = filled(fresh)
    assert fresh.inner.pages.stored is not None
    twin = cache.clone().selector
    assert twin.inner.pages is not fresh.inner.pages
    assert twin.inner.pages.stored.data_ptr() != fresh.inner.pages.stored.data_ptr()
    cache.reset()
    assert fresh.inner.pages.stored is None
    assert twin.inner.inside.codes.rows * 64 == N


def test_state_of_parts_is_named_after_them() -> None:
    cache, _ = filled(TwoStage(Quest(8, int8=True)))
    names = [name for name, _ in cache.selector.buffers()]
    assert names[:2] == ["pages.low", "pages.high"]
    assert "inside.codes" in names[2:]
    assert cache.nbytes["inside.codes"] == B * H * N * D // 4
    with pytest.raises(ValueError, match="holds the rows of another cache"):
        KVCache(TwoStage(cache.selector.pages), sink=0, window=0).append(*torch.randn(2, 1, 2, 64, D))


def test_needs_of_parts_are_the_selectors() -> None:
    assert TwoStage(LowBit(rows=48), rows=64).unit == 192
    assert TwoStage(Quest(32), rows=16).unit == 32
    assert TwoStage("exact").unit == 64
    assert TwoStage(SampledBuckets(0.3)).queries_wanted == (0.3, 0)
    assert not TwoStage().host
    hosted = TwoStage(RetrievalAttention(share=0.25))
    assert hosted.host
    assert hosted.queries_wanted == (0.25, 0)
    assert Same(hosted).host


def test_a_part_that_keeps_rows_beside_its_state_is_refused() -> None:
    class Leaky(Quest):
        def append(self, rows: Rows) -> None:
            super().append(rows)
            self.last = rows.keys[:, :, -1].clone()

    selector = TwoStage(Leaky())
    with pytest.raises(ValueError, match=r"has left a Tensor in its attribute 'pages\.last'"):
        filled(selector)
    assert not hasattr(selector.pages, "last")

    class Swapping(Same):
        def append(self, rows: Rows) -> None:
            self.inner = Quest()
            self.inner.append(rows)

    with pytest.raises(ValueError, match="has left a Quest in its attribute 'inner'"):
        filled(Swapping(Quest()))


def test_fixed_storage_is_that_of_both_stages() -> None:
    queries, keys, values = heads(1, H, G, 192, D)
    fixed = KVCache(TwoStage(rows=16), sink=0, window=0, seal=16, capacity=224, fixed=True)
    plain = KVCache(TwoStage(rows=16), sink=0, window=0, seal=16)
    shapes = set()
    for stop in (64, 128, 192):
        part = slice(stop - 64, stop)
        for cache in (fixed, plain):
            cache.append(keys[:, :, part], values[:, :, part])
        query = queries[:, :, :, stop - 1]
        shapes.add(fixed.select(query, 20).start.shape)
        torch.testing.assert_close(decode(query, fixed, 20), decode(query, plain, 20))
    assert len(shapes) == 1
    with pytest.raises(ValueError, match="no step of fixed shapes"):
        KVCache(TwoStage(RetrievalAttention()), capacity=224, fixed=True)


def test_an_index_is_kept_if_every_part_says_what_it_must_be() -> None:
    assert kept(Same(Quest()))
    assert not kept(Same(Exact()))
    assert Same(drawn(SAAP)).index_arguments()["inner"]["selector"] == "saap"
    with pytest.raises(ValueError, match="it holds low, which is of none of the parts inner"):
        Same(Quest()).check_state({"low": torch.zeros(1)}, Rows(*torch.zeros(2, 1, 1, 0, 4), torch.zeros(1, 0)), None)
    two = TwoStage()
    assert two.index_arguments()["pages"] == {
        "selector": "quest",
        "page": 16,
        "group": "sum",
        "int8": False,
    }
    assert "times" not in two.index_arguments(), "the knob"


# -- how it is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text", "label"),
    [
        ("twostage", "twostage:pages=[quest:page=16,group=sum,int8=False],times=8,", "twostage"),
        ("twostage:pages=quest,times=4", "twostage:pages=[quest:", "twostage:times=4"),
        (
            "twostage:pages=[quest:page=8,int8=True],times=4",
            "twostage:pages=[quest:page=8,group=sum,int8=True],times=4,",
            "twostage:pages=[quest:page=8,int8=True],times=4",
        ),
        (
            "twostage:bits=4,pages=[twostage:pages=[lowbit:bits=1,page=16],bits=1]",
            "twostage:pages=[twostage:pages=[lowbit:bits=1,rows=64,page=16,",
            "twostage:pages=[twostage:pages=[lowbit:bits=1,page=16],bits=1],bits=4",
        ),
        ("twostage:pages=[exact]", "twostage:pages=[exact:", "twostage:pages=exact"),
        ("twostage:pages=sparseattn.selectors.baselines.exact:Exact", "twostage:pages=[exact:", "twostage:pages=exact"),
        (
            "twostage:pages=[sparseattn:Exact:group=sum]",
            "twostage:pages=[exact:group=sum,",
            "twostage:pages=[exact:group=sum]",
        ),
    ],
)
def test_specs_nest(spec: str, text: str, label: str) -> None:
    made = make_selector(spec)
    assert repr(made).startswith(text)
    assert str(made) == made.label() == label
    assert repr(make_selector(repr(made))) == repr(make_selector(label)) == repr(made)
    assert repr(made.for_layer(2)) == repr(made)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("twostage:pages=quest:page=8", r"stand in brackets: pages=\[NAME:arg=value"),
        ("twostage:pages=quest:page=8,int8=True", "stand in brackets"),
        ("twostage:pages=[quest:page=8,times=4", "leaves a bracket open"),
        ("twostage:pages=quest:page=8],times=4", "closes a bracket"),
        ("twostage:pages=[quest:pag=8]", "quest has no argument 'pag'.*did you mean 'page'"),
        ("twostage:pages=[qest]", "no selector is called 'qest'.*did you mean 'quest'"),
        ("twostage:pages=[]", "'' is not a selector"),
        ("twostage:pages=8", "'8' is not a selector"),
        ("twostage:times=0", "times is 1 or more, got 0"),
        ("twostage:times=2.5", "of type int"),
        ("twostage:bits=3", "bits is one of 1, 2, 4, got 3"),
        ("twostage:rows=8", "multiple of 16, got 8"),
        ("twostage:group=best", "group is one of"),
    ],
)
def test_bad_nested_specs_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_selector(spec)


def test_what_is_no_selector_is_refused_as_a_part() -> None:
    with pytest.raises(ValueError, match="selector is a name"):
        TwoStage(16)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["h2o", "tova", "snapkv", "pyramidkv"])
def test_a_first_stage_that_evicts_is_refused(first: str) -> None:
    with pytest.raises(ValueError, match="drops what it does not: take one that does not evict"):
        make_selector(f"twostage:pages={first}")


def test_a_first_stage_that_biases_is_refused() -> None:
    with pytest.raises(ValueError, match="corrects a sample of rows by a bias"):
        make_selector("twostage:pages=magicpig")
    with pytest.raises(ValueError, match="corrects a sample of rows by a bias"):
        TwoStage(Same(make_selector("magicpig")))


def test_sources_name_those_of_parts() -> None:
    two = TwoStage(drawn(SAAP))
    assert two.source().startswith("twostage(pages=saap ")
    assert drawn(SAAP).source() in two.source()


def test_row_buffers_of_a_part_in_a_part_reorder_once() -> None:
    inner = Same(Buckets())
    cache, _ = filled(Same(inner))
    before = {name: state.data.clone() for name, state in inner.buffers() if isinstance(state, RowBuffer)}
    cache.reorder(torch.tensor([1, 0]))
    for name, state in inner.buffers():
        assert torch.equal(state.data, before[name][[1, 0]])
