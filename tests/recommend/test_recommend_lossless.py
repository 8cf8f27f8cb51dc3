"""`sparseattn recommend --lossless`: the fastest way to draft, by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseattn.recommend.lossless import DraftChoice, chosen
from tests.command import run

LINE = "recommend --lossless --model reference --text alice --length 192 --last 4 --windows 2 --selector window"
PLAIN = DraftChoice("", None, 0, 20.0, 1.0, None)


@pytest.mark.parametrize(("gain", "drafts"), [(1.04, 0), (1.06, 4)])
def test_drafts_must_be_worth_it(gain: float, drafts: int) -> None:
    fast = DraftChoice("quest", 64, 4, 20 * gain, gain, 0.9)
    assert chosen([fast, PLAIN]).drafts == drafts


def test_it_measures_each_way_and_says_which_is_fastest(tmp_path: Path) -> None:
    result = run(LINE, "--drafts", "1,3", "--budget", "16,32", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "lossless.json").read_text())
    ways = [(choice["selector"], choice["budget"], choice["drafts"]) for choice in record["choices"]]
    assert sorted(ways) == [("", None, 0), *[("window", budget, k) for budget in ("16", "32") for k in (1, 3)]]
    gains = [choice["to_plain"] for choice in record["choices"]]
    assert gains == sorted(gains, reverse=True)
    assert record["chosen"] in record["choices"]
    assert all(0 <= choice["acceptance"] <= 1 for choice in record["choices"] if choice["drafts"])
    named = "Fastest: generate_lossless" if record["chosen"]["drafts"] else "leave drafts out (draft=0)"
    assert named in result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--drafts 0", "--drafts takes numbers from 1 to 16"),
        ("--drafts 17", "--drafts takes numbers from 1 to 16"),
        ("--for vllm", "--lossless is for generate_lossless with transformers"),
    ],
)
def test_what_cannot_be_is_refused(words: str, sentence: str, tmp_path: Path) -> None:
    result = run(LINE, *words.split(), "--out", tmp_path)
    assert result.exit_code != 0
    assert sentence in " ".join(result.output.split())
