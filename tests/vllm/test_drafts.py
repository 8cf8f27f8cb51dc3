"""Speculative decoding: tokens that verify a draft are served sparsely, each as if it were decoded alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import (
    LAYERS,
    LENGTHS,
    SPARSE,
    TOKENS,
    Answer,
    ask,
    check_counts,
    decoded,
    engine,
    layers,
    llama,
    prompts,
    switched,
)

# Of vLLM's own drafts, which an engine compiles as it starts.
pytestmark = pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")

NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }
}  # fmt: skip
SMALL = {**SPARSE, "budget": 64}
METHODS = ("quest", "lowbit:page=16", "window")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Answer]:
    """What engines without drafts answer: stock, at full budget, each method at a small one, and with more layers that
    are dense."""
    asked, told = prompts(*LENGTHS), {}
    with engine(model, None) as llm:
        told["stock"] = ask(llm, asked, TOKENS)
    with engine(model, SPARSE) as llm:
        told["full"] = ask(llm, asked, TOKENS)
        for selector in METHODS:
            told[selector] = ask(switched(llm, {**SMALL, "selector": selector}), asked, TOKENS)
        told["dense"] = ask(switched(llm, {**SMALL, "dense_layers": 2}), asked, TOKENS)
    return told


@contextlib.contextmanager
def oracle(answers: list[list[list[int]]]) -> Iterator[None]:
    """Drafts that are right up to a token which moves from draft to draft: a random model repeats nothing.

    Args:
        answers: tokens that drafts are made of.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    whole, asked = prompts(*LENGTHS), 0

    def propose(proposer: Any, count: int, requests: Any, lengths: Any, tokens: Any, *more: Any) -> list[list[int]]:
        nonlocal asked
        drafts: list[list[int]] = [[] for _ in range(count)]
        for r in requests:
            so_far = tokens[r, : lengths[r]].tolist()
            which = next(i for i, ids in enumerate(whole) if so_far[: len(ids)] == ids)
            at = len(so_far) - len(whole[which])
            drafts[r] = list(answers[which][0][at : at + proposer.k])
            wrong = asked % (proposer.k + 1)  # the token that is, or none
            if wrong < len(drafts[r]):
                drafts[r][wrong] = (drafts[r][wrong] + 1) % 512
            asked += 1
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "batch_propose", propose)
        yield


@pytest.fixture(scope="module")
def drafted(model: Path, alone: dict[str, Answer]) -> dict[str, Answer]:
    """What one engine with drafts answers: with vLLM's own, then each method at a small budget and the full budget."""
    asked = prompts(*LENGTHS)
    with engine(model, SMALL, **NGRAM) as llm:
        told = {"own": ask(llm, asked, TOKENS)}
        for name, sparse in {**{name: {**SMALL, "selector": name} for name in METHODS}, "full": SPARSE}.items():
            switched(llm, sparse)
            with oracle(alone[name].tokens):
                told[name] = ask(llm, asked, TOKENS)
    return told


@pytest.mark.parametrize("selector", METHODS)
def test_what_verifies_drafts_is_what_decodes_one_by_one(
    alone: dict[str, Answer], drafted: dict[str, Answer], selector: str
) -> None:
    """At full budget stock's tokens, at a small one those of an engine without drafts."""
    found = drafted[selector]
    assert found.tokens == alone[selector].tokens
    assert found.tokens != alone["stock"].tokens
    check_counts(found, full=False)
    check_drafts(found)


def test_full_budget_with_drafts_is_stock(alone: dict[str, Answer], drafted: dict[str, Answer]) -> None:
    found = drafted["full"]
    assert found.tokens == alone["stock"].tokens == alone["full"].tokens
    check_counts(found, full=True)
    check_drafts(found)


def check_drafts(found: Answer) -> None:
    """That many tokens of drafts were accepted and many were not, and that all of them were served sparsely."""
    proposed = found.engine["vllm:spec_decode_num_draft_tokens"]
    taken = found.engine["vllm:spec_decode_num_accepted_tokens"]
    assert 0.3 * proposed < taken < 0.7 * proposed, (proposed, taken)
    least = (LAYERS - 1) * decoded(LENGTHS, TOKENS)
    assert least < found.stats.sparse_steps <= least + (LAYERS - 1) * (proposed - taken)


def test_vllms_own_drafts(alone: dict[str, Answer], drafted: dict[str, Answer]) -> None:
    """Nearly all of them wrong here: entries of rows that were taken back are made anew."""
    found = drafted["own"]
    assert found.tokens == alone["quest"].tokens
    assert found.engine["vllm:spec_decode_num_draft_tokens"] > 100
    check_counts(found, full=False)


def test_a_draft_model_stays_dense(model: Path, alone: dict[str, Answer], tmp_path: Path) -> None:
    """One of two layers, of which nothing is accepted, and the model itself, whose dense drafts are wrong at times."""
    asked = prompts(*LENGTHS)
    for folder in (llama(tmp_path, layers=2), model):
        drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
        with engine(model, {**SMALL, "dense_layers": 2}, speculative_config=drafts) as llm:
            small = ask(llm, asked, TOKENS)
            if folder == model:
                why = {name: layer.impl.sparse for name, layer in layers(llm).items()}
                assert [name for name, sparse in why.items() if sparse] == [
                    f"model.layers.{i}.self_attn.attn" for i in (2, 3)
                ]
                assert sum(name.startswith("draft_model.") for name in why) == LAYERS
        assert small.tokens == alone["dense"].tokens
        check_counts(small, full=False)
        proposed = small.engine["vllm:spec_decode_num_draft_tokens"]
        taken = small.engine["vllm:spec_decode_num_accepted_tokens"]
        assert 0.1 * proposed < taken < proposed if folder == model else taken < 0.05 * proposed
