"""`sparseattn train` with a calibration's method is `sparseattn calibrate`: same options, files, words and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sparseattn.cli import calibrate_options
from sparseattn.cli.app import app, load
from sparseattn.traces.synthetic import synthetic

TIME = re.compile(rb'\d{4}-\d\d-\d\dT[\d:.+]+|"sha256": "\w{64}"')  # of writing, and the hash of what says it
MORE = {  # of --method: options beside it
    "loki": ["--before-rope", "--layers", "1"],
    "doublesparsity": ["--device", "cpu"],
    "kascade": ["--queries", "5"],
    "duo": ["--sink", "2", "--window", "40"],
    "mass": ["--selector", "quest:page=8", "--layers", "0", "--last", "2", "--window", "40"],
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.safetensors"
    synthetic(400, layers=2, heads=2, group=2, size=16, rope=True).save(path)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_every_calibration_is_tried() -> None:
    assert tuple(MORE) == calibrate_options.METHODS


@pytest.mark.parametrize("method", MORE)
def test_both_commands_write_one_file_and_say_the_same(method: str, trace: Path, tmp_path: Path) -> None:
    out, made = tmp_path / "out.safetensors", []
    for command in ("calibrate", "train"):
        done = run(command, trace, "--method", method, *MORE[method], "--out", out, "--json")
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        made.append((TIME.sub(b"", out.read_bytes()), {k: said[k] for k in said if k not in ("seconds", "created")}))
        assert [path.name for path in tmp_path.iterdir()] == [out.name]
        out.unlink()
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("loki", "--selector quest", "--method mass needs --selector"),
        ("loki", "--queries 3", "only --method kascade and duo take --queries"),
        ("doublesparsity", "--sink 1", "only --method mass takes --sink"),
        ("doublesparsity", "--before-rope", "takes keys and queries after RoPE"),
        ("kascade", "--before-rope", "kascade takes keys and queries after RoPE"),
        ("duo", "--device cpu", "--method duo takes no --device"),
        ("mass", "", "--method mass needs --selector"),
    ],
)
def test_both_commands_refuse_the_same(method: str, given: str, sentence: str, trace: Path, tmp_path: Path) -> None:
    line = [trace, "--method", method, *given.split(), "--out", tmp_path / "out.safetensors"]
    one, two = run("calibrate", *line), run("train", *line)
    assert one.exit_code == two.exit_code == 2
    assert one.stderr == two.stderr
    assert sentence in " ".join(one.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--method loki --seed 3", "--seed needs --method saap or querypq or"),
        ("--method kascade --steps 9", "--steps needs --method saap or hata"),
        ("--method hata --before-rope", "--before-rope needs --method loki, got --method hata"),
        ("--method hata --sink 1", "--sink needs --method saap or duo or mass, got --method hata"),
        ("--selector quest", "--selector needs --method mass, got --method saap"),
    ],
)
def test_what_is_trained_and_what_is_calibrated_have_options_of_their_own(
    given: str, sentence: str, trace: Path, tmp_path: Path
) -> None:
    done = run("train", trace, *given.split(), "--out", tmp_path / "out.safetensors")
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


def test_each_help_names_the_other_command_and_train_has_every_option() -> None:
    train, calibrate = (" ".join(run(name, "--help").output.split()) for name in ("train", "calibrate"))
    assert "`sparseattn calibrate` is another name of this command" in train
    assert "another name of `sparseattn train`" in calibrate
    assert all(f" {method}: " in train for method in calibrate_options.METHODS)
    assert {one.name for one in load("calibrate").params} <= {one.name for one in load("train").params}
