"""Lossless generation: the tokens of full attention, whatever drafts, and samples distributed as its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn.models.lossless import generate_lossless  # noqa: E402
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
