"""vLLM's CUDA backend without a GPU: its engine runs on it under Triton's interpreter, see `cuda_engine.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs vllm and triton", allow_module_level=True)


pytestmark = pytest.mark.slow  # an engine under Triton's interpreter takes a minute


@pytest.fixture(scope="module")
def run(once: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, Any]:
    """What the script says: as it runs on vLLM's own CPU attention, on our backend, and on it with a plan."""

    def make(folder: Path) -> None:
        root = HERE.parent.parent
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        for how in ("stock", "interpreted", "planned"):
            command = [sys.executable, str(HERE / "cuda_engine.py"), str(folder / "model"), how]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            (folder / f"{how}.json").write_text(done.stdout.splitlines()[-1])
            (folder / f"{how}.log").write_text(done.stdout + done.stderr)

    folder = once("vllm-cuda", make)
    said = {how: json.loads((folder / f"{how}.json").read_text()) for how in ("stock", "interpreted", "planned")}
    logs = {how: (folder / f"{how}.log").read_text() for how in ("interpreted", "planned")}
    return {
        **said["interpreted"],
        "stock": said["stock"]["tokens"],
        "log": logs["interpreted"],
        "planned": {**said["planned"], "log": logs["planned"]},
    }


def test_full_budget_is_dense_attention(run: dict[str, Any]) -> None:
    """In every request of every step, those in a batch with prompts too; and the engine says what stock vLLM says."""
    full = run["full"]
    assert full["worst"] < 1e-5
    assert full["sparse"] > 10
    assert full["dense"] > 5
    assert full["mixed"] > 2
    assert full["left_out"] == 0
    assert full["tokens"] == run["stock"]


def test_small_budget_reads_what_quest_in_a_cache_reads(run: dict[str, Any]) -> None:
    """Pages of blocks that were filled before as well: vLLM's prefix cache holds the prompts of the first phase."""
    small = run["small"]
    assert small["worst"] < 1e-5
    assert small["left_out"] > 10
    assert small["rows_attended"] < run["full"]["rows_attended"]


def test_layers_of_a_plan_read_what_quest_in_a_cache_reads_at_their_own_budgets(run: dict[str, Any]) -> None:
    planned = run["planned"]
    assert planned["worst"] < 1e-5
    assert planned["left_out"] > 20
    assert planned["counts"]["sparse_steps"] == planned["sparse"]
    assert planned["counts"]["rows_read"] == planned["rows_attended"]
    assert "2 of 2 layers decode by a plan of 2 layers" in planned["log"]


def test_a_recorded_step_serves_later_ones(run: dict[str, Any]) -> None:
    """As a CUDA graph does: by the tensors of the step that was recorded, short requests among the long."""
    fixed = run["fixed"]
    assert fixed["worst"] < 1e-5
    assert fixed["fixed"] > 5
    assert fixed["short_in_fixed"] > 0
    assert fixed["tokens"] == run["small"]["tokens"]
    assert run["graphs"] == "UNIFORM_SINGLE_TOKEN_DECODE"


@pytest.mark.parametrize("phase", ["full", "small", "fixed"])
def test_counts_are_of_what_was_seen(run: dict[str, Any], phase: str) -> None:
    """Of the one sparse layer, by the host alone."""
    seen, counts = run[phase], run[phase]["counts"]
    assert counts["sparse_steps"] == seen["sparse"]
    assert counts["rows_read"] == seen["rows_attended"]
    assert counts["rows_held"] >= counts["rows_read"]
    assert counts["entries_made"] > 0


def test_first_layers_stay_dense_and_the_log_says_what_was_not_tried(run: dict[str, Any]) -> None:
    assert run["sparse_layers"] == [False, True]
    assert "experimental: not run on a GPU" in run["log"]
    assert "the index takes" in run["log"]
    assert "1 of 2 layers decode by quest:page=16, budget 4096" in run["log"]
    assert "a layer is dense where it is one of the first of full attention" in run["log"]


def test_what_cannot_be_sparse_says_why(run: dict[str, Any]) -> None:
    said = run["refusals"]
    assert said.pop("layer") is None
    for name, words in {
        "sliding_window": "a sliding window",
        "logits_soft_cap": "caps its logits",
        "alibi_slopes": "ALiBi",
        "sinks": "attention sinks of its own",
        "kv_sharing_target_layer_name": "shares another layer's keys",
        "attn_type": "no decoder's self-attention",
        "chunk_lookback": "in chunks",
        "head_size": "more than 256 channels",
        "dtype": "of torch.float16 in a model of torch.float32",
        "non_causal": "not of full causal attention",
        "unconfigured": "needs its settings: --additional-config",
        "dbo": "without --enable-dbo",
        "block": "has entries of 64 rows and this engine blocks of 32; start vLLM with a --block-size",
    }.items():
        assert words in said.pop(name)
    assert not said
