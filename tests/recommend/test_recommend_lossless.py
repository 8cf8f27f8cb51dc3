"""`sparseattn recommend --lossless`: the fastest way to draft, by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseattn.models.drafts.blocks import TimedTokens
from sparseattn.models.drafts.stats import LosslessStats
from sparseattn.recommend.lossless import DraftChoice, _choice, chosen
from tests.command import run

LINE = "recommend --lossless --model reference --text alice --length 192 --last 4 --windows 2 --selector window"
PLAIN = DraftChoice("", None, 0, 20.0, 1.0, None)


@pytest.mark.parametrize(("gain", "drafts"), [(1.04, 0), (1.06, 4)])
def test_drafts_must_be_worth_it(gain: float, drafts: int) -> None:
    fast = DraftChoice("quest", 64, 4, 20 * gain, gain, 0.9)
    assert chosen([fast, PLAIN]).drafts == drafts


def test_a_rate_is_all_tokens_over_all_seconds() -> None:
    def block(tokens: int, seconds: float, drafted: int = 0) -> TimedTokens:
        return TimedTokens(seconds, tokens, LosslessStats(drafted=drafted, accepted=tokens - 1 if drafted else 0))

    choice = _choice("quest", 64, 8, True, [(block(9, 1.0, 8), block(8, 1.0)), (block(1, 1.0, 8), block(8, 1.0))])
    assert (choice.tokens_a_second, choice.to_plain, choice.acceptance) == (5.0, 0.625, 0.5)
    assert choice.record()["choose_once"]


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


def test_two_drafts_of_a_method_that_chooses_are_also_tried_with_one_choice(tmp_path: Path) -> None:
    result = run(
        LINE,
        "--selector",
        "quest",
        "--selector",
        "pillar",
        "--drafts",
        "1,2",
        "--budget",
        "16",
        "--out",
        tmp_path,
        "--json",
    )
    assert result.exit_code == 0, result.output
    choices = json.loads((tmp_path / "lossless.json").read_text())["choices"]
    ways = sorted((choice["selector"], choice["drafts"], choice["choose_once"]) for choice in choices)
    quest = [("quest", 1, False), ("quest", 2, False), ("quest", 2, True)]
    others = [(name, drafts, False) for name in ("pillar", "window") for drafts in (1, 2)]
    assert ways == sorted([("", 0, False), *quest, *others])


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
