"""`.ci/run` runs the slow tests too where files that they concern changed, or where nobody can tell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

RUN = ROOT / ".ci" / "run"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one kernel, one document and `.ci/run`; its `make` prints what it was asked for."""
    files = dict.fromkeys(
        ("sparseattn/attend.py", "sparseattn/kernels/attend/gpu.py", "docs/write/design.md", "README.md"), "1"
    )
    files["tests/selectors/test_laws.py"] = "by_case("
    for name, text in files.items():
        path = tmp_path / "clone" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "clone" / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / "clone" / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "made $*"\n')
    make.chmod(0o755)
    git(tmp_path / "clone", "init", "--quiet", "--initial-branch=main")
    commit(tmp_path / "clone", "docs/write/design.md")
    return tmp_path / "clone"


def git(clone: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=clone, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(clone: Path, name: str) -> str:
    (clone / name).write_text(f"{(clone / name).read_text()} and more")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", name)
    return git(clone, "rev-parse", "HEAD")


def made(clone: Path, **environment: str) -> str:
    """The target that `.ci/run` makes."""
    known = {name: value for name, value in os.environ.items() if name != "CI_BASE" and not name.startswith("GIT_")}
    known["PATH"] = f"{clone.parent / 'bin'}{os.pathsep}{known['PATH']}"
    done = subprocess.run([clone / ".ci" / "run"], env=known | environment, capture_output=True, text=True, check=True)
    *_, tests, served, documents = done.stdout.splitlines()
    oldest = int(git(clone, "rev-parse", "HEAD")[6], 16) % 2
    assert (served, documents) == (f"made vllm{' VERSION=0.27.1' * oldest}", "made docs")
    return tests.removeprefix("made ")


def test_slow_tests_run_where_the_last_landing_is_not_known(clone: Path) -> None:
    commit(clone, "docs/write/design.md")
    assert made(clone) == "test-all"
    assert made(clone, CI_BASE="no-such-commit") == "test-all", "a shallow clone does not hold it"


def test_slow_tests_run_where_what_they_concern_changed(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    commit(clone, "docs/write/design.md")
    assert made(clone, CI_BASE=base) == "test"
    for name in (
        "sparseattn/kernels/attend/gpu.py",
        "tests/selectors/test_laws.py",
        "sparseattn/attend.py",
        "README.md",
    ):
        commit(clone, name)
        commit(clone, "docs/write/design.md")  # the last commit of a landing may concern nothing slow
        assert made(clone, CI_BASE=base) == "test-all", name
        base = git(clone, "rev-parse", "HEAD")


def test_a_branch_is_compared_with_what_it_left(clone: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(clone), "other")
    other = tmp_path / "other"
    git(other, "switch", "--quiet", "--create", "mine")
    commit(other, "docs/write/design.md")
    assert made(other) == "test"
    commit(other, "sparseattn/kernels/attend/gpu.py")
    assert made(other) == "test-all"
