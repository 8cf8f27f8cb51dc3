"""Requests of one batch with budgets of their own, or dense, are answered as each is alone by such an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import LAYERS, SPARSE, ask, decoded, engine, gemma, llama, prompts, switched
from vllm import SamplingParams

from sparseattn.serving.vllm import cpu, per_request
from sparseattn.serving.vllm.counters import stats
from sparseattn.serving.vllm.settings import parse

LENGTHS, TOKENS = (500, 420, 390, 40), 14


def test_each_request_reads_what_it_asks_for(tmp_path: Path) -> None:
    """Pages and then single rows, in one engine, whose settings are switched."""
    with engine(llama(tmp_path), SPARSE, enable_prefix_caching=False) as llm:
        for selector in ("quest", "lowbit:bits=1"):
            check_each_request(llm, selector)


def check_each_request(llm: Any, selector: str) -> None:
    settings: dict[str, Any] = {**SPARSE, "selector": selector, "budget": 64}
    first = 1 if selector == "quest" else 101  # ticket: counts of this process stay
    asked, budgets = prompts(*LENGTHS), (64, 128, None, 64)  # None: dense
    arguments = [None, {per_request.BUDGET: 128}, {per_request.DENSE: 1}, {}]
    switched(llm, settings)
    alone = []
    for ids, budget in zip(asked, budgets, strict=True):
        cpu.switch(None if budget is None else parse({**settings, "budget": budget}))
        alone.append(ask(llm, [ids], TOKENS))
    cpu.switch(parse(settings))
    before = stats()
    sampling = [
        SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False,
            extra_args=None if one is None else {**one, per_request.TICKET: first + number},
        )
        for number, one in enumerate(arguments)
    ]  # fmt: skip
    out = llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    ran = stats() - before
    assert [list(one.outputs[0].token_ids) for one in out] == [one.tokens[0][0] for one in alone]
    assert alone[0].tokens != alone[2].tokens
    each = [per_request.said(first + number) for number in range(len(asked))]
    assert each[0]["sparse_tokens"] == 0, "it came without a ticket"
    for number in (1, 2, 3):
        assert each[number]["rows_read"] == alone[number].stats.rows_read
        assert each[number]["rows_held"] == alone[number].stats.rows_held
        assert each[number]["sparse_tokens"] * (LAYERS - 1) == alone[number].stats.sparse_steps
    assert each[1]["sparse_tokens"] == decoded(LENGTHS[1:2], [TOKENS])
    assert each[2]["sparse_tokens"] == each[3]["sparse_tokens"] == 0
    assert ran.rows_read == sum(one.stats.rows_read for one in alone)
    for forbids in ({"per_request": False}, {"max_budget": 64}):
        cpu.switch(parse({**settings, **forbids}))
        fixed = llm.generate([{"prompt_token_ids": asked[0]}], sampling[2:3], use_tqdm=False)
        assert list(fixed[0].outputs[0].token_ids) == alone[0].tokens[0][0], "what the server does not let it ask"


def test_tokens_are_counted_once_where_layers_lie_in_several_groups(tmp_path: Path) -> None:
    """And a window as wide as one likes makes no table that is wider than the sequences."""
    model = gemma(tmp_path, ("sliding", "full", "full", "full", "full"))
    sampling = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args={per_request.TICKET: 1001}
    )
    with engine(model, SPARSE) as llm:
        asked: Any = [{"prompt_token_ids": prompts(300)[0]}]
        llm.generate(asked, [sampling], use_tqdm=False)
        assert per_request.said(1001)["sparse_tokens"] == 11
        assert len([builder for builder in cpu.BUILDERS if builder.sparse]) > 1
        cpu.switch(parse({**SPARSE, "window": 10**15}))
        llm.generate(asked, [sampling], use_tqdm=False)
        assert per_request.said(1001)["sparse_tokens"] == 22
