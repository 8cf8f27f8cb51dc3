"""`sparseattn recommend --lossless`: the fastest way to draft, by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseattn.cli.recommend_lossless import _sentence
from sparseattn.core.budget import budget_label
from sparseattn.models.drafts.blocks import TimedTokens
from sparseattn.models.drafts.stats import LosslessStats
from sparseattn.recommend.defaults import BUDGETS
from sparseattn.recommend.lossless import DraftChoice, _choice, chosen
from tests.command import run

LINE = "recommend --lossless --model reference --text alice --length 192 --last 4 --windows 2 --selector window"
DEFAULTS = ",".join(map(budget_label, BUDGETS))
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
    assert sorted(ways) == [("", None, 0), *[("window", None, k) for k in (1, 3)]], "no budget changes it"
    gains = [choice["to_plain"] for choice in record["choices"]]
    assert gains == sorted(gains, reverse=True)
    assert record["chosen"] in record["choices"]
    assert all(0 <= choice["acceptance"] <= 1 for choice in record["choices"] if choice["drafts"])
    named = "Fastest: generate_lossless" if record["chosen"]["drafts"] else "leave drafts out (draft=0)"
    assert named in result.output
    assert [record[name] for name in ("sink", "window", "chunk")] == [4, 64, 2048]


def test_the_call_that_is_named_has_the_sink_and_window_that_were_timed() -> None:
    best = DraftChoice("quest", 32, 8, 20.0, 1.2, 0.9, choose_once=True)
    call = 'generate_lossless(model, ids, "quest", 32, draft=8, choose_once=True'
    assert f"{call})," in _sentence(best, 4, 64)
    assert f'{call}, settings={{"sink": 100}}),' in _sentence(best, 100, 64)
    assert f'{call}, settings={{"sink": 0, "window": 32}}),' in _sentence(best, 0, 32)


@pytest.mark.parametrize(
    ("words", "budgets"),
    [("--length 4096", (256, 1024)), ("--length 512", (256,)), ("--budget " + DEFAULTS, BUDGETS)],
)
def test_a_list_of_budgets_that_is_given_is_kept(
    words: str, budgets: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object, tried: tuple[int, ...], *others: object) -> None:
        raise ValueError(f"tried: {tried}")

    monkeypatch.setattr("sparseattn.cli.recommend_lossless.DraftTrial", stop)
    done = run("recommend --lossless --model reference --text alice --windows 1", *words.split(), "--out", tmp_path)
    assert str(done.exception) == f"tried: {budgets}", done.output


def test_a_length_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    done = run("recommend --lossless --model reference --text alice --length 16384 --windows 1 --out", tmp_path)
    assert done.exit_code == 2
    assert "has 16384 positions, --length 16384 with all drafts behind it takes 16" in " ".join(done.output.split())


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


def test_help_says_that_nothing_of_an_interrupted_run_is_kept() -> None:
    assert "With --lossless it starts again." in " ".join(run("recommend --help").output.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--drafts 0", "--drafts takes numbers from 1 to 16"),
        ("--drafts 17", "--drafts takes numbers from 1 to 16"),
        ("--for vllm", "--lossless is for generate_lossless with transformers"),
        ("--sink 200", "--sink 200 and --window 64 read all 188 rows of a window before its --last 4"),
        ("--budget 16,120", "--budget 120 has no effect: a window before its --last 4 has 188 rows"),
        ("", "--budget 256 has no effect"),
        ("--error 2%", "--error cannot be given with --lossless, which makes no plan"),
        ("--held-out 3 --by layer", "--by, --held-out cannot be given with --lossless"),
    ],
)
def test_what_cannot_be_is_refused(words: str, sentence: str, tmp_path: Path) -> None:
    result = run(LINE, *words.split(), "--out", tmp_path)
    assert result.exit_code != 0
    assert sentence in " ".join(result.output.split())
