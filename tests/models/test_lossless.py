"""Lossless generation: the tokens of full attention, whatever drafts. Samples are in `test_lossless_samples.py`, more
models and what no cache goes back from in `test_lossless_models.py`."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn.cache.search import Search  # noqa: E402
from sparseattn.models import sparse_layer  # noqa: E402
from sparseattn.models.cache_argument import cache_argument  # noqa: E402
from sparseattn.models.drafts.length import AutoLength, Round  # noqa: E402
from sparseattn.models.errors import ModelError  # noqa: E402
from sparseattn.models.load import encode, load_model  # noqa: E402
from sparseattn.models.lossless import MOST_DRAFTS, Lossless  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache  # noqa: E402
from sparseattn.selectors.tokens.pillar import Pillar  # noqa: E402
from sparseattn.traces.texts import read_named  # noqa: E402
from tests.evaluation.lm_eval_tiny import byte_tokenizer  # noqa: E402
from tests.models.interrupts import Interrupt  # noqa: E402
from tests.models.lossless_runs import NEW, dense, dense_once, lossless, whole  # noqa: E402
from tests.models.tiny import SMALL, padded, prompt, small  # noqa: E402

QUEST, LOWBIT = "quest:page=4", "lowbit:rows=16"
DRAFTS = {QUEST: 8, "window": None, "exact": 8, "querypq": 8, LOWBIT: 8, "pillar": 8}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "phi3", "gpt_neox")]


@pytest.fixture(params=["llama", "gemma3", *SLOW], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return small("llama")


# -- greedy ------------------------------------------------------------------------------------------------------------


def by_draft(selectors: Iterable[str], drafts: Sequence[int], *fast: tuple[str, int]) -> pytest.MarkDecorator:
    """Parametrizes `selector` and `draft` by all pairs, those that are not among the `fast` ones slow."""
    pairs = list(product(selectors, drafts))
    assert set(fast) <= set(pairs)
    assert {one for one, _ in fast} == {one for one, _ in pairs}
    assert {one for _, one in fast} == {one for _, one in pairs}
    slow = [[pytest.mark.slow] * (pair not in fast) for pair in pairs]
    some = [pytest.param(*pair, marks=marks) for pair, marks in zip(pairs, slow, strict=True)]
    return pytest.mark.parametrize(("selector", "draft"), some)


FAST = ((QUEST, 0), (QUEST, 4), ("window", 9), ("exact", 1), ("querypq", 4), (LOWBIT, 4), ("pillar", 4))


@by_draft(DRAFTS, [0, 1, 4, 9], *FAST)
def test_greedy_tokens_are_full_attentions(model: Any, selector: str, draft: int) -> None:
    inputs = whole(prompt())
    out = lossless(model, inputs, selector, DRAFTS[selector], draft)
    assert torch.equal(out.sequences, dense_once(model, inputs))
    assert (out.stats.tokens, out.stats.ties) == (NEW, [])
    assert (out.stats.drafted > 0) is (draft > 0)
    assert out.stats.accepted <= out.stats.drafted


@pytest.mark.parametrize("selector", ["quest:page=4", "exact", "tailed:inner=[quest:page=4],rows=16"])
def test_drafts_of_a_round_may_read_what_its_first_one_chose(
    model: Any, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are full attention's all the same; a round asks each layer's method once, and once more behind a seal."""
    asked: list[Search] = []  # kept, so that no other has its place in memory

    def counted(ask: Any) -> Any:
        def run(self: Search, *given: Any) -> Any:
            found = ask(self, *given)
            asked.extend([self] * (found is not None))
            return found

        return run

    for name in ("_chosen", "decoded"):  # in two calls, or at once where that can be
        monkeypatch.setattr(Search, name, counted(getattr(Search, name)))
    inputs, times = whole(prompt()), {}
    for once in (False, True):
        asked.clear()
        out = lossless(model, inputs, selector, 8, 5, choose_once=once)
        assert torch.equal(out.sequences, dense_once(model, inputs))
        searches = Counter(map(id, asked))
        times[once] = max(searches.values())  # of a layer; trials of a selector are searches of their own
        if not once:
            assert times[once] == out.stats.draft_steps
        else:
            rounds = sum(count for drafts, count in out.stats.rounds.items() if drafts)
            assert rounds <= times[once] <= 2 * rounds < out.stats.draft_steps


def test_drafts_that_read_every_row_are_all_accepted(model: Any) -> None:
    out = lossless(model, whole(prompt()), "quest:page=4", None, 4)
    assert out.stats.accepted == out.stats.drafted > NEW // 2
    assert out.stats.acceptance == 1


