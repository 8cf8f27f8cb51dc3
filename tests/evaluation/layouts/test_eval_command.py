"""`sparseattn eval` on benchmarks' lines: prompts, limits and scores in records, kvpress' form, and what is refused."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from sparseattn.cli import eval_engines
from tests.command import run
from tests.evaluation.byte_llama import save_byte_llama
from tests.evaluation.layouts import lines
from tests.evaluation.layouts.lines import write

LONG = "The grass is green. " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_llama(tmp_path_factory.mktemp("model"))


def evaluate(model: Path, path: Path, *more: object) -> Result:
    options = ["--selector", "quest", "--budget", "32", "--sink", 2, "--window", 8, "--no-figures"]
    return run("eval", "--model", model, "--prompts", path, "--out", path.parent / "out", *options, *more)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path.parent / "out" / "eval.jsonl").read_text().splitlines()]


def said(done: Result) -> str:
    return " ".join(done.output.split())


@pytest.fixture
def ruler(tmp_path: Path) -> Path:
    """Lines of two tasks, the second with two answers."""
    first = {**lines.KVPRESS, "context": LONG, "max_new_tokens": 4}
    return write(tmp_path / "4096.jsonl", first, {**first, "task": "niah_multivalue", "answer": ["Ada", "lamp"]}, first)


def test_records_say_layout_limit_and_metric(model: Path, ruler: Path) -> None:
    done = evaluate(model, ruler)
    assert done.exit_code == 0, done.output
    assert f"{ruler}: layout kvpress (told from its fields), prompts: ruler/qa_1 2, ruler/niah_multivalue 1" in said(
        done
    )
    found = records(ruler)
    assert [one["task"] for one in found] == ["ruler/qa_1"] * 2 + ["ruler/niah_multivalue"] * 2
    for one in found:
        assert (one["layout"], one["limit"], one["data_set"]) == ("kvpress", 4, "ruler")
        assert len(one["response"].encode(errors="replace")) >= 1
        assert one["scoring"] == ("kvpress/ruler/part" if one["task"] == "ruler/qa_1" else "kvpress/ruler/all")


def test_a_benchmarks_answer_goes_on_behind_a_line(model: Path, tmp_path: Path) -> None:
    """Only `samsum`'s answers end at a line's end; the others go on to their limit."""
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(lines.LONGBENCH_TEMPLATES))
    path = write(tmp_path / "l.jsonl", {**lines.LONGBENCH, "context": LONG})
    assert evaluate(model, path, "--answer-tokens", 5).exit_code == 0
    (full, _) = records(path)
    assert full["templates_checked"] is False
    assert full["scoring"] == "longbench/f1"
    assert full["settings"]["answer_tokens"] == 5


def test_kvpress_form(model: Path, ruler: Path) -> None:
    import yaml

    done = evaluate(model, ruler, "--results", "kvpress", "--protocol", "question,prefill")
    assert done.exit_code == 0, done.output
    folders = sorted((ruler.parent / "out" / "kvpress").iterdir())
    names = [folder.name.replace(str(model).replace("/", "--"), "MODEL") for folder in folders]
    assert [re.sub(r"__0\.\d\d", "__R", name) for name in names] == [
        "ruler__4096__MODEL__no_press__R",
        "ruler__4096__MODEL__no_press__R__prefill",
        "ruler__4096__MODEL__quest_32__R",
        "ruler__4096__MODEL__quest_32__R__prefill",
    ]
    found = records(ruler)
    for folder in folders:
        with open(folder / "predictions.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == [name for name in lines.KVPRESS if name != "context"] + [
            *("predicted_answer", "compression_ratio"),
        ]
        assert [row["task"] for row in rows] == ["qa_1", "qa_1", "niah_multivalue"]
        press = "no_press" if "no_press" in folder.name else "quest_32"
        protocol = "prefill" if folder.name.endswith("prefill") else "question"
        mine = [
            one for one in found if one["protocol"] == protocol and (one["method"] == "full") == (press == "no_press")
        ]
        assert {row["predicted_answer"] for row in rows} == {one["response"] for one in mine}
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["dataset"], config["data_dir"], config["press_name"]) == ("ruler", "4096", press)
        ratios = [float(row["compression_ratio"]) for row in rows]
        assert config["compression_ratio"] == pytest.approx(sum(ratios) / 3)
        assert (config["compression_ratio"] > 0.5) == (press == "quest_32")
        of_task = {one["task"].partition("/")[2]: one["score"] for one in mine}
        expected = {name: {"string_match": round(100 * of_task[name], 2)} for name in ("niah_multivalue", "qa_1")}
        assert json.loads((folder / "metrics.json").read_text()) == expected


def test_kvpress_form_is_of_its_own_layout(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"context": LONG, "question": "Q?", "answers": "a"})
    assert "--results kvpress needs --prompts in the layout kvpress" in said(
        evaluate(model, path, "--results", "kvpress")
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "more", "sentence"),
    [
        (
            {**lines.KVPRESS, "context": LONG * 5},
            [],
            "a prompt of ruler/qa_1 (file l.jsonl, line 2) with its answer takes",
        ),
        ({**lines.KVPRESS, "answer": [""]}, [], "l.jsonl, line 2: answers are"),
        ({**lines.KVPRESS, "task": "kite"}, [], "l.jsonl, line 2: there is no metric for the task 'kite' of kvpress"),
        (lines.RULER, [], "l.jsonl, line 2: its fields are those of the layout ruler, and those of line 1 of kvpress"),
        ({**lines.KVPRESS, "demos": [1]}, [], "line 2: the layout kvpress does not handle the field demos"),
        (
            lines.KVPRESS,
            ["--scoring", "f1"],
            "has the layout kvpress, which has its own prompts and scores: leave out",
        ),
        (lines.KVPRESS, ["--layout", "kvpres"], "there is no layout 'kvpres' (did you mean 'kvpress'?)"),
        (lines.KVPRESS, ["--layout", "longbench2"], "l.jsonl is of the layout longbench2: its prompts are in"),
    ],
)
def test_bad_input_is_a_sentence_before_the_model_is_loaded(
    line: dict[str, Any],
    more: list[str],
    sentence: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(eval_engines, "open_model", never)
    done = evaluate(model, write(tmp_path / "l.jsonl", lines.KVPRESS, line), *more)
    assert done.exit_code == 2, done.output
    assert sentence in said(done)
    assert not (tmp_path / "out" / "eval.jsonl").exists()


def test_layouts_are_of_prompts(tmp_path: Path) -> None:
    assert "--layout needs --prompts: name a file" in said(run("eval --layout ruler --out", tmp_path / "out"))


def test_a_killed_run_goes_on(model: Path, ruler: Path) -> None:
    assert evaluate(model, ruler, "--results", "kvpress").exit_code == 0
    out = ruler.parent / "out"
    whole = (out / "eval.jsonl").read_bytes()
    first, *_ = whole.splitlines(keepends=True)
    for path in sorted((out / "kvpress").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (out / "eval.jsonl").write_bytes(first + b'{"task": "ruler/qa_1", "resp')
    assert evaluate(model, ruler, "--results", "kvpress").exit_code == 0
    again = records(ruler)
    assert len(again) == len(whole.splitlines())
    assert again[0] == json.loads(first)
    assert [one["response"] for one in again] == [json.loads(line)["response"] for line in whole.splitlines()]
    assert len(list((out / "kvpress").iterdir())) == 2


def test_no_key_or_token_of_the_environment_is_written(
    model: Path, ruler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "s3cret-of-the-environment"
    for name in (
        "OPENAI_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "SPARSEATTN_ANYTHING",
    ):
        monkeypatch.setenv(name, secret)
    done = evaluate(model, ruler, "--results", "kvpress", "--json")
    assert done.exit_code == 0, done.output
    written = [path for path in (ruler.parent / "out").rglob("*") if path.is_file()]
    assert len(written) >= 7
    for path in written:
        assert secret.encode() not in path.read_bytes(), path
    assert secret not in done.output


def test_kept_records_are_of_the_lines_that_are_there_now(model: Path, tmp_path: Path) -> None:
    """Lines that have moved, or that differ in a field that is no part of the prompt, have their own fields in CSV."""
    first = {**lines.KVPRESS, "context": LONG, "max_new_tokens": 2}
    held = [{**first, "row": 0}, {**first, "row": 77}, {**first, "question": "Which lamp?", "row": 5}]
    (tmp_path / "four").mkdir()
    for number, order in enumerate(([0, 1, 2], [2, 1], [1, 2, 0])):
        for old in tmp_path.glob("four/*.jsonl"):
            old.unlink()
        path = write(tmp_path / "four" / f"{number}.jsonl", *(held[place] for place in order))
        done = evaluate(model, path, "--results", "kvpress")
        assert done.exit_code == 0, done.output
        assert len(records(path)) == 4, "two prompts, each by two methods"
        folders = [
            folder for folder in (tmp_path / "four" / "out" / "kvpress").iterdir() if f"__{number}__" in folder.name
        ]
        assert len(folders) == 2
        for folder in folders:
            with open(folder / "predictions.csv", newline="") as file:
                shown = [int(row["row"]) for row in csv.DictReader(file)]
            assert shown == [held[place]["row"] for place in order]


def test_another_limit_in_the_file_is_measured_again(model: Path, tmp_path: Path) -> None:
    line = {"context": LONG, "question": "Q?", "answers": "a"}
    for number, limit in enumerate(({"max_new_tokens": 3}, {"max_new_tokens": 5}, {}, {"max_new_tokens": 3}), 1):
        path = write(tmp_path / "own.jsonl", {**line, **limit})
        assert evaluate(model, path).exit_code == 0
        assert len(records(path)) == 2 * min(number, 3)
    assert [one.get("limit") for one in records(path)] == [3, 3, 5, 5, None, None]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--budget", 5000], "--budget 5000 has no effect: the longest prompt has 430 rows, of which --sink 2 and --"),
        (["--budget", 16, "--window", 5000], "--window 5000 read all 430 rows of the longest prompt"),
        (["--budget", "64,256,1024", "--window", 5000], "--window 5000 read all 430 rows of the longest prompt"),
        (["--max-length", 1000, "--budget", 600], "a budget below 420 leaves some out"),
    ],
)
def test_settings_that_leave_no_row_of_the_prompts_out(
    options: list[object], sentence: str, model: Path, tmp_path: Path
) -> None:
    line = {"context": LONG[:-38], "question": "Q?", "answers": "a", "max_new_tokens": 64}
    done = evaluate(model, write(tmp_path / "own.jsonl", line), *options)
    assert done.exit_code == 2, done.output
    assert sentence in said(done)
    assert not (tmp_path / "out" / "eval.jsonl").exists()


def test_results_among_the_prompts_are_refused(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "d" / "own.jsonl", {"context": LONG, "question": "Q?", "answers": "a"})
    done = run("eval", "--model", model, "--prompts", tmp_path / "d", "--out", tmp_path / "d" / "eval")
    assert done.exit_code == 2, done.output
    assert f"{tmp_path / 'd'}, all of whose files are read: name a folder outside" in said(done)
    assert not (tmp_path / "d" / "eval").exists()


def test_what_is_skipped_in_a_folder_is_said(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "d" / "own.json", {"context": LONG, "question": "Q?", "answers": "a"})
    (tmp_path / "d" / "info.json").write_text('{"features": {}}')
    done = evaluate(model, tmp_path / "d", "--answer-tokens", 2)
    assert done.exit_code == 0, done.output
    assert "files without prompts are skipped: info.json" in said(done)
    assert {one["file"] for one in records(tmp_path / "d")} == {"own.json"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--samples 9 --lengths 64", "--lengths, --samples needs --task, and --prompts are asked as they are"),
        ("--depths 0.1", "--depths needs --task, and --prompts are asked as they are"),
        ("--seed 3 --filler alice", "--seed, --filler needs --task"),
        ("--last 5", "--last needs --task agreement, and only that task takes it"),
        ("--task agreement --text alice --depths 0.5", "--depths needs a --task with made-up questions"),
        ("--templates .", "--templates is for benchmarks with a file of prompts, and plain has none"),
        ("--demos none.jsonl", "--demos is for the layout helmet, and these prompts are of plain: leave it out"),
        ("--tail 7", "--tail 7 has no effect: all prompts have a context and a question; leave it out"),
        ("--layout plain:foo", "is of the layout plain: it has no tasks: write --layout plain without 'foo'"),
    ],
)
def test_options_without_effect_on_prompts_are_refused(
    options: str, sentence: str, model: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "own.jsonl", {"context": LONG, "question": "Q?", "answers": "a"})
    done = evaluate(model, path, *options.split())
    assert done.exit_code == 2, done.output
    assert sentence in said(done)
    assert not (tmp_path / "out" / "eval.jsonl").exists()


def test_a_template_of_whole_prompts_is_refused(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"prompt": LONG, "answers": "a"})
    done = evaluate(model, path, "--template", "{context} {question}")
    assert done.exit_code == 2, done.output
    assert "--template has no effect: no prompt is in two parts, context and question; leave it out" in said(done)
    assert evaluate(model, path, "--tail", 7, "--answer-tokens", 1).exit_code == 0


@pytest.mark.parametrize("option", ["--max-length 300", "--scoring f1", "--tail 3", "--template {context}{question}"])
def test_options_of_prompts_need_prompts(option: str, tmp_path: Path) -> None:
    done = run(f"eval --model reference --task passkey --out {tmp_path / 'out'} {option}")
    assert done.exit_code == 2, done.output
    assert f"{option.split()[0]} needs --prompts: name a file" in said(done)
