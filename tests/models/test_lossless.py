"""Lossless generation: the tokens of full attention, whatever drafts, and samples distributed as its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn.models.drafts.rejection import accept_sampled  # noqa: E402
from sparseattn.models.lossless import Lossless, generate_lossless  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache  # noqa: E402
from tests.models.tiny import SMALL, padded, prompt, small  # noqa: E402

NEW = 24
DRAFTS = {"quest:page=4": 8, "window": None, "exact": 8, "querypq": 8}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "phi3", "gpt_neox")]


@pytest.fixture(params=["llama", "gemma3", *SLOW], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return small("llama")


def dense(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What `generate` makes of it with full attention."""
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | options)


def lossless(model: Any, inputs: dict[str, Tensor], selector: Any, budget: Any, draft: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "settings": SMALL} | options
    given = dict(inputs)
    return generate_lossless(model, given.pop("input_ids"), selector, budget, draft, **given, **options)


def whole(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# -- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [0, 1, 4, 9])
@pytest.mark.parametrize("selector", DRAFTS)
def test_greedy_tokens_are_full_attentions(model: Any, selector: str, draft: int) -> None:
    inputs = whole(prompt())
    out = lossless(model, inputs, selector, DRAFTS[selector], draft)
    assert torch.equal(out.sequences, dense(model, inputs))
    assert (out.stats.tokens, out.stats.ties) == (NEW, [])
    assert (out.stats.drafted > 0) is (draft > 0)
    assert out.stats.accepted <= out.stats.drafted


def test_drafts_that_read_every_row_are_all_accepted(model: Any) -> None:
    out = lossless(model, whole(prompt()), "quest:page=4", None, 4)
    assert out.stats.accepted == out.stats.drafted > NEW // 2
    assert out.stats.acceptance == 1


@pytest.mark.parametrize("draft", [0, 1, 5])
@pytest.mark.parametrize("selector", ["quest:page=4", "window"])
def test_sequences_of_a_padded_batch_accept_differently(model: Any, selector: str, draft: int) -> None:
    out = lossless(model, padded(), selector, 8, draft)
    assert torch.equal(out.sequences, dense(model, padded()))


@pytest.mark.parametrize("draft", [1, 4])
def test_it_stops_where_full_attention_stops(model: Any, draft: int) -> None:
    """At an end token, in a batch at several places; at a criterion of one's own; at the longest length."""
    plainly = dense(model, padded())
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


def test_chunks_of_a_prompt_and_a_streamer(llama: Any) -> None:
    seen: list[int] = []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            seen.extend(tokens.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    inputs = whole(prompt())
    out = lossless(llama, inputs, "quest:page=4", 8, 3, prefill_chunk_size=16, streamer=Streamer())
    assert torch.equal(out.sequences, dense(llama, inputs))
    assert seen == [*out.sequences[0].tolist(), -1]


@pytest.mark.parametrize("batch", ["one", "padded"])
@pytest.mark.parametrize("eos", [False, True])
def test_several_turns_on_one_cache(model: Any, batch: str, eos: bool) -> None:
    """The second turn goes on from what the first left, where sequences ended at different places too."""
    inputs = padded() if batch == "padded" else whole(prompt())
    first = dense(model, inputs, max_new_tokens=12)
    options: dict[str, Any] = {"pad_token_id": 0}
    if eos:
        options["eos_token_id"] = int(first[0, inputs["input_ids"].shape[1] + 4])
    question = torch.randint(1, 256, (len(first), 7), generator=torch.Generator().manual_seed(2))
    pad = torch.ones_like(question)
    if len(question) > 1:
        pad[1, :3] = 0
    sparse = SparseCache(model, "quest:page=4", 8, **SMALL)
    answers = []
    with sparse:
        given = dict(inputs)
        for _ in range(3):
            before = given["input_ids"].shape[1]
            tokens = lossless(model, given, None, None, 3, cache=sparse, max_new_tokens=12, **options).sequences
            assert sparse.get_seq_length() == tokens.shape[1] - 1
            answers.append(tokens)
            given = _next_turn(given, tokens, before, question, pad, options)
    given = dict(inputs)
    for answer in answers:
        before = given["input_ids"].shape[1]
        expected = dense(model, given, max_new_tokens=12, **options)
        assert torch.equal(answer, expected)
        given = _next_turn(given, expected, before, question, pad, options)


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


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_accepted_and_drawn_tokens_are_distributed_as_the_target() -> None:
    """Chi-squared over 10^5 draws: the first token, and the second of those rounds that have one."""
    vocabulary, draws = 7, 100_000
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 3, vocabulary, generator=generator).mul(1.5).softmax(-1)
    q[1, 2] = 0.0  # never drafted
    q[1] /= q[1].sum()
    torch.manual_seed(1)
    drafts = torch.stack([torch.multinomial(q[i], draws, replacement=True) for i in range(2)], 1)
    accepted, tokens = accept_sampled(drafts, q[None, :2].expand(draws, -1, -1), p[None].expand(draws, -1, -1))
    for place in range(3):
        reached = tokens[accepted >= place, place]
        assert len(reached) > 10_000
        assert _distance(reached.bincount(minlength=vocabulary), p[place]) < BEYOND[vocabulary - 1]
    agreement = torch.minimum(p[0], q[0]).sum()
    assert abs((accepted >= 1).double().mean() - agreement) < 0.01
    assert _distance(drafts[:, 0].bincount(minlength=vocabulary), p[0]) > 10 * BEYOND[vocabulary - 1]  # so that the test can fail


BEYOND = {6: 22.46, 15: 37.70}  # chi-squared that 1 in 1,000 samples goes beyond, by degrees of freedom


def test_samples_of_a_model_are_distributed_as_full_attentions() -> None:
    """Second tokens against full attention's probabilities: 10^5 draws over 16 tokens, by drafts of which many fail."""
    model = small("llama", vocab_size=16, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # far from uniform
    ids = prompt(24).remainder(15) + 1
    rows = whole(ids.expand(5_000, -1))
    torch.manual_seed(0)
    counts, accepted, drafted = torch.zeros(16, 16, dtype=torch.float64), 0, 0
    for _ in range(20):
        out = lossless(model, rows, "window", None, 2, do_sample=True, temperature=0.9, max_new_tokens=3)
        first, second = out.sequences[:, 24], out.sequences[:, 25]
        counts += torch.bincount(first * 16 + second, minlength=256).view(16, 16)
        accepted, drafted = accepted + out.stats.accepted, drafted + out.stats.drafted
    assert 0.2 < accepted / drafted < 0.8
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(16, -1), torch.arange(16)[:, None]], 1)).logits[:, -2:]
    p = (logits.double() / 0.9).softmax(-1)
    for seen, expected in ((counts.sum(1), p[0, 0]), (counts[counts.sum(1).argmax()], p[counts.sum(1).argmax(), 1])):
        assert _distance(seen, expected) < BEYOND[15]


def _distance(seen: Tensor, p: Tensor) -> float:
    """Chi-squared of counts `[V]` against probabilities `[V]`."""
    expected = p.double() * seen.sum()
    return float(((seen - expected) ** 2 / expected).sum())
