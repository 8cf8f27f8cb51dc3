"""Speculative decoding: tokens that verify a draft are served sparsely, each as if it were decoded alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import LAYERS, LENGTHS, SPARSE, TOKENS, Answer, ask, check_counts, decoded, engine, layers, llama, prompts

NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }
}  # fmt: skip
SMALL = {**SPARSE, "budget": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Answer]:
    """What engines without drafts answer, at full and at small budget."""
    told = {}
    for name, sparse in (("stock", None), ("full", SPARSE), ("small", SMALL)):
        with engine(model, sparse) as llm:
            told[name] = ask(llm, prompts(*LENGTHS), TOKENS)
    return told


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch, alone: dict[str, Answer]) -> dict[str, Any]:
    """Drafts that are right up to a token which moves from draft to draft: a random model repeats nothing.

    Returns a mapping whose "answers" are the tokens that drafts are made of.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    known: dict[str, Any] = {"answers": alone["full"].tokens, "asked": 0}
    whole = prompts(*LENGTHS)

    def propose(proposer: Any, count: int, requests: Any, lengths: Any, tokens: Any, *more: Any) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in range(count)]
        for r in requests:
            so_far = tokens[r, : lengths[r]].tolist()
            which = next(i for i, ids in enumerate(whole) if so_far[: len(ids)] == ids)
            at = len(so_far) - len(whole[which])
            drafts[r] = list(known["answers"][which][0][at : at + proposer.k])
            wrong = known["asked"] % (proposer.k + 1)  # the token that is, or none
            if wrong < len(drafts[r]):
                drafts[r][wrong] = (drafts[r][wrong] + 1) % 512
            known["asked"] += 1
        return drafts

    monkeypatch.setattr(NgramProposer, "batch_propose", propose)
    return known


@pytest.mark.parametrize("selector", ["quest", "lowbit:page=16", "window"])
def test_what_verifies_drafts_is_what_decodes_one_by_one(
    model: Path, alone: dict[str, Answer], oracle: dict[str, Any], selector: str
) -> None:
    """At full budget stock's tokens, at a small one those of the same engine without drafts."""
    asked, sparse = prompts(*LENGTHS), {**SMALL, "selector": selector}
    expected = alone["small"].tokens
    if selector != "quest":
        with engine(model, sparse) as llm:
            expected = ask(llm, asked, TOKENS).tokens
    oracle["answers"] = expected
    with engine(model, sparse, **NGRAM) as llm:
        found = ask(llm, asked, TOKENS)
    assert found.tokens == expected
    assert found.tokens != alone["stock"].tokens
    check_counts(found, full=False)
    check_drafts(found)


def test_full_budget_with_drafts_is_stock(model: Path, alone: dict[str, Answer], oracle: dict[str, Any]) -> None:
    with engine(model, SPARSE, **NGRAM) as llm:
        found = ask(llm, prompts(*LENGTHS), TOKENS)
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


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
def test_vllms_own_drafts(model: Path, alone: dict[str, Answer]) -> None:
    """Nearly all of them wrong here: entries of rows that were taken back are made anew."""
    with engine(model, SMALL, **NGRAM) as llm:
        found = ask(llm, prompts(*LENGTHS), TOKENS)
    assert found.tokens == alone["small"].tokens
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
        with engine(model, {**SMALL, "dense_layers": 2}) as llm:
            assert small.tokens == ask(llm, asked, TOKENS).tokens
        check_counts(small, full=False)
        proposed = small.engine["vllm:spec_decode_num_draft_tokens"]
        taken = small.engine["vllm:spec_decode_num_accepted_tokens"]
        assert 0.1 * proposed < taken < proposed if folder == model else taken < 0.05 * proposed
