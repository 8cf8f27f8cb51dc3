"""A thousand requests in a cache too small for them: the index beside it stays that of the keys in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SPARSE, VOCABULARY, counted, engine, layers, llama
from vllm import SamplingParams

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.serving.vllm.counters import stats
from sparseattn.serving.vllm.cpu import BUILDERS

REQUESTS, BLOCK, BLOCKS = 1000, 64, 26
AFTER = 50  # steps between two looks


def requests() -> Iterator[tuple[list[int], int]]:
    """Prompts, some of which begin as others do, and how many tokens each is answered by."""
    draw = random.Random(0)
    known = [[draw.randrange(VOCABULARY) for _ in range(300)] for _ in range(8)]
    for _ in range(REQUESTS):
        shared = draw.choice(known)[: draw.choice((0, 0, 70, 140, 280))]
        yield shared + [draw.randrange(VOCABULARY) for _ in range(int(draw.uniform(1, 11) ** 2))], draw.randrange(1, 40)


def check_index(llm: Any) -> int:
    """Every whole entry of running requests that are long, and of blocks that wait for a prefix as far as it was made,
    against the keys that lie there."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager, checked = scheduler.kv_cache_manager, 0
    (builder,) = (one for one in BUILDERS if one.sparse)
    above = builder.settings.above
    for layer in layers(llm).values():
        impl, per = layer.impl, BLOCK // layer.impl.unit
        live: set[int] = set()
        for request in scheduler.running:
            if request.num_computed_tokens <= above:
                continue
            (table,) = manager.get_block_ids(request.request_id)
            for entry in range(request.num_computed_tokens // impl.unit):
                live.add(table[entry // per] * per + entry % per)
        assert all(builder.made[place] for place in live)
        for block in manager.block_pool.blocks:
            if block.block_hash is not None:
                live |= {
                    place for place in range(block.block_id * per, (block.block_id + 1) * per) if builder.made[place]
                }
        places = torch.tensor(sorted(live), dtype=torch.int64)
        keys = BlockCache(layer.kv_cache, impl.packing).keys(places, impl.unit)  # [n,H,unit,D]
        made = impl.selector.entries(keys.transpose(0, 1).flatten(1, 2)[None])
        for name, part in made.items():
            assert torch.equal(impl.store.entries[name][places], part[0].transpose(0, 1)), name
        checked += len(places)
    return checked


@pytest.mark.parametrize(("selector", "unit"), [("quest", 16), ("lowbit:page=16", 64)])
def test_a_thousand_requests(tmp_path: Path, selector: str, unit: int) -> None:
    settings = {**SPARSE, "selector": selector, "budget": 64, "dense_layers": 0, "above": 60, "window": 16}
    given = {"num_gpu_blocks_override": BLOCKS, "block_size": BLOCK, "max_num_seqs": 12, "max_model_len": 512}
    before, made, steps, checked, ended = stats(), requests(), 0, 0, 0
    with engine(llama(tmp_path, 2, 1, 32, 2), settings, **given) as llm:
        start, waiting = counted(llm), dict(enumerate(made))
        while waiting or llm.llm_engine.has_unfinished_requests():
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            while waiting and len(scheduler.waiting) < 4:
                number = min(waiting)
                ids, tokens = waiting.pop(number)
                sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            ended += sum(one.finished for one in llm.llm_engine.step())
            steps += 1
            if steps % AFTER == 0:
                checked += check_index(llm)
        checked += check_index(llm)
        assert all(layer.impl.unit == unit for layer in layers(llm).values())
        seen = {name: count - start[name] for name, count in counted(llm).items()}
    ran = stats() - before
    assert ended == REQUESTS
    assert seen["vllm:num_preemptions"] > 20
    assert seen["vllm:prefix_cache_hits"] > 1000
    assert checked > 1000
    assert ran.sparse_steps > 5000
    assert 0 < ran.rows_read < ran.rows_held