FAST_PADDED = ((QUEST, 0), (QUEST, 5), ("window", 1), ("exact", 5), ("querypq", 5), (LOWBIT, 5), ("pillar", 5))


@by_draft(DRAFTS, [0, 1, 5], *FAST_PADDED)
def test_sequences_of_a_padded_batch_accept_differently(model: Any, selector: str, draft: int) -> None:
    out = lossless(model, padded(), selector, DRAFTS[selector], draft)
    assert torch.equal(out.sequences, dense_once(model, padded()))
    assert (out.stats.drafted > 0) is (draft > 0)


LONGER = 34  # tokens: from none stored past two seals
LENGTHS = {"one": (1,), "short": (6,), "long": (200,), "batch": (200, 6, 1)}  # SMALL: sink and window 10, a seal 16
FAST_LENGTHS = {"one": LOWBIT, "short": "exact", "long": "querypq", "batch": QUEST}


@pytest.mark.parametrize(
    ("lengths", "selector"),
    [
        pytest.param(lengths, selector, marks=[pytest.mark.slow] * (selector != FAST_LENGTHS[lengths]))
        for lengths, selector in product(LENGTHS, DRAFTS)
    ],
)
def test_prompts_of_any_length(model: Any, lengths: str, selector: str) -> None:
    """Of one token, of fewer than are read anyway, of several seals; each generates past a seal."""
    tokens = LENGTHS[lengths]
    ids = prompt(200, len(tokens))[:, -max(tokens) :]
    mask = torch.stack([torch.arange(max(tokens)) >= max(tokens) - n for n in tokens]).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    out = lossless(model, inputs, selector, DRAFTS[selector], 3, max_new_tokens=LONGER)
    assert torch.equal(out.sequences, dense_once(model, inputs, LONGER))
    assert out.stats.tokens == LONGER * len(tokens)
    assert out.stats.drafted > 0


def test_checks_of_drafts_are_followed_whole() -> None:
    assert Pillar.tokens_followed == MOST_DRAFTS + 1


def test_checks_tell_drafts_what_rows_weigh(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of attention in place are those of all logits, which torch makes; padding gives nothing."""
    pytest.importorskip("numba")
    told: list[tuple[Tensor, Tensor]] = []
    checked = Pillar.checked

    def noted(self: Pillar, queries: Tensor, total: Tensor) -> None:
        checked(self, queries, total)
        told.append((total, self._given(self.stored_keys()).masked_fill(self.weights.data.isneginf(), 0)))

    monkeypatch.setattr(Pillar, "checked", noted)
    runs = []
    for in_place in (sparse_layer.in_place, lambda *_: False):
        monkeypatch.setattr(sparse_layer, "in_place", in_place)
        told.clear()
        out = lossless(model, padded(), "pillar:queries=2", 8, 3)
        assert torch.equal(out.sequences, dense_once(model, padded()))
        runs.append([*told])
    assert len(runs[0]) == len(runs[1]) > 3
    for (total, weights), (expected, others) in zip(*runs, strict=True):
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-3)
        torch.testing.assert_close(weights, others, rtol=0, atol=1e-3)
        assert bool((weights.sum(-1) <= total.isfinite().sum(-1) + 1e-3).all())
    if model.config.model_type == "llama":  # whose sequences accept apart: one that has ended is fed padding
        assert any(bool(total.isinf().any()) for total, _ in runs[0])


@pytest.mark.parametrize("draft", [1, 4])
def test_it_stops_where_full_attention_stops(model: Any, draft: int) -> None:
    """At an end token, in a batch at several places; at a criterion of one's own; at the longest length."""
    plainly = dense_once(model, padded())
    prompt_length = padded()["input_ids"].shape[1]
    ends = [int(plainly[0, prompt_length + 2]), int(plainly[1, prompt_length + 7])]
    options = {"eos_token_id": ends, "pad_token_id": 0}
    out = lossless(model, padded(), "quest:page=4", 8, draft, **options)
    assert torch.equal(out.sequences, dense(model, padded(), **options))
    assert out.stats.tokens < 3 * NEW

    def seen(ids: Tensor, scores: object, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 60 + 5)

    stopping = transformers.StoppingCriteriaList([seen])
    out = lossless(model, whole(prompt()), "quest:page=4", 8, draft, stopping_criteria=stopping)
    assert torch.equal(out.sequences, dense(model, whole(prompt()), stopping_criteria=stopping))
    assert out.sequences.shape[1] == 65


@pytest.mark.parametrize("draft", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_it_stops_at_strings(llama: Any, draft: int) -> None:
    """Of two tokens each, which a draft may end, begin or hold; in a batch at several places."""
    tokenizer, inputs = byte_tokenizer(), padded((60, 41, 23, 50))
    plainly = dense_once(llama, inputs)[:, 60:]
    letters = (plainly < 94).tolist()  # the ids of printable ASCII, which strings are made of whole
    places = [next(i for i in range(2, NEW - 1) if row[i] and row[i + 1]) for row in letters]
    strings = [tokenizer.decode(row[i : i + 2]) for row, i in zip(plainly, places, strict=True)]
    options = {"stop_strings": strings, "tokenizer": tokenizer}
    expected = dense(llama, inputs, **options)
    out = lossless(llama, inputs, QUEST, 8, draft, **options)
    assert torch.equal(out.sequences, expected)
    assert out.stats.tokens == sum(place + 2 for place in places)
    assert len(set(places)) > 1
    custom, new = Lossless(QUEST, 8, draft, **SMALL), {"max_new_tokens": NEW, "do_sample": False}
    stops = transformers.StoppingCriteriaList([transformers.StopStringCriteria(tokenizer, strings)])
    assert torch.equal(llama.generate(**inputs, **new, custom_generate=custom, stopping_criteria=stops), expected)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):  # which transformers hands on to none
        llama.generate(**inputs, **new, custom_generate=custom, **options)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_tokens(model: Any, new: int) -> None:
    out = lossless(model, whole(prompt()), "window", None, 4, max_new_tokens=new)
    assert torch.equal(out.sequences, dense(model, whole(prompt()), max_new_tokens=new))
    assert out.stats.tokens == new
    assert out.stats.drafted <= max(new - 2, 0) * new  # none that could not be used


def test_processors_see_each_sequence_alone(model: Any) -> None:
    options = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 5}
    out = lossless(model, padded(), "quest:page=4", 8, 3, **options)
    assert torch.equal(out.sequences, dense(model, padded(), **options))
    assert out.stats.accepted > 0


