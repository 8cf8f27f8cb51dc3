"""What a person with a GPU runs, at small sizes on the CPU: `benchmarks.vllm_gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow  # three engines


def test_the_script_for_gpus_runs_all_of_its_ways(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.vllm_gpu", "--rehearse", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads((tmp_path / "vllm-gpu-rehearsal.json").read_text())
    ways = record["ways"]
    for way, ran in ways.items():
        assert "said" not in ran, (way, ran)
        assert [(one["context"], one["batch"]) for one in ran["measured"]] == [(300, 1), (300, 2), (600, 1), (600, 2)]
        assert all((one["sparse_steps"] == 0) == (way == "stock") for one in ran["measured"])
    assert all(one["tokens_equal"] == one["rows_share"] == 1 for one in ways["full budget"]["measured"])
    assert all(one["rows_share"] < 0.7 for one in ways["sparse"]["measured"])
