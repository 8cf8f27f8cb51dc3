"""Rows that a KV connector loads from a disk: the index holds what lies in the cache, whoever wrote it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import SPARSE, ask, check_counts, engine, llama, prompts, switched

HITS = "vllm:external_prefix_cache_hits"  # vLLM's counter of tokens that a connector had


def test_answers_from_loaded_rows_are_those_from_computed_ones(tmp_path: Path) -> None:
    """The blocks have held other sequences, whose entries are in the index, before rows are loaded into them. Pages and
    then single rows, in one engine, whose settings are switched."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "rows")},
    }
    # The connector of vLLM's examples stores what one step writes of a prompt, so that a step takes whole prompts.
    given: dict[str, Any] = {"kv_transfer_config": connector, "max_num_batched_tokens": 4096}
    given["enable_prefix_caching"] = False
    few = {**SPARSE, "budget": 64}
    model = llama(tmp_path / "model")
    with engine(model, few, **given) as llm:
        for seed, selector in ((1, "quest"), (3, "lowbit")):
            if selector != "quest":
                switched(llm, {**few, "selector": selector})
            asked, others = prompts(700, 520, 400, seed=seed), prompts(690, 540, 410, 900, seed=seed + 1)
            computed = ask(llm, asked)
            assert computed.engine[HITS] == 0
            between = ask(llm, others)
            loaded = ask(llm, asked)
            assert loaded.engine[HITS] >= 3 * 384
            assert ask(llm, others).tokens == between.tokens
            assert loaded.tokens == computed.tokens
            check_counts(loaded, full=False)
            stock = ask(switched(llm, None), asked)
            assert stock.stats.sparse_steps == 0
            assert stock.tokens != loaded.tokens, "64 rows tell no other tokens, so that nothing was tried"


def test_prefixes_that_requests_share_are_read_as_they_are_with_a_connector(tmp_path: Path) -> None:
    """Cached prefixes come with rows too; what is loaded lies behind rows that are cached."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "rows")},
    }
    few = {**SPARSE, "budget": 64}
    shared, other = prompts(640, seed=3)[0], prompts(260, seed=4)[0]
    asked = [shared + other[:60], shared + other[60:200], shared[:384] + other]
    model = llama(tmp_path / "model")
    with engine(model, few, max_num_batched_tokens=4096) as llm:
        expected = ask(llm, asked)
    with engine(model, few, max_num_batched_tokens=4096, kv_transfer_config=connector) as llm:
        for _ in range(2):
            assert ask(llm, asked).tokens == expected.tokens
