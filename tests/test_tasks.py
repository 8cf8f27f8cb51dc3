"""Synthetic tasks fill their length and hide what they ask for; scores are what one would give by hand."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from sparseattn.tasks import TASKS, example
from sparseattn.tasks.filler import from_text
from sparseattn.tasks.prompts import read_prompts
from sparseattn.tasks.records import Records
from sparseattn.tasks.scoring import SCORINGS, score

LONGEST_DISTRACTOR = {"passkey": 90, "multikey": 90, "kv": 14, "variables": 90, "words": 6}


def words(text: str) -> int:
    """Tokens of a tokenizer that knows words: long pieces, and fewer of them than bytes."""
    return len(re.findall(r"\w{1,4}|[^\w\s]", text))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [700, 701, 4096])
def test_a_prompt_fills_its_length_to_within_one_distractor(task: str, length: int) -> None:
    for seed in range(3):
        one = example(task, length, seed=seed)
        tokens = len((one.context + one.question).encode())
        assert length - LONGEST_DISTRACTOR[task] < tokens <= length


@pytest.mark.parametrize("task", TASKS)
def test_length_is_in_tokens_of_the_tokenizer(task: str) -> None:
    one = example(task, 1000, count=words)
    assert 1000 - 40 < words(one.context) + words(one.question) <= 1000


@pytest.mark.parametrize("task", TASKS)
def test_the_same_arguments_give_the_same_prompt(task: str) -> None:
    assert example(task, 800, 1, 5) == example(task, 800, 1.0, 5)
    assert example(task, 800, 1, 5).answers != example(task, 800, 0.3, 6).answers


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.uses_depth])
def test_depth_is_where_the_needle_lies(task: str) -> None:
    for depth in (0.0, 0.25, 0.5, 1.0):
        one = example(task, 4000, depth, 2)
        assert one.context.count(one.answers[0]) == 1
        at = one.context.index(one.answers[0]) / len(one.context)
        assert abs(at - depth) < 0.05
        assert one.meta["depth"] == depth


@pytest.mark.parametrize("task", TASKS)
def test_another_length_or_depth_asks_for_something_else(task: str) -> None:
    asked = {example(task, length, depth, 3).answers for length in (900, 5000) for depth in (0.0, 1.0)}
    assert len(asked) == (4 if TASKS[task].uses_depth else 2)


def test_key_value_records_are_distinct_and_of_one_form() -> None:
    one = example("kv", 8000, seed=1)
    lines = one.context.splitlines()[1:]
    assert all(re.fullmatch(r"[a-z]{6}:[1-9][0-9]{5}", line) for line in lines)
    pairs = dict(line.split(":") for line in lines)
    assert len(pairs) == len(lines) == one.meta["distractors"] + 1
    assert len(set(pairs.values())) == len(lines)
    assert pairs[one.question.splitlines()[-1].rstrip(":")] == one.answers[0]


def test_the_question_for_a_number_names_one_of_four() -> None:
    one = example("multikey", 3000, 0.2, 4)
    numbers = dict(re.findall(r"The number of ([a-z-]+) is (\d+)\.", one.context))
    assert len(numbers) == 4
    asked = re.fullmatch(r"What is the number of ([a-z-]+)\? The number of \1 is", one.question)
    assert asked is not None
    assert numbers[asked[1]] == one.answers[0]


def test_variables_are_those_that_the_assignments_give() -> None:
    one = example("variables", 2000, seed=7)
    values: dict[str, str] = {}
    for name, given in re.findall(r"VAR ([A-Z]{3}) = (?:VAR )?(\w+)\.", one.context):
        values[name] = values.get(given, given)  # from the front: every variable is assigned before it is read
    asked = re.search(r"the value (\d+)\?", one.question)
    assert asked is not None
    assert {name for name, value in values.items() if value == asked[1]} == set(one.answers)
    assert len(values) == 10
    assert len(one.answers) == 5


@pytest.mark.parametrize("length", [500, 700, 3000])
def test_frequent_words_are_the_most_frequent_without_a_tie(length: int) -> None:
    one = example("words", length, seed=1)
    counts = Counter(one.context.splitlines()[1].split()).most_common()
    assert tuple(word for word, _ in counts[:3]) == one.answers
    assert counts[2][1] > counts[3][1]


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_scores_1_and_anothers_0(task: str) -> None:
    one, other = example(task, 900, seed=1), example(task, 900, seed=2)
    assert score(one.scoring, one.target, one.answers) == 1.0
    assert score(one.scoring, other.target, one.answers) == 0.0


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="there is no task 'passkeys', there are passkey, multikey"):
        example("passkeys", 900)
    with pytest.raises(ValueError, match=r"between 0 .first. and 1 .last., got 1.5"):
        example("kv", 900, 1.5)
    for task in TASKS:
        with pytest.raises(ValueError, match=f"a {task} prompt with seed 0 has at least .* got a length of 50"):
            example(task, 50)


def test_filler_of_the_users_own() -> None:
    source = from_text("One is here. Two are there!\nStill two? Yes.\n\nA line")
    made = source(random.Random(0))
    assert {made() for _ in range(5)} == {"One is here.", "Two are there!", "Still two?", "Yes.", "A line"}
    context = example("passkey", 600, filler=source).context
    assert "Two are there! Still two?" in context
    assert "The pass key is" in context
    with pytest.raises(ValueError, match="no sentence"):
        from_text(" \n\n ")


@pytest.mark.parametrize(
    ("scoring", "response", "answers", "expected"),
    [
        # found or not, whatever stands around it
        ("all", " 71432. Remember it.", ["71432"], 1.0),
        ("all", "The pass key is 71432", ["71432"], 1.0),
        ("all", "\n\n71432\nWhat else?", ["71432"], 1.0),
        ("all", "**71432**", ["71432"], 1.0),
        ("all", "71433", ["71432"], 0.0),
        ("all", "714325", ["71432"], 0.0),
        ("all", "171432", ["71432"], 0.0),
        ("all", "7143 2", ["71432"], 0.0),
        ("all", "I do not know.\n71432", ["71432"], 0.0),  # a second line is not read
        ("all", "", ["71432"], 0.0),
        # several answers: a share, in any order
        ("all", " QXK, ABC", ["ABC", "QXK"], 1.0),
        ("all", " QXK, ABC, DEF", ["ABC", "QXK"], 2 / 3),  # one more than was asked for
        ("all", "abc", ["ABC", "QXK"], 0.5),
        ("all", "ABCQXK", ["ABC", "QXK"], 0.0),
        # part
        ("part", "Paris, I think", ["paris", "city of light"], 1.0),
        ("part", "the City  of Light", ["paris", "city of light"], 1.0),
        ("part", "parisian", ["paris"], 0.0),
        ("part", "", ["paris"], 0.0),
        # exact
        ("exact", ' "Paris".\n', ["paris"], 1.0),
        ("exact", "Paris, France", ["paris"], 0.0),
        ("exact", "Paris, France", ["rome", "paris, france"], 1.0),
        ("exact", "par is", ["paris"], 0.0),
        # f1
        ("f1", "the city of Paris", ["Paris"], 2 * 1 / (3 + 1)),
        ("f1", "A Paris!", ["the paris"], 1.0),
        ("f1", "Rome", ["Paris", "London"], 0.0),
        ("f1", "big big dog", ["big dog", "cat"], 2 * 2 / (3 + 2)),
        ("f1", "...", ["Paris"], 0.0),
        # letters beyond ASCII
        ("exact", "\uff11\uff12", ["12"], 1.0),
        ("part", "Das Haus in K\u00f6ln.", ["k\u00f6ln"], 1.0),
    ],
)
def test_scores_of_hand_made_responses(scoring: str, response: str, answers: list[str], expected: float) -> None:
    assert score(scoring, response, answers) == pytest.approx(expected)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_every_score_is_1_for_the_answer_and_0_for_another(scoring: str) -> None:
    assert score(scoring, "71432", ["71432"]) == 1.0
    assert score(scoring, "71433", ["71432"]) == 0.0


def test_scores_refuse_what_they_cannot_judge() -> None:
    with pytest.raises(ValueError, match="no scoring 'rouge', there are all, part, exact, f1"):
        score("rouge", "a", ["a"])
    for answers in ([], ["a", " "]):
        with pytest.raises(ValueError, match="one answer or more, none of them empty"):
            score("all", "a", answers)


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def test_prompts_of_the_users_own_in_all_known_names(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "x" * 20 + "Who?", "answers": ["a", "b"]},
        {"context": "C", "question": "Q?", "answers": "a"},
        {"context": "C", "input": "Q?", "answers": ["a"], "length": 7, "dataset": "qasper"},  # LongBench
        {"input": "y" * 20 + "What?", "outputs": ["a"], "answer_prefix": " It is", "index": 0},  # RULER
        {"id": 0, "context": "C", "input": "Q?", "answer": 42},  # InfiniteBench
    )
    got = read_prompts(path, "part", "Read {context}. Then: {question} A:", tail=10)
    assert [(one.context, one.question, one.answers) for one in got] == [
        ("x" * 14, "x" * 6 + "Who?", ("a", "b")),
        ("Read C", ". Then: Q? A:", ("a",)),
        ("Read C", ". Then: Q? A:", ("a",)),
        ("y" * 20 + "W", "hat? It is", ("a",)),
        ("Read C", ". Then: Q? A:", ("42",)),
    ]
    assert {one.task for one in got} == {"mine"}
    assert {one.scoring for one in got} == {"part"}
    assert [one.meta for one in got][2] == {"file": "mine.jsonl", "line": 3}


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ([1], "line 1: a line is a JSON object, got list"),
        (
            {"prompt": "x" * 200},
            "line 1: answers are a string or a list of strings under answers, answer, outputs, got",
        ),
        ({"prompt": "x" * 200, "answers": []}, r"line 1: answers are .* got \[\]"),
        ({"prompt": "x" * 200, "answers": ["a", " "]}, "line 1: answers are"),
        ({"context": "C", "answers": "a"}, "line 1: a context comes with a question, under question or input"),
        ({"text": "C", "answers": "a"}, "line 1: a prompt is under prompt or input"),
        (
            {"prompt": "x" * 100, "answers": "a"},
            "line 1: a prompt is longer than its question of 100 characters, got 100",
        ),
    ],
)
def test_unusable_lines_are_named(tmp_path: Path, record: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_prompts(write(tmp_path / "bad.jsonl", record), "all")


def test_unusable_files_and_templates(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": \n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1: Expecting value"):
        read_prompts(path, "all")
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"bad.jsonl is not UTF-8 \(byte 12 is 0xff\)"):
        read_prompts(path, "all")
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(path, "all")
    for template in ("{context}", "{question} {context}", "{context} {context} {question}"):
        with pytest.raises(ValueError, match=r"a template holds \{context\} and behind it \{question\}"):
            read_prompts(path, "all", template)


RECORD = {
    "task": "kv",
    "prompt": "p",
    "protocol": "question",
    "method": "Quest",
    "budget": "64",
    "source": "sparseattn.selectors.quest:Quest",
    "score": 1.0,
    "rows": 100,
}


def test_records_are_there_when_a_run_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    first = Records(path, {"model": "m", "sink": 4})
    kept = first.add(RECORD)
    assert kept == {**RECORD, "settings": {"model": "m", "sink": 4}}
    again = Records(path, {"model": "m", "sink": 4})
    assert again.found == {("kv", "p", "question", "Quest", "64", RECORD["source"]): kept}


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    Records(path, {}).add(RECORD)
    Records(path, {}).add({**RECORD, "budget": "256"})
    whole = path.read_bytes()
    for size in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:size])
        records = Records(path, {})
        assert [one["budget"] for one in records.found.values()] == ["64"]
        records.add({**RECORD, "budget": "256"})
        assert path.read_bytes() == whole


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    Records(path, {"model": "m", "sink": 4}).add(RECORD)
    for settings in ({"model": "m", "sink": 0}, {"model": "m"}, {"model": "m", "sink": 4, "window": 64}):
        with pytest.raises(ValueError, match=r"results with another (sink|window) \(.*: name another folder"):
            Records(path, settings)
    path.write_text('{"trace": "text"}\n')
    with pytest.raises(ValueError, match="a line that is no record of this command"):
        Records(path, {"model": "m", "sink": 4})
