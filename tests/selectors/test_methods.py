"""What each method promises beyond the laws, and how methods are named."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseattn import (
    SELECTORS,
    Exact,
    KVCache,
    PerfectBuckets,
    Quest,
    Random,
    Selector,
    TwoStage,
    Window,
    make_selector,
)
from sparseattn.core.context import StepContext
from sparseattn.evaluation.step_measures import compare
from sparseattn.evaluation.tasks.run import Method
from sparseattn.kernels.page_bounds.reference import page_bounds
from sparseattn.recommend import trials
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.selectors import methods
from sparseattn.selectors.base import best, vote
from sparseattn.selectors.identity import identity, own_code
from sparseattn.traces.synthetic import synthetic
from tests.cases import heads


def filled(selector: Selector, rows: int = 512, group: int = 3, dtype: torch.dtype = torch.float32, sink: int = 0):
    queries, keys, values = heads(2, 2, group, rows, 64, dtype)
    cache = KVCache(selector, sink=sink, window=0, seal=max(selector.unit, 16))
    cache.append(keys, values)
    cache.seal()
    return cache, queries[:, :, :, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quests_score_bounds_every_logit_of_its_page(dtype: torch.dtype) -> None:
    """Zero violations. Both sides are sums of 64 products in float64, so that only the inequality is tested."""
    for source in ("random", "synthetic"):
        if source == "random":
            queries, keys, _ = heads(1, 4, 4, 1024, 64, dtype)
        else:
            layer = synthetic(1024, heads=4, group=4, size=64, rope=True).layer(0)
            queries, keys = layer.query[None].to(dtype), layer.keys[None].to(dtype)
        quest = Quest()
        cache = KVCache(quest, sink=0, window=0)
        cache.append(keys, keys)
        cache.seal()
        for t in range(0, 1024, 64):
            query = queries[:, :, :, t].double()
            bound = page_bounds(query, quest.low.data, quest.high.data)  # [B,H,G,P]
            logits = (query @ keys.double().mT).unflatten(-1, (-1, 16)).amax(-1)
            assert bound.dtype == torch.float64
            assert bool((bound >= logits * (1 - 1e-12 * logits.sign())).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quests_8_bit_bounds_stay_bounds_as_keys_grow(dtype: torch.dtype) -> None:
    _, keys, _ = heads(2, 2, 1, 1024, 32, dtype)
    keys[:, :, 512:, :8] *= 5
    keys[:, :, 768:, 4:20] *= 30
    keys[:, 1, :256, 31] = 0
    quest, plain = Quest(8, int8=True), Quest(8)
    caches = [KVCache(selector, sink=0, window=0, seal=64) for selector in (quest, plain)]
    steps = []
    for start in range(0, 1024, 64):
        for cache in caches:
            cache.append(keys[:, :, start : start + 64], keys[:, :, start : start + 64])
            cache.seal()
        step = quest.step.data[:, :, None]
        steps.append(step.clone())
        low, high = quest.low.data * step, quest.high.data * step
        tiny = 1e-5 * step
        assert bool((low <= plain.low.data + tiny).all())
        assert bool((high >= plain.high.data - tiny).all())
        # A bound is rounded outwards when it is stored, and once more whenever the channel's step has grown since.
        often = 1 + sum((later > before).int() for before, later in itertools.pairwise(steps))
        assert bool((plain.low.data - low <= often * step + tiny).all())
        assert bool((high - plain.high.data <= often * step + tiny).all())
    assert quest.low.full.dtype == torch.int8
    assert bool((steps[-1] > steps[0]).any())


def test_8_bit_bounds_never_wrap() -> None:
    """Rounded up a channel's largest number is at most 127. In steps of a 127th it was 128 for these: that is -128."""
    most = torch.tensor([4.25, 8.5, 8.75, 2.05, 1.0, 1e-20, 1e-33, 0.0])
    quest = Quest(1, int8=True)
    for longer in (1.0, 1.2, 1.3, 9.0):  # within the room that a step leaves, and beyond it
        low, high = quest._rounded(-most.view(1, 1, 1, -1) * longer, most.view(1, 1, 1, -1) * longer)
        assert bool((high * quest.step.data >= most * longer * (1 - 1e-6)).all())
        assert torch.equal(low, -high)
        assert high.flatten()[6:].tolist() == [1, 0]


def test_the_page_of_the_best_key_is_selected_unless_enough_pages_have_a_higher_bound() -> None:
    quest = Quest(group="each")
    cache, query = filled(quest)
    bound = page_bounds(query, quest.low.data, quest.high.data).flatten(1, 2)  # [B,Hs,P]
    logits = (query @ cache.keys.mT).flatten(1, 2)
    home = logits.argmax(-1, keepdim=True) // 16
    higher = (bound > bound.gather(-1, home)).sum(-1)
    for pages in (1, 4, 16):
        chosen = quest.select(query, cache.search.step(), pages * 16).start // 16
        found = (chosen == home).any(-1)
        assert torch.equal(found, higher < pages)


