"""Machines: by data sheet, by file, measured; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparseattn.cli.app import app
from sparseattn.core.step_cost import KINDS, Cost, Launch, Shape, dense_cost, step_cost
from sparseattn.cost_model import measure as measuring
from sparseattn.cost_model.machine import GPUS, Machine, MachineError, Speed
from sparseattn.cost_model.measure import Measuring, after_others, first_call, fitted, measure
from sparseattn.selectors.registry import make_selector

SHAPE = Shape(8, 8, 4, 128)


def made(**speeds: Speed) -> Machine:
    return Machine("mine", 1e10, {"bfloat16": speeds}, "cpu", False, "made up")


def cost(*launches: Launch) -> Cost:
    return Cost(launches, torch.bfloat16, 0, 0, 0)


def test_a_launch_takes_what_binds_it() -> None:
    machine = made(dense=Speed(1e-3, 1e12), sort=Speed(1e-4, None, 1e-8))
    assert machine.seconds(cost(Launch("dense", 1e8, 1e9))) == pytest.approx(1e-3 + 1e-2)  # bytes
    assert machine.seconds(cost(Launch("dense", 1e6, 1e11))) == pytest.approx(1e-3 + 1e-1)  # operations
    two = cost(Launch("sort", entries=1e5, count=3), Launch("dense"))
    assert machine.seconds(two) == pytest.approx(3e-4 + 1e-3 + 1e-3)


def test_gpus_are_predictions_bound_by_their_memory() -> None:
    full = dense_cost(SHAPE, 131_072)
    for machine in GPUS.values():
        assert machine.predicted
        assert machine.seconds(full) == pytest.approx(full.bytes / machine.bandwidth, rel=0.01)
        assert set(machine.speeds["bfloat16"]) == set(KINDS)
    h100, h200 = (GPUS[name].seconds(full) for name in ("h100", "h200"))
    assert h100 / h200 == pytest.approx(4.8 / 3.35, rel=0.01)


def test_no_gpu_runs_what_searches_on_the_host() -> None:
    walk = step_cost(make_selector("retrieval"), SHAPE, 8192, 256)
    with pytest.raises(MachineError, match="host memory"):
        Machine.load("h100").seconds(walk)


def test_a_profile_is_a_file(tmp_path: Path) -> None:
    machine = made(dense=Speed(1e-3, 1e12), sort=Speed(1e-4, None, 1e-8))
    machine.save(tmp_path / "mine.json")
    assert Machine.load(tmp_path / "mine.json") == machine
    record = json.loads((tmp_path / "mine.json").read_text())
    still = {"bfloat16": {"dense": {"launch": 1e-3, "flops": 0}}}
    for broken in (
        {},
        [],
        {**record, "bandwidth": -1},
        {**record, "speeds": still},
        {**record, "speeds": {"bfloat16": {"dense": {"fast": 1}}}},
    ):
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(MachineError, match="no profile of a machine"):
            Machine.load(tmp_path / "broken.json")


def test_what_a_machine_does_not_know_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    with pytest.raises(MachineError, match="run `sparseattn machine`"):
        Machine.load("cpu")
    with pytest.raises(MachineError, match=r"cpu, a100, b200, h100, .*got 'h10' \(did you mean 'h100'\?\)"):
        Machine.load("h10")
    with pytest.raises(MachineError, match="not for float32"):
        made().seconds(Cost((Launch("dense"),), torch.float32, 0, 0, 0))
    with pytest.raises(MachineError, match="no speed of 'dense'"):
        made().seconds(cost(Launch("dense")))


def test_speeds_are_found_again_from_times() -> None:
    true = {"dense": Speed(2e-4, 4e10), "attend": Speed(5e-4, 3e10, 3e-7), "sort": Speed(1e-4, None, 5e-10)}
    launches = [Launch("dense", flops=flops) for flops in (1e6, 1e8, 1e10)]
    launches += [Launch("attend", 0, flops, runs) for flops, runs in ((1e6, 1), (1e8, 64), (1e8, 8), (1e9, 512))]
    launches += [Launch("sort", entries=entries) for entries in (1e3, 1e5, 1e7)]
    machine = made(**true)
    seconds = [machine.launch_seconds(launch, torch.bfloat16) for launch in launches]
    found = fitted(launches, seconds)
    for kind, speed in true.items():
        assert found[kind].launch == pytest.approx(speed.launch, rel=1e-6)
        assert found[kind].flops == (None if speed.flops is None else pytest.approx(speed.flops, rel=1e-6))
        assert found[kind].entry == pytest.approx(speed.entry, rel=1e-6)
    # A kind that is faster at more work, by noise, costs its launch and nothing below 0.
    odd = fitted([Launch("sort", entries=entries) for entries in (1e3, 1e4)], [2e-4, 1e-4])["sort"]
    assert odd.launch > 0
    assert odd.entry == 0


def test_what_the_first_call_takes_counts_once() -> None:
    alone, first = [3e-4, 2e-4, 5e-4], 1e-4
    assert first_call(alone, sum(alone) - 2 * first) == pytest.approx(first)
    assert first_call(alone, 2 * sum(alone)) == 0  # by noise
    assert first_call(alone, 0) == min(alone)
    launches = [Launch(kind) for kind in ("sort", "dense", "bounds")]
    own = after_others(launches, [2e-4, 9e-4, 5e-5], first)
    assert own == pytest.approx([1e-4, 9e-4, 5e-6])


def test_a_measured_machine_knows_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "EVICTED", 1 << 10)  # times mean nothing here
    monkeypatch.setattr(measuring, "SWEPT", 1 << 20)
    monkeypatch.setattr(measuring, "last_cache", lambda device: 1 << 10)
    seen = []
    machine = measure([torch.bfloat16], Shape(1, 1, 2, 16), 1, lambda done, of: seen.append((done, of)))
    assert not machine.predicted
    assert set(machine.speeds["bfloat16"]) == set(KINDS)
    assert machine.seconds(step_cost(make_selector("quest"), Shape(1, 1, 2, 16), 4096, 256)) > 0
    assert seen[-1] == (3, 3)
    with pytest.raises(ValueError, match="no round has counted"):
        Measuring([torch.bfloat16], Shape(1, 1, 2, 16)).machine()


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["machine", *arguments])
    return done.output if done.exit_code == 0 else f"{done.exit_code}: {done.output}"


def test_the_command_predicts_and_says_so() -> None:
    steps = ["--selector", "quest", "--selector", "lowbit", "--context", "65536", "--batch", "4"]
    told = json.loads(run("h100", *steps, "--json"))
    assert told["predicted"] is True
    assert "Datasheet" in told["source"]
    seconds = {step["selector"]: step["seconds"] for step in told["steps"]}
    assert seconds["quest"] < seconds["lowbit"] < seconds["dense"]
    assert "Predicted" in run("h100", *steps)
    assert "from its data sheet, not measured" in run("a100")
    assert json.loads(run("h200", "--json"))["predicted"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["b100"], "a machine is one of"),
        (["--shape", "8,4"], "three numbers"),
        (["h100", "--dtype", "int8"], "'int8' is not one of 'float32'"),
        (["--selector", "quest"], "--selector needs the name of a machine"),
        (["--batch", "8"], "--batch needs --selector or --model"),
        (["h100", "--context", "9x"], "--context needs --selector or --model"),
        (["--dtype", "float32"], "--dtype needs the name of a machine"),
        (["h100", "--selector", "quest", "--context", "128m"], "--context takes a number of tokens such as"),
        (["h100", "--out", "x.json"], "--out needs --model, or no machine name"),
        (["h100", "--selector", "quest", "--budget", "mass:0.9"], "--budget mass:0.9 takes what it needs: give rows,"),
        (["h100", "--selector", "quest", "--budget", "8"], "less than one span"),
        (["h100", "--selector", "retrieval"], "host memory"),
        (["h100", "--model", "llama-3.1-8b", "--context", "0"], "--context must be 1 or more"),
        (["h100", "--shape", "8,4,64"], "--shape needs --selector, or no machine name"),
        (["h100", "--model", "llama-3.1-8b", "--ranks", "8", "--selector", "qeust"], "no selector is called 'qeust'"),
        (["--out", "."], "--out must be a file, and . is a folder"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments: list[str], said: str) -> None:
    out = " ".join(run(*arguments).split())
    assert out.startswith("2: ")
    assert said in out