@pytest.mark.parametrize("selector", ["quest:page=4", "pillar"])
def test_chunks_of_a_prompt_and_a_streamer(llama: Any, selector: str) -> None:
    seen: list[int] = []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            seen.extend(tokens.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    inputs = whole(prompt())
    out = lossless(llama, inputs, selector, 8, 3, prefill_chunk_size=16, streamer=Streamer())
    assert torch.equal(out.sequences, dense_once(llama, inputs))
    assert seen == [*out.sequences[0].tolist(), -1]


TURNS: dict[str, tuple[str, int | str, bool]] = {  # by what drafts: selector, draft, choose_once
    "quest": (QUEST, 3, False),
    "once": (QUEST, 3, True),
    "auto": (QUEST, "auto", False),
    "lowbit": (LOWBIT, 3, False),
    "pillar": ("pillar", 3, False),
}
FAST_TURNS = {(drafts, "one", False) for drafts in ("once", "auto", "lowbit")}
FAST_TURNS |= {(drafts, "padded", True) for drafts in ("quest", "pillar")}


@pytest.mark.parametrize(
    ("drafts", "batch", "eos"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST_TURNS))
        for case in product(TURNS, ("one", "padded"), (False, True))
    ],
)
def test_several_turns_on_one_cache(
    model: Any, drafts: str, batch: str, eos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second turn goes on from what the first left, where sequences ended at different places too."""
    monkeypatch.setattr("sparseattn.models.drafts.length.LEAST_SHARE", 0.0)  # "auto" tries drafts in each turn
    selector, draft, once = TURNS[drafts]
    given, options, expected = _dense_turns(model, batch, eos)
    drafted = 0
    with SparseCache(model, selector, 8, **SMALL) as cache:
        for inputs, answer in zip(given, expected, strict=True):
            out = lossless(
                model, inputs, None, None, draft, cache=cache, choose_once=once, max_new_tokens=12, **options
            )
            assert torch.equal(out.sequences, answer)
            assert cache.get_seq_length() == answer.shape[1] - 1
            drafted += out.stats.drafted
    assert drafted


@functools.cache
def _dense_turns(model: Any, batch: str, eos: bool) -> tuple[list[dict[str, Tensor]], dict[str, Any], list[Tensor]]:
    """What three turns are given, their options, and what full attention answers."""
    inputs = padded() if batch == "padded" else whole(prompt())
    options: dict[str, Any] = {"pad_token_id": 0}
    if eos:
        options["eos_token_id"] = int(dense_once(model, inputs)[0, inputs["input_ids"].shape[1] + 4])
    question = torch.randint(1, 256, (len(inputs["input_ids"]), 7), generator=torch.Generator().manual_seed(2))
    pad = torch.ones_like(question)
    if len(question) > 1:
        pad[1, :3] = 0
    given, answers = [inputs], list[Tensor]()
    for _ in range(3):
        answers.append(dense(model, given[-1], max_new_tokens=12, **options))
        before = given[-1]["input_ids"].shape[1]
        given.append(_next_turn(given[-1], answers[-1], before, question, pad, options))
    return given[:3], options, answers


def _next_turn(
    given: dict[str, Tensor], tokens: Tensor, before: int, question: Tensor, pad: Tensor, options: dict[str, Any]
) -> dict[str, Tensor]:
    """All tokens and the next question; what follows a sequence's end is padding."""
    made = tokens[:, before:]
    after = (made == options.get("eos_token_id", -1)).long().cumsum(1)
    real = torch.cat([torch.ones_like(after[:, :1]), 1 - after[:, :-1].clamp(max=1)], 1)
    return {
        "input_ids": torch.cat([tokens, question * pad], 1),
        "attention_mask": torch.cat([given["attention_mask"], real, pad], 1),
    }


# -- ties --------------------------------------------------------------------------------------------------------------


def test_ties_are_counted(llama: Any) -> None:
    """With a twin of equal score for each token every token is a tie, and without one none is."""
    twins = copy.deepcopy(llama)
    with torch.no_grad():
        twins.lm_head.weight[1::2] = twins.lm_head.weight[::2]
    out = lossless(twins, whole(prompt()), "quest:page=4", 8, 3)
    assert out.stats.ties == [(0, place) for place in range(NEW)]
    out = lossless(llama, whole(prompt()), "quest:page=4", 8, 3, rounding=1e-9)
    assert out.stats.ties == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_in_16_bits_tokens_differ_at_a_tie_first(llama: Any, dtype: torch.dtype) -> None:
    """Of two prompts. Whether any token differs is up to the machine's sums: the next test makes some differ."""
    rounded = copy.deepcopy(llama).to(dtype)
    for seed in (1, 2):
        inputs = whole(prompt(seed=seed))
        out = lossless(rounded, inputs, "quest:page=4", 8, 3)
        different = _first_different(out.sequences, dense(rounded, inputs))
        assert different is None or (0, different) in out.stats.ties
        assert len(out.stats.ties) < NEW


@pytest.mark.parametrize("draft", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_scores_that_round_otherwise_differ_at_a_tie_first(llama: Any, draft: int) -> None:
    """Scores are made to differ by less than half of what counts as a tie: some tokens do differ, the first of them at
    a tie; and by another measure of what a tie is, none is there, so that the test can fail."""
    noise = torch.Generator().manual_seed(6)

    def rounded(module: Any, inputs: Any, scores: Tensor) -> Tensor:
        within = torch.rand(scores.shape, generator=noise) * 2 - 1
        return scores + 0.4 * ROUGH * scores.max(-1, keepdim=True).values * within

    places: dict[float, list[int]] = {ROUGH: [], 1e-9: []}
    for seed, rounding in ((2, ROUGH), (3, ROUGH), (5, ROUGH), (2, 1e-9)):
        inputs = whole(prompt(seed=seed))
        noise.manual_seed(seed)
        hook = llama.lm_head.register_forward_hook(rounded)
        try:
            out = lossless(llama, inputs, None, None, draft, rounding=rounding)
        finally:
            hook.remove()
        different = _first_different(out.sequences, dense_once(llama, inputs))
        if different is not None:
            assert ((0, different) in out.stats.ties) is (rounding == ROUGH)
            places[rounding].append(different)
        assert len(out.stats.ties) < NEW
    assert len(places[ROUGH]) >= 2, places
    assert max(places[ROUGH]) > 3
    assert places[1e-9], "the test cannot fail"


ROUGH = 0.05  # of the best score


def _first_different(given: Tensor, expected: Tensor) -> int | None:
    """The first place behind a prompt of 60 tokens at which two sequences differ."""
    different = (given != expected)[0, 60:].nonzero()
    return int(different[0]) if len(different) else None


# -- how many drafts ---------------------------------------------------------------------------------------------------


def _choices(length: AutoLength, rounds: int, accepted: Callable[[int], int], draft: float, tokens: float) -> list[int]:
    """What is drafted when a draft step takes `draft` seconds and a verification 1 and `tokens` for each draft."""
    chosen = []
    for _ in range(rounds):
        count = length.next(10_000)
        chosen.append(count)
        length.observe(Round(count, [accepted(count)], draft * count, 1 + tokens * count))
    return chosen


def test_auto_drafts_as_many_as_pay() -> None:
    """Cheap drafts that are accepted: the most; dear verifications or rejections: fewer; what cannot pay: none."""
    assert _choices(AutoLength(1.0), 8, lambda k: k, 0.1, 0.0) == [0, 0, 2, 4, 8, 8, 8, 8]
    some = _choices(AutoLength(1.0), 60, lambda k: min(k, 1), 0.1, 0.05)
    assert set(some[4:]) <= {0, 1, 2}
    assert some.count(1) + some.count(2) > 50
    assert _choices(AutoLength(1.0), 30, lambda k: 0, 0.5, 0.2) == [0, 0, 2, 2] + [0] * 26
    unlucky = iter([0])  # the first draft alone is rejected
    assert _choices(AutoLength(1.0), 8, lambda k: next(unlucky, k) if k else 0, 0.01, 0.0)[4:] == [8] * 4
    assert _choices(AutoLength(1.0), 30, lambda k: k, 0.9, 0.9)[4:] == [0] * 26


def test_auto_decodes_densely_where_attention_is_a_small_part() -> None:
    length = AutoLength(1e-5)
    assert _choices(length, 5, lambda k: k, 0.1, 0.0) == [0] * 5
    assert "attention reads 9% of a plain step's bytes at 10,000 tokens" in length.reason


def test_auto_goes_by_the_seconds_of_attention() -> None:
    """Not by bytes, where a clock has it; and drafts begin once attention has grown to a part that pays."""
    length = AutoLength(1e-9)
    chosen = []
    for step in range(40):
        count = length.next(10_000)
        chosen.append(count)
        length.observe(Round(count, [count], 0.1 * count, 1.0, 0.1 if step < 20 else 0.5))
    assert chosen[:20] == [0] * 20
    assert chosen[-1] == 8
    assert [count for count in chosen if count][:2] == [2, 4]
    heavy = AutoLength(1.0)
    for _ in range(5):
        heavy.observe(Round(heavy.next(10_000), [0], 0.1, 1.0, 0.1))
    assert heavy.next(10_000) == 0
    assert "attention takes 10% of a plain step" in heavy.reason


def test_auto_begins_to_draft_in_the_middle_of_a_generation() -> None:
    """By bytes too, where the context grows past what drafts need."""
    length, chosen = AutoLength(1e-4), []
    for context in range(3_000, 6_000, 50):
        chosen.append(length.next(context))
        length.observe(Round(chosen[-1], [chosen[-1]], 0.1 * chosen[-1], 1.0))
    assert chosen[:20] == [0] * 20
    assert chosen[-1] == 8


def test_auto_tries_again_ever_more_rarely() -> None:
    chosen = _choices(AutoLength(1.0), 700, lambda k: 0, 0.5, 0.2)
    tries = [i for i, count in enumerate(chosen) if count]
    assert tries[:2] == [2, 3]
    waits = [b - a - 1 for a, b in pairwise(tries[1:])]
    assert waits == [64, 128, 256]


def test_auto_returns_to_drafts_that_pay_at_last() -> None:
    length = AutoLength(1.0)
    assert _choices(length, 50, lambda k: 0, 0.2, 0.01)[-1] == 0
    assert _choices(length, 400, lambda k: k, 0.2, 0.01)[-1] == 8
    assert length.reason == ""


def test_auto_forgets_an_unlucky_beginning() -> None:
    """Drafts that were rejected at first and are accepted when they are tried again: two, four, and then they stay."""
    length = AutoLength(1.0)
    chosen = _choices(length, 20, lambda k: 0, 0.6, 0.05)
    assert chosen == [0, 0, 2, 2] + [0] * 16
    later = _choices(length, 80, lambda k: k, 0.6, 0.05)
    first = next(i for i, count in enumerate(later) if count)
    assert later[first : first + 2] == [2, 4]
    assert 0 not in later[first:]


def test_auto_generates_the_same_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it chooses by the clock; with attention taken for all of a step it tries drafts."""
    monkeypatch.setattr("sparseattn.models.drafts.length.LEAST_SHARE", 0.0)
    expected = dense(model, padded(), max_new_tokens=40)
    for budget in (8, None):
        out = lossless(model, padded(), "quest:page=4", budget, "auto", max_new_tokens=40)
        assert torch.equal(out.sequences, expected)
        assert out.stats.rounds[0] >= 2
        assert out.stats.rounds[2] >= 1
    assert out.stats.rounds[4] >= 1  # with budget None every draft is accepted


def test_statistics_say_what_ran(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseattn.models.drafts.length.LEAST_SHARE", 1.0)
    stats = lossless(llama, whole(prompt()), "window", None, "auto").stats
    assert (stats.drafted, stats.rounds) == (0, {0: NEW - 1})
    assert stats.dense_seconds > 0
    assert "plain dense steps" in str(stats)
    assert "less than drafts need" in str(stats)
    stats = lossless(llama, whole(prompt()), "quest:page=4", None, 2).stats
    assert min(stats.draft_seconds, stats.verify_seconds, stats.prefill_seconds) > 0
    assert stats.draft_steps == stats.drafted
    assert f"{stats.accepted} of {stats.drafted} drafts accepted (100%)" in str(stats)


# -- what is cut short -------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Stopper:
    """A streamer that ends a generation with an error once it has been told of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.got = tokens, list[Tensor]()

    def put(self, tokens: Tensor) -> None:
        self.got.append(tokens.reshape(1, -1))
        if len(self.got) == self.tokens + 1:  # the first is the prompt
            raise Stop

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("draft", "tokens"),
    [
        *((0, 1), (4, 3), (4, 4)),
        *(pytest.param(draft, tokens, marks=pytest.mark.slow) for draft, tokens in ((0, 3), (0, 4), (4, 1))),
    ],
)
def test_a_generation_that_is_cut_short_leaves_no_draft(model: Any, draft: int, tokens: int) -> None:
    """The next turn with its cache is full attention's: rows of drafts that were not accepted are gone."""
    question = torch.randint(1, 256, (1, 12), generator=torch.Generator().manual_seed(5))
    with SparseCache(model, "quest:page=4", 8, **SMALL) as cache:
        streamer = Stopper(tokens)
        with pytest.raises(Stop):
            lossless(model, whole(prompt()), None, None, draft, cache=cache, streamer=streamer)
        assert cache.get_seq_length() < prompt().shape[1] + tokens
        turn = whole(torch.cat([*streamer.got, question], 1))
        out = lossless(model, turn, None, None, draft, cache=cache, max_new_tokens=12)
    assert torch.equal(out.sequences, dense(model, turn, max_new_tokens=12))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a generator's end
@pytest.mark.parametrize("moments", [12, pytest.param(120, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_no_draft(llama: Any, moments: int) -> None:
    """Within drafts, checks, and what keeps and forgets rows; a pass that was torn is refused, never gone on from."""
    question = torch.randint(1, 256, (1, 12), generator=torch.Generator().manual_seed(5))
    with SparseCache(llama, "quest:page=4", 8, **SMALL) as cache, Interrupt() as one:
        lossless(llama, whole(prompt()), None, None, 4, cache=cache, max_new_tokens=1)
    with SparseCache(llama, "quest:page=4", 8, **SMALL) as cache, Interrupt() as all_:
        lossless(llama, whole(prompt()), None, None, 4, cache=cache, max_new_tokens=8)
    chance, refused, left = random.Random(4), 0, list[int]()
    expected: dict[int, Tensor] = {}  # by the tokens of a turn, which are full attention's up to the question
    for moment in [chance.randrange(one.calls, all_.calls) for _ in range(moments)]:
        streamer = Stopper(1 << 30)
        with SparseCache(llama, "quest:page=4", 8, **SMALL) as cache:
            with contextlib.suppress(KeyboardInterrupt), Interrupt(moment):
                lossless(llama, whole(prompt()), None, None, 4, cache=cache, streamer=streamer, max_new_tokens=8)
            left.append(cache.get_seq_length())
            turn = whole(torch.cat([*streamer.got, question], 1))
            try:
                out = lossless(llama, turn, None, None, 4, cache=cache, max_new_tokens=10)
            except RuntimeError:
                refused += 1
                cache.reset()
                out = lossless(llama, turn, None, None, 4, cache=cache, max_new_tokens=10)
        length = turn["input_ids"].shape[1]
        if length not in expected:
            expected[length] = dense(llama, turn, max_new_tokens=10)
        assert torch.equal(out.sequences, expected[length]), moment
    assert refused < moments / 10
    assert sum(count >= prompt().shape[1] for count in left) > moments / 2, "most keep what is sound"


def test_several_sequences_that_are_cut_short_begin_anew(model: Any) -> None:
    with SparseCache(model, "quest:page=4", 8, **SMALL) as cache:
        with pytest.raises(Stop):
            lossless(model, padded(), None, None, 4, cache=cache, streamer=Stopper(30))
        assert cache.get_seq_length() == 0
        out = lossless(model, padded(), None, None, 4, cache=cache)
    assert torch.equal(out.sequences, dense_once(model, padded()))


def test_errors_of_models_with_windows_are_their_own() -> None:
    """What ends a prompt's pass, or refuses it, is not hidden by what is put back afterwards."""
    model = small("gemma3")
    with SparseCache(model, "quest:page=4", 8, **SMALL) as cache:
        out = lossless(model, whole(prompt()), None, None, 3, cache=cache, max_new_tokens=5)
        with pytest.raises(ValueError, match="the cache holds 64 tokens"):
            lossless(model, whole(prompt()), None, None, 3, cache=cache)
        hook = model.model.layers[2].register_forward_pre_hook(_stop)
        question = torch.randint(1, 256, (1, 12), generator=torch.Generator().manual_seed(5))
        turn = whole(torch.cat([out.sequences, question], 1))
        with pytest.raises(Stop):
            lossless(model, turn, None, None, 3, cache=cache)
        hook.remove()
        cache.crop(0)
        again = lossless(model, turn, None, None, 3, cache=cache)
    assert torch.equal(again.sequences, dense(model, turn))


def _stop(*_: Any) -> None:
    raise Stop


def test_windows_keep_no_more_than_they_need_afterwards() -> None:
    model = small("gemma3")
    with SparseCache(model, "quest:page=4", 8, **SMALL) as cache:
        out = lossless(model, whole(prompt()), None, None, 3, cache=cache, max_new_tokens=5)
        before = cache.layers[0].keys.shape[2]
        with pytest.raises(RuntimeError, match=r"layer 0 has a sliding window of 16 .* call activate_past_recording"):
            cache.crop(-1)
        dense(model, whole(out.sequences), max_new_tokens=40, **cache_argument(cache))
        assert cache.layers[0].keys.shape[2] == before == 15


# -- refusals ----------------------------------------------------------------------------------------------------------


def _full(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    model(prompt(), **cache_argument(cache))
    return cache


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"draft": 17}, "draft is a number of tokens, 0 to 16"),
        ({"draft": True}, "draft is a number of tokens"),
        ({"selector": "h2o"}, "layer 0: h2o:scores=prompt,recent=0.5 drops rows for good, which full attention would"),
        ({"selector": "snapkv"}, "layer 0: snapkv:window=32,kernel=7,pool=max drops rows for good"),
        ({"selector": "cam", "draft": 0}, "drops rows for good"),  # and merges them into others
        ({"selector": {"default": "quest:page=4", 1: "tova"}}, "layer 1: tova drops rows for good"),
        ({"settings": {"rows": "kivi:bits=4", "seal": 64}}, "keeps rounded rows"),
        ({"settings": {"sparse_from": 3}}, "sparse_from has no meaning here"),
        ({"num_beams": 2}, "not for beams"),
        ({"use_cache": False}, "leave use_cache on"),
        ({"return_dict_in_generate": True}, "leave return_dict_in_generate out"),
    ],
)
def test_refusals(llama: Any, given: dict[str, Any], sentence: str) -> None:
    options: dict[str, Any] = {"selector": "quest:page=4", "budget": 8, "draft": 2} | given
    plainly = dense_once(llama, whole(prompt()))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        lossless(llama, whole(prompt()), **options)
    assert torch.equal(dense(llama, whole(prompt())), plainly)  # the model has its attention back


def test_caches_that_cannot_go_back_are_refused(llama: Any) -> None:
    custom = Lossless("quest:page=4", 8, 2)
    with pytest.raises(ValueError, match=r"keep their rows in a SparseCache.* got a DynamicCache"):
        llama.generate(prompt(61), custom_generate=custom, max_new_tokens=4, **cache_argument(_full(llama)))
    with SparseCache(llama, "quest:page=4", 8, dense_layers=1, **SMALL) as cache:
        cache.layers[0].is_croppable = False
        with pytest.raises(ModelError, match=r"layer 0 .* keeps a state that does not go back"):
            lossless(llama, whole(prompt()), None, None, 2, cache=cache)


def test_processors_that_remember_their_calls_are_refused(llama: Any) -> None:
    """But for plain steps, which call them as `generate` does."""
    asked = {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)}
    with pytest.raises(ValueError, match=r"SynthID's watermark depends on .* draft=0, or a WatermarkingConfig"):
        lossless(llama, whole(prompt()), "window", None, 2, **asked)
    assert torch.equal(
        lossless(llama, whole(prompt()), "window", None, 0, **asked).sequences, dense(llama, whole(prompt()), **asked)
    )
    asked = {"watermarking_config": transformers.WatermarkingConfig()}
    assert torch.equal(
        lossless(llama, whole(prompt()), "window", None, 2, **asked).sequences, dense(llama, whole(prompt()), **asked)
    )
    with pytest.raises(ValueError, match="guidance_scale runs the model a second time"):
        lossless(llama, whole(prompt()), "window", None, 2, guidance_scale=1.5)
    with pytest.raises(ValueError, match="the prompt is empty"):
        lossless(llama, whole(prompt()[:, :0]), "window", None, 2)


