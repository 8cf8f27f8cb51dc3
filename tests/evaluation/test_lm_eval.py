"""lm-evaluation-harness with a sparse cache: laws on tiny random models, whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'sparseattn[lm-eval]'")
pytest.importorskip("transformers")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from sparseattn.core.no_effect import NoEffect
from sparseattn.evaluation.harness.model import SparseLM
from sparseattn.evaluation.harness.settings import SparseSettings
from sparseattn.evaluation.harness.tally import NothingSparse
from sparseattn.models.errors import ModelError
from tests.evaluation.lm_eval_tiny import ANSWERS, CONTEXT, QUESTIONS, byte_tokenizer
from tests.models.tiny import small


def settings(**changes: Any) -> SparseSettings:
    given = {"selector": "quest:page=4", "budget": 8, "sink": 2, "window": 8, "seal": 16} | changes
    return SparseSettings(**given)


def sparse_lm(batch: int = 1, **changes: Any) -> SparseLM:
    return SparseLM(small("llama"), settings=settings(**changes), tokenizer=byte_tokenizer(), batch_size=batch)


def dense_lm(batch: int = 1) -> HFLM:
    return HFLM(small("llama"), tokenizer=byte_tokenizer(), batch_size=batch)


def generations() -> list[Instance]:
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    return [
        Instance("generate_until", {"context": CONTEXT}, (f"{CONTEXT}{asked}", options), 0, ("made", number, 1))
        for number, asked in enumerate(QUESTIONS)
    ]


def choices() -> list[Instance]:
    """Of three questions with three answers each, some of one token."""
    return [
        Instance("loglikelihood", {"context": CONTEXT}, (f"{CONTEXT}{asked}", f" {answer}"), 0, ("made", number, 1))
        for number, asked in enumerate(QUESTIONS)
        for answer in ANSWERS
    ]


@pytest.mark.parametrize("batch", [1, 2])
def test_at_budget_all_answers_are_those_of_hflm(batch: int) -> None:
    sparse, dense = sparse_lm(batch, budget="all"), dense_lm(batch)
    assert sparse.generate_until(generations()) == dense.generate_until(generations())
    found, expected = sparse.loglikelihood(choices()), dense.loglikelihood(choices())
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    torch.testing.assert_close(
        torch.tensor([value for value, _ in found]), torch.tensor([value for value, _ in expected]), rtol=0, atol=1e-4
    )


def test_fewer_rows_give_other_answers_and_are_counted() -> None:
    dense, sparse = dense_lm(), sparse_lm()
    assert sparse.loglikelihood(choices()) != dense.loglikelihood(choices())
    record = sparse.tally.record()
    made = record["tasks"]["made"]
    assert 0 < made["rows_read"] < made["rows_held"]
    assert 0 < made["bytes_read"] < made["bytes_held"]
    # Of each question what stands behind the context, which ends before its last space, and an answer but for its end.
    fed = [(f" {asked}", f" {answer}"[:-1]) for asked in QUESTIONS for answer in ANSWERS]
    steps = sum(len(asked) + len(answer) for asked, answer in fed)
    assert made["sparse_steps"] == 3 * steps
    assert made["dense_steps"] == 3, "one context, prefilled once, in three layers"
    assert made["tail_tokens"].endswith("(behind the context)")
    assert record["total"]["sparse_steps"] == made["sparse_steps"]


def test_tokens_of_a_batch_are_those_of_each_alone() -> None:
    """Whatever goes through the model together, with padding on both sides: every row beyond sink and window is read
    sparsely, and a padded token is neither a step nor a row."""
    alone, together = sparse_lm(1, selector="exact"), sparse_lm(4, selector="exact")
    both = [lm.loglikelihood(choices()) for lm in (alone, together)]
    torch.testing.assert_close(torch.tensor(both[0]), torch.tensor(both[1]), rtol=0, atol=1e-4)
    assert alone.generate_until(generations()) == together.generate_until(generations())
    steps = [lm.tally.record()["total"] for lm in (alone, together)]
    assert [steps[0][name] == steps[1][name] for name in ("rows_held", "sparse_steps")] == [True, True]


def test_a_text_is_decoded_token_by_token() -> None:
    text = [Instance("loglikelihood_rolling", {}, (CONTEXT,), 0, ("text", 0, 1))]
    sparse, dense = sparse_lm(budget="all"), dense_lm()
    assert sparse.loglikelihood_rolling(text) == pytest.approx(dense.loglikelihood_rolling(text), abs=1e-3)
    assert sparse.tally.record()["tasks"]["text"]["sparse_steps"] == 3 * len(CONTEXT)


def test_a_run_in_which_nothing_was_sparse_is_refused() -> None:
    sparse = sparse_lm(tail=0)
    options = {"until": ["\n\n"], "max_gen_toks": 1, "do_sample": False}
    asked = [Instance("generate_until", {}, (CONTEXT, options), 0, ("made", 0, 1))]
    sparse.generate_until(asked)
    with pytest.raises(NothingSparse, match=r"no step of made was sparse, so that no score is written"):
        sparse.get_model_info()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": 4096}, r"--budget 4096 has no effect: the longest prompt of made has 2\d\d rows"),
        ({"window": 400}, r"--window 400 read all 2\d\d rows"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NoEffect, match=says):
        sparse_lm(**changes).loglikelihood(choices())


def test_a_task_without_rows_to_leave_out_is_refused() -> None:
    asked = [Instance("loglikelihood", {}, ("", answer), 0, ("void", 0, 1)) for answer in ("a", "b")]
    with pytest.raises(NoEffect, match=r"the longest prompt of void has 1 rows .* leave void out"):
        sparse_lm().loglikelihood(asked)


@pytest.mark.parametrize("tail", [9999, None])
def test_a_tail_is_at_most_the_whole_prompt(tail: int | None) -> None:
    assert settings(tail=tail).tails.of("made", {}, "x" * 20, len).tokens == 20


def test_layers_that_are_all_dense_are_refused() -> None:
    with pytest.raises(
        NoEffect, match=r"--dense-layers 3 leaves no layer of the whole context sparse: at most 2 may stay dense"
    ):
        sparse_lm(dense_layers=3)


def test_counts_are_kept_beside_responses(tmp_path: Path) -> None:
    """A run that goes on with kept responses has the counts of what they took; other settings have other responses."""
    first = sparse_lm()
    kept = str(tmp_path / "responses.db")
    expected = CachingLM(first, kept).loglikelihood(choices())
    again = sparse_lm()
    lm = CachingLM(again, kept)
    assert [tuple(one) for one in lm.loglikelihood(choices())] == expected
    assert not again.tally.ran, "it was not asked"
    record = lm.get_model_info()["sparseattn"]["tasks"]["made"]
    assert record["of_kept_responses"] == record["sparse_steps"] == first.tally.record()["total"]["sparse_steps"]
    assert settings().digest("model") != settings(budget=16).digest("model")


def test_names_of_models_and_what_has_no_tokenizer() -> None:
    with pytest.raises(ModelError, match="reference is a model of bytes, without a tokenizer"):
        SparseLM("reference", settings=settings())