def test_quest_reads_the_papers_fraction_of_the_cache() -> None:
    """methods.md Q1: 1/S + pages*S/L of the bytes; 1/8 at pages of 16 and a budget of 1/16 of the context."""
    for rows, page, budget in ((4096, 16, 256), (2048, 32, 512), (1024, 8, 64)):
        queries, keys, values = heads(1, 2, 1, rows, 32)
        cache = KVCache(Quest(page), sink=0, window=0)
        cache.append(keys, values)
        query = queries[:, :, :, -1]
        selection = cache.select(query, budget)
        quest = cache.selector
        assert isinstance(quest, Quest)
        assert selection.scan_bytes is not None
        assert int(selection.scan_bytes.sum()) == quest.low.nbytes + quest.high.nbytes, "the bounds are what is read"
        measured = compare(query, cache, selection, 1.0)["bytes_share"]
        expected = 1 / page + budget / rows
        torch.testing.assert_close(measured, torch.full_like(measured, expected), rtol=1e-12, atol=0)
    assert 1 / 16 + 256 / 4096 == 1 / 8


def test_exact_finds_the_best_rows_of_every_head() -> None:
    cache, query = filled(Exact())
    logits = (query @ cache.keys.mT).flatten(1, 2)
    selection = cache.select(query, 10)
    assert torch.equal(selection.rows.sort(-1).values, logits.topk(10).indices.sort(-1).values)
    assert selection.scanned is not None
    assert selection.scan_bytes is not None
    assert selection.scanned.unique().tolist() == [512]
    assert selection.scan_bytes.unique().tolist() == [512 * 64 * 4], "every key once per KV head"


def test_static_choice_is_kept_for_refresh_queries() -> None:
    cache, query = filled(Exact(refresh=3))
    chosen = [cache.select(torch.randn_like(query), 10).rows for _ in range(7)]
    assert torch.equal(chosen[0], chosen[2])
    assert not torch.equal(chosen[2], chosen[3])
    assert torch.equal(chosen[3], chosen[5])
    assert int(cache.select(query, 10).scanned.max()) == 0, "a kept choice scans nothing"


def at(cache: KVCache, position: int) -> StepContext:
    """A step of both sequences at a position."""
    return replace(cache.search.step(), positions=torch.full((2,), position))


def test_random_draws_are_uniform_distinct_and_seeded() -> None:
    cache, query = filled(Random(7), rows=64)
    counts = torch.zeros(64)
    for t in range(400):
        rows = cache.selector.select(query, at(cache, 1000 + t), 8).rows
        assert all(len(set(row.tolist())) == 8 for row in rows.flatten(0, 1))
        counts += torch.bincount(rows.flatten(), minlength=64)
    expected = 400 * 4 * 8 / 64  # 200 draws a row, standard deviation 13.2
    assert float((counts - expected).abs().max()) < 5 * 13.2
    again, _ = filled(Random(7), rows=64)
    other, _ = filled(Random(8), rows=64)
    drawn = [one.selector.select(query, at(one, 5), 8).rows for one in (cache, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    layers = [KVCache(Random(7).for_layer(layer), sink=0, window=0, seal=1) for layer in (0, 1)]
    for layer in layers:
        layer.append(cache.keys, cache.values)
    first, second = (layer.select(query, 8).rows for layer in layers)
    assert not torch.equal(first, second), "layers draw apart"


def test_window_reads_nothing_beyond_its_zones() -> None:
    cache, query = filled(Window())
    assert cache.select(query, 100).rows.numel() == 0


def test_votes_of_a_group() -> None:
    scores = torch.tensor([[[[1.0, 5.0, -torch.inf], [4.0, 0.0, -torch.inf]]]])  # [1,1,2,3]
    assert vote(scores, "max").tolist() == [[[4.0, 5.0, -torch.inf]]]
    assert vote(scores, "sum").tolist() == [[[5.0, 5.0, -torch.inf]]]
    assert vote(scores, "each").shape == (1, 2, 3)
    expected = scores.softmax(-1).sum(2)[..., :2].log()
    remote = torch.tensor([[[[0.0, -200.0, -150.0, -300.0]]]])
    for impl in ("torch", "numba"):
        torch.testing.assert_close(vote(scores, "softmax", impl)[..., :2], expected)
        assert vote(scores, "softmax", impl)[0, 0, 2] == -torch.inf
        assert best(vote(remote, "softmax", impl), 3).tolist() == [[[0, 2, 1]]], "small probabilities keep their order"
    with pytest.raises(ValueError, match="max, sum, softmax, each, got 'most'"):
        Quest(group="most")


def test_specs_name_selectors_and_arguments() -> None:
    assert repr(make_selector("quest")) == "quest:page=16,group=sum,int8=False"
    assert repr(make_selector("quest:page=32,group=sum")) == "quest:page=32,group=sum,int8=False"
    assert repr(make_selector("sparseattn.selectors.baselines.exact:Exact:refresh=3")) == "exact:group=each,refresh=3"
    assert repr(make_selector("window")) == "window"
    for name, method in SELECTORS.items():
        assert isinstance(make_selector(name), method)


class Forgets(Quest):
    def __init__(self, page: int = 16) -> None:
        pass


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("qest", "did you mean 'quest'"),
        ("quest:pages=3", "did you mean 'page'"),
        ("quest:page", "written quest:name=value"),
        ("quest:page=3", "power of two"),
        ("quest:page=16,,", "no argument ''"),
        ("no.such.module:Class", "cannot import 'no.such.module'"),
        ("torch:Klass", "has no 'Klass'"),
        ("torch:Tensor", "not a subclass of sparseattn.Selector"),
        ("sparseattn:Selector", "does not define append and select"),
        ("nomod:Class", "nomod.py must lie in the current folder"),
        ("sparseattn.Quest", "did you mean 'sparseattn:Quest'"),
        ("sparseattn.selectors.pages.quest:Qest", "did you mean 'Quest'.*; its selectors are Quest"),
        ("mine.py:Ball:page=8", "names a file: write its module, mine:Ball:page=8"),
        ("some/mine.py:Ball", "mine:Ball, with PYTHONPATH=some"),
        ("tests.selectors.test_methods:Forgets", "must store each argument under its own name, or call super"),
        ("", "not a selector"),
        ("window:x=1", "it takes none"),
        ("random:seed=abc", "of type int, got 'abc'"),
        ("exact:refresh=2.5", "of type int"),
        ("quest:page=True", "of type int"),
        ("quest:page=16,page=32", "twice"),
    ],
)
def test_bad_specs_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_selector(spec)


