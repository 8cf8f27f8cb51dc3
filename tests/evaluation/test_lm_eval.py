"""lm-evaluation-harness with a sparse cache: laws on tiny random models, whose tokens are bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'sparseattn[lm-eval]'")
pytest.importorskip("transformers")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparseattn.evaluation.harness.model import SparseLM
from sparseattn.evaluation.harness.settings import SparseSettings
from tests.models.tiny import small

CONTEXT = "The harbour master counts boats, and the baker counts loaves. " * 3
QUESTIONS = ["Who counts boats?", "What does the baker count, and why?", "Whom?"]


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are those of 256 bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=letters[0], pad_token=letters[0])


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
        for answer in ("the baker", "a boat", "b")
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
