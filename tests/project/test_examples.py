"""The examples run on the reference model, and what they print is what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests import ROOT
from tests.project.test_docs import _obeys_the_main_laws

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"compare.py", "generate.py", "own_selector.py"}


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The question has an answer: full attention and the selector give it, and a window does not."""
    lines = {}
    for selector in ("quest", "window"):
        run("generate.py", "--tokens", "1024", "--selector", selector, "--budget", "25%", monkeypatch=monkeypatch)
        lines[selector] = capsys.readouterr().out.splitlines()
    right, dense, quest, counts = lines["quest"]
    answer = re.findall(r"'(\d{5})'", right)[0]
    assert f"' {answer}" in dense
    assert f"' {answer}" in quest
    assert answer not in lines["window"][2]
    assert re.match(r"\d+ sparse attention calls, .* fed from 9\d\d$", counts)


def test_generate_continues_a_text_of_yours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("The licence says so, and so does the licence. " * 12)
    run(
        *("generate.py", "--text", str(text), "--selector", "quest:page=8", "--budget", "10%"),
        monkeypatch=monkeypatch,
    )
    dense, sparse, counts = capsys.readouterr().out.splitlines()
    new = sparse.partition(": ")[2].strip("'")
    assert len(new) == 8
    assert new in "The licence says so, and so does the licence. " * 2
    assert dense == f"dense: {new!r}"
    assert counts.startswith("28 sparse attention calls")


def test_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("compare.py", "--tokens", "700", "--last", "24", "--budget", "all", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("676 tokens prefilled, 24 decoded; loss of the dense model")
    differences = {line.split()[0]: float(re.findall(r"\(([+-][\d.]+)\)", line)[0]) for line in lines[1:]}
    assert list(differences) == ["lowbit", "quest", "exact:group=softmax", "window"]
    assert differences["lowbit"] == differences["quest"] == differences["exact:group=softmax"] == 0, (
        "a budget of all rows is the dense model"
    )
    assert differences["window"] != 0


def test_own_selector(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("own_selector.py", "--tokens", "600", "--new", "8", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        *("__main__:TopChannels:channels=32", "__main__:TopChannels:channels=8"),
        "quest",
    ]
    assert int(re.findall(r"first (\d+) of 8", lines[0])[0]) >= 6
    _obeys_the_main_laws(names["TopChannels"])