def test_a_method_of_ones_own_needs_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_package")

    class Mine(Window):
        def __init__(self, knob: float = 0.5) -> None:
            self.knob = knob

    module.Mine = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", module)
    Mine.__module__, Mine.__qualname__ = "my_package", "Mine"
    assert repr(make_selector("my_package:Mine:knob=0.25")) == "my_package:Mine:knob=0.25"


# -- what files and records call a class -------------------------------------------------------------------------------


class Mine(Quest):
    """A user's class, of a module that is not the package's."""


def test_a_class_goes_by_its_name_in_the_registry_else_by_module_and_class() -> None:
    assert {identity(method): method for method in SELECTORS.values()} == SELECTORS
    assert identity(PerfectBuckets) == "sparseattn:PerfectBuckets"
    assert identity(Mine) == f"{__name__}:Mine"
    mine = f"{__name__}:Mine {own_code(Mine)}"
    assert TwoStage(Mine(), 4).source() == f"twostage(pages={mine}, inside=lowbit)"
    assert TwoStage(Quest()).index_arguments()["pages"]["selector"] == "quest"


def test_records_of_a_class_of_ones_own_are_those_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, base = tmp_path / "edited_methods.py", tmp_path / "edited_bases.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    base.write_text("from sparseattn import Quest\nclass Base(Quest):\n    pass\n")

    def source(text: str) -> str:
        """Of the class as a new process would find it."""
        file.write_text(f"from edited_bases import Base\nclass Own(Base):\n    {text}\n")
        importlib.invalidate_caches()
        for name in ("edited_methods", "edited_bases"):
            sys.modules.pop(name, None)
        return make_selector("edited_methods:Own").source()

    first = source("tried = 1")
    assert first == source("tried = 1")
    assert first != source("tried = 22")
    base.write_text("from sparseattn import Quest\nclass Base(Quest):\n    other = 1\n")
    assert first != source("tried = 1"), "its base is of one's own too"


def test_records_stay_those_of_a_class_whose_file_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[object]:
        """What records of `eval` and of `recommend` are found by."""
        role, roles = Role("quest", 64), Roles({0: "dense", 1: ["quest", "window"]})
        return [Method(Quest()).source, Method(roles).source, trials._source(role), roles.source()]

    before = keys()
    assert before[0] == "quest"
    assert str(before[1]).startswith("roles ")
    monkeypatch.setattr(Quest, "__module__", "sparseattn.elsewhere")
    monkeypatch.setitem(methods.NAMES, "sparseattn.elsewhere:Quest", "quest")
    monkeypatch.setattr(Roles, "__module__", "sparseattn.roles.roles.value")
    assert keys() == before
