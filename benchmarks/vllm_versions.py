"""Whether the plug-in serves in one version of vLLM: stock's tokens at full budget, a sparse decode, and its tests.

``.venv-vllm-0.27.1/bin/python -m benchmarks.vllm_versions --out FILE`` from the repository root, in the environment
that ``make vllm VERSION=0.27.1`` makes. ``--tests FILE`` adds what pytest's ``--junitxml`` says of that version.
"""

from __future__ import annotations

import argparse
import os
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from sparseattn.cost_model.environment import machine, versions
from sparseattn.serving.vllm import installed
from sparseattn.utils import children
from sparseattn.utils.devices import features

PROMPTS = (600, 900, 1200)  # tokens
TOKENS = 32  # of an answer
SETTINGS: dict[str, Any] = {"selector": "quest:page=32", "sink": 4, "window": 64, "dense_layers": 2, "above": 500}
EVERY, FEW = 1 << 20, 256  # rows


def measure() -> dict[str, Any]:
    """The record, but for the tests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.update(children.environment({}))
    from vllm import LLM, SamplingParams

    from sparseattn.models.load import folder_of
    from sparseattn.serving.vllm import cpu, self_test
    from sparseattn.serving.vllm.counters import mismatches, stats
    from sparseattn.serving.vllm.settings import parse
    from sparseattn.traces.texts import read_named

    full, few = (parse({**SETTINGS, "budget": budget}) for budget in (EVERY, FEW))
    llm = LLM(
        model=str(folder_of("smollm2")),
        dtype="float32",
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 29,
        enforce_eager=True,
        enable_prefix_caching=False,
        additional_config={"sparseattn": full.to_dict()},
    )
    ids = llm.get_tokenizer().encode(read_named("workshop"))
    prompts = [{"prompt_token_ids": ids[at : at + count]} for at, count in enumerate(PROMPTS)]

    def answers(settings: Any) -> tuple[list[list[int]], Any]:
        cpu.switch(settings)
        before = stats()
        options = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        found = llm.generate(prompts, options, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found], stats() - before

    (stock, none), (whole, every), (sparse, some) = (answers(settings) for settings in (None, full, few))
    cpu.switch(few)
    (builder,) = cpu.BUILDERS
    start = time.perf_counter()
    self_test.check(builder)
    seconds = time.perf_counter() - start
    found = installed.distribution()
    assert found is not None
    tried = {
        "version": found[1],
        "stock_sparse_steps": none.sparse_steps,
        "full": {
            "answers_equal": sum(a == b for a, b in zip(stock, whole, strict=True)),
            "sparse_steps": every.sparse_steps,
            "share": every.share,
        },
        "sparse": {
            "answers_equal": sum(a == b for a, b in zip(stock, sparse, strict=True)),
            "sparse_steps": some.sparse_steps,
            "share": round(some.share, 4),
        },
        "self_test_seconds": round(seconds, 3),
        "mismatches": mismatches(),
        "tests": None,
    }
    return {
        "model": "smollm2",
        "dtype": "float32",
        "settings": {**SETTINGS, "budget": FEW},
        "prompts": list(PROMPTS),
        "tokens": TOKENS,
        "tried": [tried],
        "machine": machine(),
        "features": features(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def tests_of(path: Path) -> dict[str, int]:
    """What pytest's report says."""
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    every, failed, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    return {"passed": every - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="report of the tests that were run with this version")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record = measure()
    if options.tests is not None:
        record["tried"][0]["tests"] = tests_of(options.tests)
    records.save(record, options.out)
    print(record["tried"][0])


if __name__ == "__main__":
    main()
