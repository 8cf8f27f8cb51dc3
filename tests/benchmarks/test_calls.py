"""`benchmarks.calls` counts what a step crosses; no change makes a step cross more than is recorded here."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("numba")
pytest.importorskip("transformers")

from benchmarks import calls
from sparseattn import KVCache

# Step -> calls, files and moves at most, with Quest, where comprehensions are calls of their own (before Python 3.12).
MOST = {"decode": (12, 7, 8), "model": (64, 21, 40)}


@pytest.mark.skipif(sys.platform != "linux", reason="the recorded numbers are of Linux")
def test_a_step_crosses_no_more_than_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(KVCache.__init__.__kwdefaults__, "check", False)  # tests check every selection
    calls.main(["--layers", "1", "--steps", "1", "--json"])
    record = json.loads(capsys.readouterr().out)
    counted = {name: tuple(record[name][part] for part in ("calls", "files", "moves")) for name in MOST}
    assert all(count <= most for name in MOST for count, most in zip(counted[name], MOST[name], strict=True)), counted
    assert record["settings"] == {"selector": "quest", "layers": 1, "threads": record["settings"]["threads"]}


def test_the_table_has_a_row_for_each_step_and_the_calls_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    step = calls.decode_step("recent")
    step()  # which seals
    once, twice = calls.calls_of(step), calls.calls_of(step)
    assert once == twice, "a count does not depend on the machine"
    assert sum(once.files.values()) == once.calls > once.moves > 0
    calls.main(["--selector", "recent", "--layers", "1", "--steps", "1", "--files"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["step", "decode", "model"]
    assert any(line.split()[1] == "cache/decode.py" for line in lines[2:])
