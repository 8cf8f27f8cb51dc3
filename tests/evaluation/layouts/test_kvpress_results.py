"""`metrics.json` as kvpress' scorers write it for each data set."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from sparseattn.evaluation.layouts.base import Line, Setup
from sparseattn.evaluation.layouts.kvpress import LAYOUT
from sparseattn.evaluation.metrics.registry import metric_score
from sparseattn.reporting.kvpress_results import KvpressRun, config, metrics, predictions, ratio_of, runs, write
from tests.evaluation.layouts.lines import KVPRESS, LONGBENCH2

PLAIN = {"context": "C", "question": "Q?", "answer_prefix": "A:", "max_new_tokens": 3}
LONG = {**PLAIN, "answers": ["the lamp"], "all_classes": None}


def run_of(data_set: str, *answered: tuple[dict[str, Any], str]) -> KvpressRun:
    """A run whose prompts have been answered so."""
    read = LAYOUT.open(Setup(Path("x")))
    records = []
    for number, (fields, response) in enumerate(answered, 1):
        example = read(Line(Path("4096.jsonl"), number, fields))
        assert example is not None
        score = metric_score(example.scoring, response, example.answers, example.reference)
        facts = {"method": "full", "budget": None, "rows": 8, "context": 8, "response": response, "score": score}
        records.append({**facts, "settings": {"model": "a/b"}, "file": "4096.jsonl", "line": number})
    return KvpressRun(data_set, None, "question", ("full", None), records, [fields for fields, _ in answered])


def test_ruler_in_percent_by_task() -> None:
    qa, values = {**KVPRESS, "answer": ["Ada", "Bo"]}, {**KVPRESS, "answer": ["1", "2", "3"], "task": "niah_multivalue"}
    run = run_of("ruler", (qa, "Ada"), (values, "2 and 1"), (qa, "Cy"), (values, "\x01 3"))
    assert metrics(run) == {"niah_multivalue": {"string_match": 50.0}, "qa_1": {"string_match": 50.0}}


def test_longbench_is_one_number_and_longbench_e_three() -> None:
    lines = [{**LONG, "task": "qasper", "length": length} for length in (100, 3999, 4000, 9000)]
    responses = ["lamp", "key", "a lamp", "lamp key"]
    assert metrics(run_of("longbench", *zip(lines, responses, strict=True))) == 66.67
    lines = [{**line, "task": "qasper_e"} for line in lines[:3]]
    run = run_of("longbench-e", *zip(lines, responses[:3], strict=True))
    assert metrics(run) == {"0-4k": 50.0, "4-8k": 100.0, "8k+": None}, "its code has NaN where there is none"


def test_white_space_before_code_counts_in_longbench_e_alone() -> None:
    line = {**LONG, "answers": ["  x = 1"], "length": 1}
    assert metrics(run_of("longbench", ({**line, "task": "lcc"}, "  x = 1"))) == 83.0
    assert metrics(run_of("longbench-e", ({**line, "task": "lcc_e"}, "  x = 1")))["0-4k"] == 100.0


def test_longbench2_by_difficulty_and_length() -> None:
    line = {**PLAIN, **{name: value for name, value in LONGBENCH2.items() if name not in PLAIN}}
    run = run_of(
        "longbench-v2", (line, "The correct answer is (A)"), ({**line, "difficulty": "hard", "length": "long"}, "A")
    )
    assert metrics(run) == {"average": 0.5, "easy": 1.0, "hard": 0.0, "long": 0.0, "short": 1.0}


def test_infinitebench_is_a_share() -> None:
    line = {**PLAIN, "task": "passkey", "answer": ["71432"]}
    assert metrics(run_of("infinitebench", (line, "71432"), (line, "71431"), (line, "it is 71432"))) == pytest.approx(
        2 / 3
    )


def test_a_run_for_each_task_where_kvpress_has_one() -> None:
    facts = {"layout": "kvpress", "protocol": "question", "method": "full", "budget": None, "line": 1}
    records = [
        {**facts, "data_set": "ruler", "task": "ruler/vt", "file": "4096.jsonl"},
        {**facts, "data_set": "ruler", "task": "ruler/cwe", "file": "4096.jsonl"},
        {**facts, "data_set": "longbench", "task": "longbench/qasper", "file": "x.jsonl"},
        {**facts, "data_set": "longbench", "task": "longbench/lcc", "file": "x.jsonl"},
        {**facts, "layout": "ruler", "task": "ruler/vt", "file": "x.jsonl"},
    ]
    found = runs(records, {("4096.jsonl", 1): {}, ("x.jsonl", 1): {}})
    assert [(run.data_set, run.part, len(run.records)) for run in found] == [
        ("ruler", "4096", 2),
        ("longbench", "qasper", 1),
        ("longbench", "lcc", 1),
    ]


def test_lines_of_csv_hold_what_breaks_it(tmp_path: Path) -> None:
    run = run_of("ruler", ({**KVPRESS, "question": 'a "b",\nc'}, 'Ada,\n"x"'))
    (row,) = csv.DictReader(io.StringIO(predictions(run)))
    assert (row["question"], row["predicted_answer"], row["answer"]) == ('a "b",\nc', 'Ada,\n"x"', "['Ada']")
    (folder,) = write(tmp_path, [run])
    assert folder.name == "ruler__a--b__no_press__0.00"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.json", "predictions.csv"]
    assert 'press_name: "no_press"\n' in config(run, tmp_path)


def test_the_ratio_is_of_rows_that_were_not_read() -> None:
    assert ratio_of({"method": "quest", "rows": 25, "context": 100}) == 0.75
    assert ratio_of({"method": "quest", "rows_share": 0.25}) == 0.75
    with pytest.raises(ValueError, match="needs the rows that were read, which a server does not say"):
        ratio_of({"method": "dense", "seconds": 1})


def test_longbench2_with_numbers_and_gaps() -> None:
    choices = {name: value for name, value in LONGBENCH2.items() if name not in PLAIN}
    run = run_of("longbench-v2", ({**choices, **PLAIN, "length": 1234, "difficulty": None}, "The correct answer is A"))
    assert metrics(run) == {"average": 1.0, "1234": 1.0}