def test_ids_that_do_not_follow_what_is_stored_are_refused(llama: Any) -> None:
    with SparseCache(llama, "quest:page=4", 8, **SMALL) as cache:
        lossless(llama, whole(prompt()), None, None, 2, cache=cache)
        with pytest.raises(ValueError, match=f"the cache holds {59 + NEW} tokens"):
            lossless(llama, whole(prompt()), None, None, 2, cache=cache)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_drafts_that_would_change_the_ropes_frequencies_are_refused(kind: str) -> None:
    """A pass of several tokens has those of its longest sequence, and steps of one token others before it."""
    longest = {"dynamic": (DYNAMIC, 64), "longrope": (LONGROPE, 256)}[kind]
    following = small("llama", rope_parameters=longest[0], max_position_embeddings=longest[1])
    near, beyond = whole(prompt(60)), whole(prompt(80))
    sentence = rf"LlamaForCausalLM \({kind}\) has other frequencies in a sequence of more than 64 tokens, .* 60 to 65: "
    with pytest.raises(ModelError, match=sentence):
        lossless(following, near, "window", None, 4, max_new_tokens=6)
    with pytest.raises(ModelError, match="has other frequencies"):  # a short one may be drafted further than the last
        lossless(following, padded((60, 41)), "window", None, 4, max_new_tokens=5)
    allowed = [(near, 4, 5), (near, 0, 8) if kind == "dynamic" else (beyond, 4, 8)]
    for inputs, draft, new in allowed:
        expected = dense(following, inputs, max_new_tokens=new)
        out = lossless(following, inputs, "window", None, draft, max_new_tokens=new)
        assert torch.equal(out.sequences, expected)
    if kind == "longrope":
        with SparseCache(following, "window", None, **SMALL) as cache:
            first = lossless(following, near, None, None, 2, cache=cache, max_new_tokens=2).sequences
            asked = whole(torch.cat([first, prompt(16, seed=3)], 1))
            with pytest.raises(ModelError, match="has other frequencies"):  # some models make the first rows anew
                lossless(following, asked, None, None, 2, cache=cache, max_new_tokens=2)


