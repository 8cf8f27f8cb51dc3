"""What `deploy/` starts a server with: arguments that `sparseattn serve` takes, and files that their tools accept."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from sparseattn.cli.app import app

ROOT = Path(__file__).parent.parent.parent
UNIT = ROOT / "deploy" / "sparseattn.service"
WORDS = ("ENTRYPOINT", "CMD")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def started_by_unit() -> list[str]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return shlex.split(unit["Service"]["ExecStart"])


def started_by_image() -> list[str]:
    entry, arguments = (json.loads(re.findall(rf"^{word} (\[.*\])$", DOCKERFILE, re.M)[-1]) for word in WORDS)
    return [*entry, *arguments]


@pytest.mark.parametrize("command", [started_by_unit(), started_by_image()], ids=["systemd", "docker"])
def test_its_arguments_are_those_of_serve(command: list[str]) -> None:
    assert Path(command[0]).name == "sparseattn"
    assert command[1] == "serve"
    group = typer.main.get_command(app)
    serve = group.get_command(typer.Context(group), "serve")  # type: ignore[attr-defined]
    context = serve.make_context("serve", command[2:])
    assert context.params["model"] == "smollm2"


def test_what_the_image_copies_and_installs_is_there() -> None:
    rules = (ROOT / ".dockerignore").read_text().split("\n")
    for name in (rule[1:] for rule in rules if rule.startswith("!")):
        assert (ROOT / name).exists(), name
    extras = re.findall(r"sparseattn\[([\w,-]+)\]", DOCKERFILE)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(started_by_unit()[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
