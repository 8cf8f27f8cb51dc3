"""The console command as a whole: its commands are imported when they are called, its help, its usage errors."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import sparseattn
from sparseattn.cli import calibrate_options, machine_options, options, report_options
from sparseattn.cli.app import COMMANDS, GROUPS, load
from sparseattn.cli.app import app as console
from sparseattn.cost_model.machine import GPUS
from sparseattn.models.load import NAMED
from sparseattn.reporting.html.kinds import KINDS
from sparseattn.selectors.parameters import channel_calibration
from sparseattn.selectors.registry import SELECTORS
from sparseattn.utils.tensors import STORED


def run(*arguments: str) -> Result:
    return CliRunner().invoke(console, list(arguments))


def test_help_imports_no_torch() -> None:
    """The one of all commands imports none of them, and a command's own its options alone."""
    code = """
import sys
from typer.testing import CliRunner
from sparseattn.cli.app import COMMANDS, app
HEAVY = {"torch", "numpy", "transformers", "numba", "matplotlib"}
for arguments in ([], *([name] for name in COMMANDS)):
    done = CliRunner().invoke(app, [*arguments, "--help"])
    assert done.exit_code == 0, done.output
    assert arguments or all(name in done.output for name in COMMANDS)
    cli = {name[15:] for name in sys.modules if name.startswith("sparseattn.cli.")}
    assert arguments or not cli - {"app", "help_groups"}
    assert not HEAVY & set(sys.modules), (arguments, HEAVY & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_command_goes_on_where_standard_error_can_be_written_no_more() -> None:
    code = "from sparseattn.cli.command import say; say('one'); say('two'); print('result')"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "result\n"


def test_every_command_is_a_module_with_options_and_every_such_module_a_command() -> None:
    folder = Path(sparseattn.__file__).parent / "cli"
    files = {path.stem.removesuffix("_options") for path in folder.glob("*_options.py")}
    assert files == {name.replace("-", "_") for name in COMMANDS}
    for name in COMMANDS:
        assert load(name).name == name
        assert callable(importlib.import_module(f"sparseattn.cli.{name.replace('-', '_')}").run)


def test_names_in_help_are_those_that_there_are() -> None:
    """Where a name's own table needs torch, options have a list of their own."""
    assert tuple(channel_calibration.METHODS) == calibrate_options.CHANNELS
    assert set(report_options.FILES) == set(KINDS)
    assert [one.value for one in options.Dtype] == list(STORED)
    assert tuple(GPUS) == machine_options.GPUS
    assert {name for name in NAMED if name in options.MODEL_HELP} == set(NAMED)


def test_no_text_of_a_command_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty path would be the current folder, an empty name what is there by default."""
    monkeypatch.chdir(tmp_path)
    tried = set()
    for name in COMMANDS:
        for parameter in load(name).params:
            if parameter.param_type_name == "argument" or not parameter.is_flag:
                option = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
                done = run(name, *option, "")
                assert done.exit_code == 2, (name, option, done.output)
                tried |= {(name, *option)} if "it must not be empty, got ''" in done.stderr else set()
    assert {("bench",), ("report",), ("info",), ("bench", "--out"), ("eval", "--task"), ("bench", "--device")} <= tried
    assert not list(tmp_path.iterdir())


def test_a_command_whose_package_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> object:
        return exec("import no_such_package") if name == "sparseattn.cli.models_options" else real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    done = run("models")
    assert done.exit_code == 2
    assert done.stderr.strip() == (
        "sparseattn: `sparseattn models` needs the package no_such_package, which is not installed"
    )
    assert run("nothing").exit_code == 2


def test_help_is_in_groups_and_names_no_methods() -> None:
    """Methods are in `info`; a command names at most those that it takes by default."""
    said = run("--help").output
    assert re.findall(r"^(\w.*):$", said, re.M) == ["Options", *GROUPS]
    for name in COMMANDS:
        words = set(re.findall(r"\w+", run(name, "--help").output))
        assert len(words & set(SELECTORS)) < len(SELECTORS) / 3, name


@pytest.mark.parametrize("name", ["bench", "eval", "recommend", "serve", "train"])
def test_each_option_of_a_long_help_is_in_one_group(name: str) -> None:
    groups = importlib.import_module(f"sparseattn.cli.{name}_options").GROUPS
    options = [one.name for one in load(name).params if one.param_type_name == "option" and one.name != "help"]
    assert sorted(option for group in groups.values() for option in group) == sorted(options)
    titles = re.findall(r"^(\w.*):$", run(name, "--help").output, re.M)
    assert [title for title in titles if title != "Arguments"] == [*groups, "Options"]


def test_defaults_in_help_are_as_one_types_them() -> None:
    said = " ".join(run("recommend", "--help").output.split())
    assert "tailed:inner=[lowbit:bits=1,scales=8],rows=64" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bnch"], "no such command 'bnch'. Did you mean 'bench'? See `sparseattn --help`."),
        (["models", "--fech", "x"], "no such option: --fech"),
        (["models", "--fetch"], "option '--fetch' requires an argument."),
        (["capture"], "missing option '--model'. See `sparseattn capture --help`."),
        (["serve", "m", "--budget", "mass:0.95"], "--budget must be a whole number, got 'mass:0.95'. See `sparseattn"),
        (["doctor", "m", "--for", "vlm"], "invalid value for '--for': 'vlm' is not one of 'transformers', 'vllm'."),
        (["bench", "--far", "y"], "--far must be a number, got 'y'."),
    ],
)
def test_a_usage_error_is_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(console, arguments, prog_name="sparseattn")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sparseattn: {said}")


def test_ctrl_c_while_a_command_is_imported_is_one_line() -> None:
    code = (
        "import os, signal, sys; from sparseattn.cli import app; "
        "app.importlib.import_module = lambda *_, **more: os.kill(os.getpid(), signal.SIGINT); app.app(['models'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "sparseattn: interrupted\n")


def test_tables_fit_terminals_that_are_narrow_and_know_ascii_alone() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    command = [sys.executable, "-m", "sparseattn", "models"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "smollm2" in done.stdout