def test_layers_that_stay_dense(llama: Any) -> None:
    """Layers of transformers keep columns, which are masked where a sequence kept fewer, and closed at the end."""
    first = None
    with SparseCache(llama, "quest:page=4", 8, dense_layers=1, **SMALL) as cache:
        first = lossless(llama, padded(), None, None, 3, cache=cache)
        assert cache.layers[0].keys.shape[2] == cache.get_seq_length() == 60 + NEW - 1
        given = _next_turn(padded(), first.sequences, 60, prompt(16, 3), torch.ones(3, 16, dtype=torch.int64), {})
        second = lossless(llama, given, None, None, 3, cache=cache)
    assert torch.equal(first.sequences, dense_once(llama, padded()))
    assert torch.equal(second.sequences, dense(llama, given))


# -- a trained model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["quest", "lowbit", "querypq", "window", "pillar"])
def test_smollm2(selector: str) -> None:
    """In float32 the same tokens; in bfloat16 up to the first tie."""
    model, tokenizer = load_model("smollm2")
    ids = encode(tokenizer, read_named("alice")[:4_000].encode())
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        expected = dense(model, whole(ids), max_new_tokens=48)
        out = lossless(model, whole(ids), selector, 128, 4, max_new_tokens=48, settings={})
        assert out.stats.acceptance > 0.5
        different = (out.sequences != expected)[0].nonzero()
        if dtype == torch.float32:
            assert not len(different)
        elif len(different):
            assert (0, int(different[0]) - ids.shape[1]) in out.stats.ties
