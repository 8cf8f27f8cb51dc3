"""`python -m benchmarks.compiling`: how long the first step waits for numba."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba")
from benchmarks import compiling


def test_what_is_recorded_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the processes: those of a selector compile for a minute."""
    runs = {"ours": iter([2.0, 4.0, 3.0]), "numba": iter([9.0, 6.0, 5.0])}
    monkeypatch.setattr(compiling, "measured", lambda spec, way: {"seconds": next(runs[way]), "out": "1f"})
    compiling.main(["--selector", "quest", "--results", str(tmp_path), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "compiling-cpu.json").read_text())
    [one] = record["results"]
    assert (one["seconds"], one["share"]) == ({"ours": 3.0, "numba": 6.0}, 0.5)
    assert one["runs"] == {"ours": [2.0, 4.0, 3.0], "numba": [9.0, 6.0, 5.0]}
    outs = iter(["1f", "2e"])
    monkeypatch.setattr(compiling, "measured", lambda spec, way: {"seconds": 1.0, "out": next(outs)})
    with pytest.raises(RuntimeError, match="quest: the two ways to compile give different steps"):
        compiling.main(["--selector", "quest", "--rounds", "1"])
    for wrong, said in ((["--selector", "qest"], "quest"), (["--rounds", "0"], "--rounds is 1 or more, got 0")):
        with pytest.raises(SystemExit):
            compiling.main(wrong)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_both_ways_give_one_step() -> None:
    """`window` compiles attention alone."""
    found = {way: [compiling.measured("window", way)] for way in compiling.WAYS}
    one = compiling.line("window", found)
    assert min(one["seconds"].values()) > 0
