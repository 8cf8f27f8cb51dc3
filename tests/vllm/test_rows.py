"""Single rows in an engine: stock's answers at full budget, and below it the rows that a `KVCache` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import LAYERS, SPARSE, Answer, ask, check_counts, engine, llama, prompts, switched

from sparseattn import KVCache, make_selector
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.selectors.base import vote
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.query_metric import codes_of
from sparseattn.serving.vllm import cpu

BUDGET, WINDOW = 61, 40  # the budget is no multiple of anything
LENGTHS, TOKENS = (500, 260, 390), (12, 20, 6)
HEADS, SIZE = 2, 64
CODES = {
    "querypq:bits=4": (8, 4), "querypq:subspaces=4,bits=8": (4, 8),  # four bytes a row, and two and eight of them
    "querypq:subspaces=4": (4, 4), "querypq:subspaces=16": (16, 4),
}  # fmt: skip
GIVEN = {**SPARSE, "sink": 64, "window": WINDOW}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of codes for the model's layers, of random keys; those of 4 bits leave out a mean key before RoPE."""
    made, ropes = {}, dict.fromkeys(range(LAYERS), Rope.of(SIZE))
    for text, (parts, bits) in CODES.items():
        torch.manual_seed(parts)
        layers = {}
        for layer in range(LAYERS):
            keys, queries = torch.randn(HEADS, 2000, SIZE), torch.randn(HEADS, 2, 500, SIZE)
            layers[layer] = codes_of(keys, queries, None, parts, bits, 0)
            if bits == 4:
                layers[layer]["root"] = torch.randn(HEADS, SIZE)
        path = tmp_path_factory.mktemp("codes") / f"{parts}x{bits}.safetensors"
        Calibration("querypq", layers, ropes=ropes).save(path)
        made[text] = path
    return made


def method(text: str, files: dict[str, Path]) -> str:
    return f"{text},artefact={files[text]}" if text in files else text


@pytest.fixture(scope="module")
def stock(model: Path) -> Answer:
    """What stock vLLM answers."""
    with engine(model, None) as llm:
        return ask(llm, prompts(*LENGTHS), TOKENS)


@pytest.fixture(scope="module")
def served(model: Path, stock: Answer, files: dict[str, Path]) -> Iterator[Any]:
    """An engine whose settings are switched."""
    with engine(model, {**GIVEN, "selector": method(next(iter(CODES)), files)}) as llm:
        yield llm


@pytest.mark.parametrize("text", ["lowbit:bits=1", "lowbit:group=each", *CODES])
def test_rows_are_those_that_a_cache_of_the_same_keys_chooses(
    served: Any, stock: Answer, files: dict[str, Path], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's tokens at full budget, in the same engine."""
    selector, calls = method(text, files), []
    attend = cpu.attend_rows

    def watched(query: Any, out: Any, cache: BlockCache, pages: Any, ids: Any, scale: float, means: Any) -> None:
        attend(query, out, cache, pages, ids, scale, means=means)
        calls.append((query[pages.tokens].clone(), cache, pages, ids))

    settings = {**GIVEN, "selector": selector}
    full = ask(switched(served, settings), prompts(*LENGTHS), TOKENS)
    llm = switched(served, {**settings, "budget": BUDGET})
    monkeypatch.setattr(cpu, "attend_rows", watched)
    checked, forward = [], cpu.SparseCPUImpl.forward

    def forwarded(impl: Any, layer: Any, *given: Any, **named: Any) -> Any:
        calls.clear()
        done = forward(impl, layer, *given, **named)
        for query, cache, _, ids in calls:
            metadata = given[4]
            which = torch.searchsorted(metadata.query_start_loc[:-1].long(), metadata.served.tokens)
            for r, rows in enumerate(metadata.seq_lens[which].tolist()):
                table = metadata.block_table[which[r]].long()
                keys = cache.keys(table[: -(-rows // cache.block)], cache.block).transpose(0, 1).flatten(1, 2)
                own_method = make_selector(selector).for_layer(
                    LayerContext(impl.index, scale=impl.scale, rope=Rope.of(SIZE) if text in CODES else None)
                )
                sealed = (rows - WINDOW) // impl.unit * impl.unit  # a cache alone seals single rows at first
                held = KVCache(own_method, sink=64, window=rows - sealed, seal=impl.unit)
                held.append(keys[None, :, :rows], keys[None, :, :rows])
                asked = query[r].view(1, HEADS, -1, SIZE)
                real = torch.ones(1, int(held.sealed[0]), dtype=torch.bool)
                found = held.select(asked, BUDGET)
                for head, own in enumerate(ids[r]):
                    start, length = found.start[0, head], found.length[0, head]
                    mine, theirs = own[own >= 0].long(), start[length > 0].long()
                    if text in CODES:  # rows of equal codes: any of them may be chosen
                        votes = vote(held.selector.logits(asked, real), held.selector.group)[0, head]
                        mine, theirs = votes[mine], votes[theirs]
                    assert sorted(mine.tolist()) == pytest.approx(sorted(theirs.tolist()), rel=1e-3)
                    checked.append(int((own >= 0).sum()))
        return done

    monkeypatch.setattr(cpu.SparseCPUImpl, "forward", forwarded)
    few = ask(llm, prompts(*LENGTHS), TOKENS)
    assert full.tokens == stock.tokens
    check_counts(full, full=True)
    check_counts(few, full=False)
    assert few.logprobs != stock.logprobs, "what is left out shows, though few rows may give the same tokens"
    assert max(checked) == BUDGET
    assert len(checked) == few.stats.sparse_steps * (HEADS if "each" not in text else 2 * HEADS)


def test_what_codes_miss_lies_in_the_entries(served: Any, stock: Answer, files: dict[str, Path]) -> None:
    first = next(iter(CODES))
    settings = {**GIVEN, "selector": f"{method(first, files)},missed=0.05"}
    full = ask(switched(served, settings), prompts(*LENGTHS), TOKENS)
    assert full.tokens == stock.tokens
    check_counts(full, full=True)
    few, without = (
        ask(switched(served, {**one, "budget": BUDGET}), prompts(*LENGTHS), TOKENS)
        for one in (settings, {**GIVEN, "selector": method(first, files)})
    )
    check_counts(few, full=False)
    assert few.logprobs != without.logprobs, "other rows are chosen"
