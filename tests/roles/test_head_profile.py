"""DuoAttention's roles from heads measured on traces, and from the authors' files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparseattn import evaluate
from sparseattn.cli.app import app
from sparseattn.roles.papers import duo, published_gates
from sparseattn.selectors.parameters.head_profile import HeadProfile, ProfileError
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import TrainingError
from sparseattn.training.head_errors import head_errors

H, G, TOKENS = 3, 2, 400


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose head 1 of layer 0 looks at itself and the newest rows alone."""
    made = synthetic(TOKENS, layers=2, heads=H, group=G, size=32, gap=0.26)
    first = made.layer(0)
    keys, query = first.keys.clone(), first.query.clone()
    keys[1] = torch.nn.functional.one_hot(torch.arange(TOKENS) // 8 % 32, 32).to(keys)
    keys[1, : TOKENS - 150] = 0
    query[1] = 200 * keys[1, -query.shape[2] :]
    layers = [replace(first, keys=keys, query=query), made.layer(1)]
    place = tmp_path_factory.mktemp("heads") / "trace.safetensors"
    Trace.build(layers, made.positions, {"model": "made", "model_layers": 2}).save(place)
    return place


def test_errors_are_those_of_outputs_and_gates_the_least_of_the_objective(file: Path, tmp_path: Path) -> None:
    """mit-han-lab/duo-attention, duo_attn/patch/llama.py:97-106: a gate mixes both outputs; train.py:146-165: squared
    error, and `reg_weight` times the gates."""
    out = tmp_path / "heads.safetensors"
    profile = head_errors([file], out, queries=7, sink=2, window=40)
    trace = Trace.open(file)
    for index, errors in profile.layers.items():
        layer = trace.layer(index)
        asked = torch.linspace(max(TOKENS - layer.query.shape[2], 42), TOKENS - 1, 7).round().long().tolist()
        changed, whole = torch.zeros(H, dtype=torch.float64), 0.0
        for h in range(H):
            for g in range(G):
                for t in asked:
                    query = layer.query[h, g, t - TOKENS].double()
                    near = [n for n in range(t + 1) if n < 2 or n > t - 40]
                    outs = []
                    for rows in (list(range(t + 1)), near):
                        weights = (layer.keys[h, rows].double() @ query * layer.scale).softmax(0)
                        outs.append(weights @ layer.values[h, rows].double())
                    changed[h] += (outs[0] - outs[1]).square().sum()
                    whole += float(outs[0].square().sum()) / H
        torch.testing.assert_close(errors.double(), changed / whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(HeadProfile.load(out).layers[1], profile.layers[1])
    assert profile.layers[0].argmin() == 1, "the head that looks at its newest rows"
    grid = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    for index, gates in profile.gates(0.3).items():
        for error, gate in zip(profile.layers[index].double().tolist(), gates, strict=True):
            assert gate == pytest.approx(float(grid[((1 - grid) ** 2 * error + 0.3 * grid).argmin()]), abs=1e-4)


def test_the_heads_that_change_least_stream(file: Path, tmp_path: Path) -> None:
    profile = head_errors([file], tmp_path / "heads.safetensors", queries=7, sink=2, window=40)
    roles = duo(profile.gates(1e-3), profile.threshold(1 / 6, 1e-3))
    assert [role.method for role in roles.layers[0]] == ["dense", "window", "dense"]
    assert [role.method for role in roles.layers[1]] == ["dense"] * 3
    assert profile.threshold(0.0) < 0
    assert evaluate(Trace.open(file), roles, 16, sink=2, window=40, last=2).mean("relative_error") < 0.05


def test_the_command_writes_the_file_and_says_the_gates(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    line = ["calibrate", str(file), "--method", "duo", "--out", str(out), "--sink", "2", "--window", "40"]
    done = CliRunner().invoke(app, [*line, "--json"])
    assert done.exit_code == 0, done.output
    gates = HeadProfile.load(out).gates()
    assert json.loads(done.output)["gates"]["0"] == pytest.approx(gates[0], abs=1e-4)
    assert "layer 1: " in CliRunner().invoke(app, line).output
    shown = json.loads(CliRunner().invoke(app, ["info", str(out), "--json"]).output)
    assert (shown["kind"], list(shown["gates"])) == ("profile of heads", ["0", "1"])
    for wrong, sentence in (
        (["--before-rope"], "duo takes keys and queries after RoPE"),
        (["--last", "3"], "and duo the first two"),
        (["--device", "cpu"], "works on the CPU"),
    ):
        refused = CliRunner().invoke(app, [*line, *wrong])
        assert refused.exit_code != 0
        assert sentence in " ".join(refused.output.split())


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="none of them sees more than a sink of 4 rows and a window of 500"):
        head_errors([file], tmp_path / "heads.safetensors", window=500)
    with pytest.raises(TrainingError, match=r"a \.safetensors file in an existing folder"):
        head_errors([file], tmp_path / "heads.txt")
    with pytest.raises(ProfileError, match="finite and 0 or more"):
        HeadProfile({0: torch.tensor([-1.0])})
    with pytest.raises(ProfileError):
        HeadProfile.load(file)
    with pytest.raises(ValueError, match="0 to 1, got 2"):
        HeadProfile({0: torch.ones(2)}).threshold(2)


def test_the_authors_files_are_read(tmp_path: Path) -> None:
    """duo_attn/utils.py: `np.savetxt` with tabs, cut to 0 to 1 where it is read."""
    place = tmp_path / "full_attention_heads.tsv"
    place.write_text("1.2e+00\t0.0\n5.0e-01\t-1.0e-02\n")
    torch.testing.assert_close(published_gates(place), torch.tensor([[1.0, 0.0], [0.5, 0.0]]))
    place.write_text("a\tb\n")
    with pytest.raises(ValueError, match="no table of gates"):
        published_gates(place)
