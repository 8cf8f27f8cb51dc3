"""The benchmark of lossless generation, at sizes at which it means nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.lossless import Turn, main


def test_a_round_is_its_median_seconds_over_its_mean_tokens() -> None:
    """A block of one round that gave 9 tokens, and one of five rounds that gave 2 each: 19 tokens in 6 rounds."""
    turn = Turn("quest, 8", "quest", 8, [1 / 9, 5 / 10], drafted=48, accepted=13)
    turn.draft_seconds, turn.verify_seconds = [0.05, 0.05], [0.6, 0.6]
    assert turn.seconds_a_token == pytest.approx(6 * 1.0 / 19)
    plain = Turn("in place", "quest", 0, [0.3, 0.2], verify_seconds=[0.2, 0.1])
    assert plain.seconds_a_token == pytest.approx(0.15)


def test_all_ways_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseattn.models.drafts.length.LEAST_SHARE", 1.0)
    sizes = "--tokens 128 --budget 16 --draft 2 --rounds 2 --block 3 --dense-steps 2 --auto 4 --auto-block 2"
    ways = "--model reference --selector window --dense static --dtype float32"
    main([*sizes.split(), *ways.split(), "--results", str(tmp_path), "--json"])
    record = json.loads((tmp_path / "lossless-reference-128-alice.json").read_text())
    assert [way["way"] for way in record["ways"]] == ["static", "in place", "window, 2"]
    static, plain, drafted = record["ways"]
    assert static["to_transformers"] == plain["to_in_place"] == 1.0
    assert 0 <= drafted["acceptance"] <= 1
    assert min(drafted["draft_seconds"], drafted["verify_seconds"]) > 0
    (auto,) = record["auto"]
    assert auto["rounds"] == {"0": 4}
    assert "attention takes" in auto["reason"]


@pytest.mark.parametrize(("given", "sentence"), [("--dense flash", "--dense is of sdpa"), ("--rounds 0", "1 or more")])
def test_bad_options_are_refused(given: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(given.split())
    assert sentence in capsys.readouterr().err
