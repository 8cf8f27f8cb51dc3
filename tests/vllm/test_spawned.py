"""Engines in processes of their own, one for each share of a layer, and with compiled models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import LAYERS, LENGTHS, SPARSE, TOKENS, Answer, ask, check_counts, decoded, engine, llama, prompts

from sparseattn.core.activity import Activity

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    """What stock vLLM answers in this process, uncompiled."""
    with engine(model, None) as llm:
        return ask(llm, prompts(*LENGTHS), TOKENS).tokens


def spawned(model: Path, sparse: dict[str, Any], given: dict[str, Any], **environment: str) -> Answer:
    path = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    command = [sys.executable, str(HERE / "spawned.py"), str(model), json.dumps(sparse), json.dumps(given)]
    around = {name: value for name, value in os.environ.items() if name != "SPARSEATTN_VLLM_COUNTS"}
    done = subprocess.run(command, env={**around, "PYTHONPATH": path, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return Answer(said["tokens"], [], Activity.from_dict(said["stats"]))


def test_layers_shared_by_two_processes(model: Path, expected: list[list[list[int]]]) -> None:
    """Each counts its own head, and `stats` of the process that started them adds them up."""
    found = spawned(model, SPARSE, {"tensor_parallel_size": 2}, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert found.tokens == expected
    check_counts(found, full=True)
    assert found.stats.sparse_steps == 2 * (LAYERS - 1) * decoded(LENGTHS, TOKENS)


@pytest.mark.slow
def test_a_compiled_model(model: Path, expected: list[list[list[int]]]) -> None:
    found = spawned(model, SPARSE, {"enforce_eager": False})
    assert found.tokens == expected
    check_counts(found, full=True)
    assert found.stats.sparse_steps == (LAYERS - 1) * decoded(LENGTHS, TOKENS)
    small = spawned(model, {**SPARSE, "budget": 64}, {"enforce_eager": False})
    assert small.tokens != expected
    check_counts(small, full=False)
