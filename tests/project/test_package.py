"""What is installed is what is in the repository, and nothing that git ignores."""

from __future__ import annotations

import subprocess

import pytest

from tests import ROOT

NEEDED = (
    "sparseattn/py.typed",
    "sparseattn/cli/bench.py",
    "sparseattn/data/reference/model.safetensors",
    "sparseattn/data/reference/config.json",
    "sparseattn/data/text/apache-2.0.txt",
    "sparseattn/data/gpus/h100.json",
    "sparseattn/data/models.json",
    "LICENSE",
    "README.md",
)


def test_every_file_of_the_package_is_tracked() -> None:
    """A pattern of .gitignore that hides a module hides it from clones and from the wheel too."""
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "sparseattn", "tests", "scripts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    hidden = [name for name in listed.stdout.splitlines() if "__pycache__" not in name]
    assert not hidden, f"git ignores {hidden}"
    for name in NEEDED:
        assert (ROOT / name).is_file(), name
