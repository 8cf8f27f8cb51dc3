"""`python -m benchmarks.looseness`: how far page scores are from the pages' true mass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import looseness
from sparseattn.traces.synthetic import synthetic


def test_the_oracle_is_exact_and_a_bound_above(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.safetensors"
    synthetic(400, heads=2, group=2, size=16, clusters=8).save(path)
    asked = ("pagemass", "quest", "mean", "clse:rank=15", "lowbit:page=16")
    ways = [part for spec in asked for part in ("--selector", spec)]
    looseness.main([str(path), *ways, "--last", "4", "--window", "20", "--results", str(tmp_path), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "looseness.json").read_text())
    lines = {one["selector"]: one for one in said["lines"]}
    assert [len(one["rank"]) for one in said["lines"]] == [4] * len(said["lines"])
    assert lines["pagemass"]["offset"] == pytest.approx([0] * 4, abs=1e-4)
    assert lines["pagemass"]["rank"] == pytest.approx([1] * 4)
    assert lines["clse:rank=15"]["offset"] == pytest.approx([0] * 4, abs=0.05)
    assert min(lines["lowbit:page=16"]["rank"]) > 0.75
    assert max(lines["mean"]["offset"]) < 0 < min(lines["quest"]["offset"])
    with pytest.raises(SystemExit):
        looseness.main([str(path), "--selector", "exact"])
    assert "'exact' does not score whole pages" in capsys.readouterr().err
