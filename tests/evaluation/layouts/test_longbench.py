"""LongBench's lines become its prompts, with its limits and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseattn.evaluation.layouts import longbench
from sparseattn.evaluation.metrics.registry import METRICS
from sparseattn.evaluation.tasks.base import Chat
from tests.evaluation.layouts.lines import LONGBENCH, LONGBENCH_TEMPLATES, read, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(LONGBENCH_TEMPLATES))
    return tmp_path


def test_a_line_becomes_the_benchmarks_prompt(folder: Path) -> None:
    file = read(write(folder / "data.jsonl", LONGBENCH))
    (one,) = file.examples
    assert (file.layout, file.guessed) == ("longbench", True)
    assert one.task == "longbench/qasper"
    assert one.context == "Article: The lamp is kept by Ada."
    assert one.question == "\n\nQ: Who keeps the lamp?\nA:"
    assert one.answers == ("Ada", "Ada Byron")
    assert (one.limit, one.scoring, one.one_line) == (128, "longbench/f1", False)
    assert one.chat == Chat(one.question), "its code puts the whole prompt in the user's turn"
    assert one.meta["templates"] == longbench.PUBLISHED.path
    assert one.meta["templates_checked"] is False, "this file of prompts is ours"
    assert len(one.meta["templates_sha256"]) == 64


def test_tasks_differ_in_ends_chats_and_classes(folder: Path) -> None:
    classes = ["Animal", "Place"]
    path = write(
        folder / "few.jsonl",
        {**LONGBENCH, "dataset": "trec", "all_classes": classes, "answers": ["Place"]},
        {**LONGBENCH, "dataset": "samsum"},
        {**LONGBENCH, "dataset": "lcc_e", "input": ""},
    )
    trec, samsum, lcc = read(path).examples
    assert trec.reference == {"first_line": True, "all_classes": classes}
    assert (trec.one_line, samsum.one_line, lcc.one_line) == (False, True, False)
    assert (trec.chat, samsum.chat, lcc.chat) == (None, None, None)
    assert (lcc.task, lcc.question) == ("longbench/lcc_e", "Next:\n")


def test_every_task_has_a_limit_and_a_metric() -> None:
    assert len(longbench.TASKS) == 21
    assert {metric for _, metric in longbench.TASKS.values()} <= METRICS.keys()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dataset": "qaspar"}, r"line 1: which task of longbench .* 'qaspar' or 'data' .* give --layout longbench:T"),
        ({"answers": [""]}, r"line 1: answers are .* none of them empty, got \[''\]"),
        ({"context": " "}, "line 1: context is text that is not empty, got ' '"),
        ({"dataset": "trec"}, "line 1: all_classes is a list of texts"),
        ({"dataset": "musique"}, "line 1: the file of prompts has no template of musique"),
        ({"options": ["a", "b"]}, "line 1: the layout longbench does not handle the field options"),
    ],
)
def test_unusable_lines_are_named(folder: Path, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(write(folder / "data.jsonl", {**LONGBENCH, **change}))


def test_without_its_file_of_prompts_it_says_where_that_is(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", LONGBENCH)
    with pytest.raises(ValueError, match=r"LongBench/config/dataset2prompt.json, and .* is not there: .* --templates"):
        read(path)
    clone = tmp_path / "clone" / longbench.PUBLISHED.path
    clone.parent.mkdir(parents=True)
    clone.write_text(json.dumps(LONGBENCH_TEMPLATES))
    for templates in (clone, tmp_path / "clone"):
        assert len(read(path, templates=templates).examples) == 1
