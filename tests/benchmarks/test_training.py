"""The benchmark of training: it runs at small sizes, and what it says of a trace's size is what a capture writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("faiss")

from benchmarks import training
from sparseattn.training import Recipe

SMALL = (
    "--tokens 300 --prompts 2 --heads 2 --group 2 --size 16 --clusters 8 --hidden 8 --batch 16 --queries 64 --gap 31 "
    "--near 16 --steps 30 --repeats 1 --counts 2 3 --pool 64 --device cpu --threads 1 --json"
)


def records(capsys: pytest.CaptureFixture[str], out: Path, *more: str) -> dict[str, dict]:
    training.main([*more, *SMALL.split(), "--folder", str(out), "--results", str(out / "results")])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one in printed:
        path = out / "results" / f"training-{one['question']}-cpu.json"
        assert json.loads(path.read_text()) == one
        assert one["versions"]["torch"]
        assert one["machine"]["cores"]
    assert [path.name for path in out.iterdir()] == ["results"]  # traces and artefacts are gone
    return {one["question"]: one for one in printed}


@pytest.mark.slow
def test_seconds_per_head_and_what_they_come_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = records(capsys, tmp_path, "time")["time"]
    stages = one["seconds_per_head"]
    assert set(stages) == {"kmeans", "targets", "classifier"}
    assert one["classifier_extrapolated"]
    assert (one["steps_measured"], one["recipe"]["steps"]) == (30, 2000)
    assert stages["classifier"]["processor"] == pytest.approx(
        2000 * one["seconds_per_step_and_head"]["processor"], rel=1e-2, abs=2e-3
    )
    total = sum(stage["wall"] for stage in stages.values())
    assert one["minutes_per_head"]["wall"] == pytest.approx(total / 60, abs=1e-5)
    assert one["model"]["hours"]["wall"] == pytest.approx(total * 31 * 8 / 3600, abs=1e-3)
    assert one["model"]["paper_gpu_hours"] == 103.3
    assert 0 < one["passed"] <= 1
    assert one["memory_mib"] > 50
    assert any("extrapolated from 30 steps" in line for line in training.lines("time", one))


def test_heads_together_and_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "TOGETHER", (1, 2))
    table = records(capsys, tmp_path, "heads")["heads"]["table"]
    assert [(one["sizes"], one["heads"]) for one in table] == [("small", 1), ("small", 2), ("paper", 1), ("paper", 2)]
    for one in table:
        together, apart = one["seconds_per_step_together"], one["seconds_per_step_apart"]
        assert min(together["wall"], apart["wall"]) > 0
        assert one["speed_up"] == pytest.approx(apart["wall"] / together["wall"], abs=0.02)
    assert len(training.lines("heads", {"table": table})) == 4


def test_steps_together_are_the_steps_apart() -> None:
    """Both ways do the same work: after two steps the weights of every head agree."""
    recipe = Recipe(clusters=8, hidden=8, batch=16)
    together, each = (
        training.fit_of(range(3), recipe, 16, "cpu"),
        [training.fit_of([head], recipe, 16, "cpu") for head in range(3)],
    )
    for fit in (together, *each):
        before = fit.model.w2.detach().clone()
        for _ in range(2):
            fit.advance()
        assert not torch.equal(fit.model.w2, before)
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(tensor, torch.cat([fit.model.state_dict()[name] for fit in each]))


@pytest.mark.slow
def test_memory_of_fresh_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = records(capsys, tmp_path, "memory")["memory"]
    assert [row["prompts"] for row in one["table"]] == [2, 3]
    assert all(row["memory_mib"] > 50 for row in one["table"])
    assert [line.partition(":")[0] for line in training.lines("memory", one)] == ["2 prompts", "3 prompts"]


def test_what_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        training.main(["speed", "--results", str(tmp_path)])
    assert "a question is one of time, heads, memory, got 'speed'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        training.main(["time", "--device", "meta", "--results", str(tmp_path)])
    assert "device meta holds shapes without numbers" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="between three reports, 30 steps or more, got 29"):
        training.measured([], tmp_path / "out.safetensors", Recipe(steps=29), "cpu")


@pytest.mark.parametrize("queries", [None, 300])
def test_a_trace_is_as_large_as_predicted(queries: int | None, tmp_path: Path) -> None:
    """Of a captured one and of a synthetic one, but for the header, positions and RoPE."""
    transformers = pytest.importorskip("transformers")
    from sparseattn.models.capture import capture

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = torch.randint(256, (1, 2000))
    path = tmp_path / "t.safetensors"
    model = transformers.LlamaForCausalLM(config).eval()
    capture(model, ids, path, layers=[1, 2], dtype=torch.bfloat16, queries=queries)
    predicted = training.trace_bytes(2, 2000, 2, 4, 16, queries)
    assert predicted == 2 * 2 * 16 * 2 * (2 * 2000 + 4 * (queries or 2000))
    extra = path.stat().st_size - predicted
    assert 8 * 2000 < extra < 8 * 2000 + 100_000
    shape = training.Shape(500, 2, 2, 16)
    (made,) = training.make_traces(tmp_path / "made", shape, 1)
    assert 8 * 500 < made.stat().st_size - shape.bytes() < 8 * 500 + 100_000
