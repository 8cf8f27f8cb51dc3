"""Synthetic tasks fill their length and hide what they ask for; scores are what one would give by hand."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from sparseattn.evaluation.layouts.base import Setup
from sparseattn.evaluation.layouts.registry import read_prompts
from sparseattn.evaluation.tasks.filler import from_text
from sparseattn.evaluation.tasks.records import Records
from sparseattn.evaluation.tasks.registry import TASKS, example
from sparseattn.evaluation.tasks.scoring import SCORINGS, found, ruler, score
from sparseattn.evaluation.tasks.unasked import unasked

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
        # numbers are compared as numbers
        ("all", "It is 5.", ["-5"], 0.0),
        ("all", "It is -5.", ["5"], 0.0),
        ("all", "It is \u22125.", ["-5"], 1.0),  # a minus sign instead of a hyphen
        ("all", "x=-5", ["-5"], 1.0),
        ("all", "+5", ["5"], 1.0),
        ("all", "from 3-5 of them", ["5"], 1.0),  # between two numbers a hyphen is no sign
        ("all", "3.14", ["14"], 0.0),
        ("all", "3.14", ["3"], 0.0),
        ("all", "It is 3.", ["3"], 1.0),
        ("all", "3.140", ["3.14"], 1.0),
        ("all", ".5", ["5"], 0.0),
        ("all", ".5", ["0.50"], 1.0),
        ("all", "1,000", ["1000"], 1.0),
        ("all", "1000.0", ["1,000"], 1.0),
        ("all", "1,000", ["1"], 0.0),
        ("all", "1,000", ["000"], 0.0),
        ("all", "12345,678", ["12345"], 1.0),  # no marks of thousands
        ("all", "-$5", ["$5"], 0.0),
        ("all", "1.2.3", ["1.2"], 0.0),
        ("all", "007", ["7"], 0.0),  # a code
        ("all", "5 km", ["5"], 1.0),
        ("all", "5km", ["5"], 0.0),
        ("all", "pass.71432", ["71432"], 1.0),
        ("part", "-5", ["5", "6"], 0.0),
        ("exact", "5", ["-5"], 0.0),
        ("exact", "-5", ["-5"], 1.0),
        ("exact", "- 5", ["5"], 1.0),  # a list's
        ("exact", "3.140", ["3.14"], 1.0),
        ("exact", "1,000.", ["1000"], 1.0),
        ("exact", "3.14", ["14"], 0.0),
        ("exact", "5%", ["5"], 0.0),
        # words may hold symbols
        ("all", "It is C#.", ["C"], 0.0),
        ("all", "It is C.", ["C#"], 0.0),
        ("all", "It is C#.", ["c#"], 1.0),
        ("all", "C++, I think", ["C"], 0.0),
        ("all", "C++11", ["C"], 0.0),
        ("all", "(C++)", ["C++"], 1.0),
        ("all", "graded A-", ["A"], 0.0),
        ("all", "graded A-", ["A-"], 1.0),
        ("all", "the old-ferry", ["ferry"], 1.0),
        ("all", "use .NET", ["NET"], 0.0),
        ("all", "the U.S. of course", ["U.S."], 1.0),
        ("exact", "C#", ["C"], 0.0),
        ("exact", "C", ["C++"], 0.0),
        ("exact", "**C#**.", ["C#"], 1.0),
        ("exact", ".NET", ["NET"], 0.0),
        ("exact", "...Paris", ["Paris"], 1.0),
        ("exact", "...", ["!"], 0.0),
        # an apostrophe between letters belongs to the word, but for a possessive's and an elision's
        ("all", "I don't know", ["don"], 0.0),
        ("all", "I don\u2019t know", ["don't"], 1.0),
        ("all", "O'Brien", ["Brien"], 0.0),
        ("all", "It is Anna's.", ["Anna"], 1.0),
        ("all", "McDonald's", ["McDonald's"], 1.0),
        ("all", "la capitale de l'Italie", ["Italie"], 1.0),
        ("all", "'Paris'", ["Paris"], 1.0),
        # Chinese and Japanese have no spaces between words
        ("all", "答案是东京。", ["东京"], 1.0),
        ("all", "答案是东京。", ["京都"], 0.0),
        ("part", "答えは「ロンドン」です", ["ロンドン"], 1.0),
        ("part", "それはとうきょうです", ["とうきょう"], 1.0),
        ("all", "他在2024年写了GPT这个词", ["2024", "GPT"], 1.0),
        ("all", "猫和狗", ["猫", "狗"], 1.0),
        ("all", "共1,000人", ["1000"], 1.0),
        ("all", "第12345号", ["1234"], 0.0),
        ("all", "使用C#语言", ["C#"], 1.0),
        ("all", "东京、大阪、京都", ["东京", "大阪"], 2 / 3),
        ("exact", "「东京」。", ["东京"], 1.0),
        ("exact", "东京人", ["东京"], 0.0),
        ("f1", "答案是东京。", ["东京"], 2 * 2 / (5 + 2)),
        ("f1", "巴黎", ["东京"], 0.0),
        ("all", "서울이다", ["서울"], 0.0),  # Korean has spaces
        # letters beyond ASCII
        ("exact", "\uff11\uff12", ["12"], 1.0),
        ("part", "Das Haus in K\u00f6ln.", ["k\u00f6ln"], 1.0),
    ],
)
def test_scores_of_hand_made_responses(scoring: str, response: str, answers: list[str], expected: float) -> None:
    assert score(scoring, response, answers) == pytest.approx(expected)


WORDS = ["abc", "def", "ghi"]


@pytest.mark.parametrize(
    ("response", "answers", "others", "wrong"),
    [
        # as people write lists
        (" abc, def, ghi", WORDS, [], []),
        ("abc def ghi", WORDS, [], []),
        ("The three most frequent words are abc, def and ghi.", WORDS, [], []),
        ("Sure, here are the words: abc, def, ghi", WORDS, [], []),
        ("1. abc 2. def 3. ghi", WORDS, [], []),
        ("VAR abc VAR def VAR ghi", WORDS, [], []),
        ("abc, abc, abc", WORDS, [], []),
        ("abc, def, ghi, as far as one can see", WORDS, [], []),
        ("", WORDS, ["xyz"], []),
        # items that are no answers
        ("abc, def, xyz", WORDS, [], ["xyz"]),
        ("xyz, abc, def and uvw", WORDS, [], ["xyz", "uvw"]),
        ("xyz; xyz; abc", WORDS, [], ["xyz"]),
        ("abc xyz def uvw", WORDS, [], ["xyz", "uvw"]),
        ("xyz: uvw, rst: abc", WORDS, [], ["uvw"]),
        # what stands in the context is known, wherever it is named
        ("I saw xyz before abc def ghi", WORDS, ["xyz", "uvw"], ["xyz"]),
        ("abc. The other words are uvw", WORDS, ["xyz", "uvw"], ["uvw"]),
        # numbers: any other one
        ("71432 and 5", ["71432", "5"], [], []),
        ("71432, 5, 6, and -5", ["71432", "5"], [], ["6", "-5"]),
        ("They are 71432 and then 99", ["71432", "5"], [], ["99"]),
        ("1. 71432 2. 99", ["71432", "5"], [], ["99"]),
        ("The 2 numbers are: 71,432 and 5.0", ["71432", "5"], [], []),
        # several words, and words with what separates a list
        ("New York, Paris, Rome", ["New York", "Paris"], [], ["rome"]),
        ("New York and San Francisco, as I said before", ["New York", "Paris"], [], ["san francisco"]),
        ("AC/DC, C#", ["AC/DC", "C#"], [], []),
        ("AC/DC, C", ["AC/DC", "C#"], [], ["c"]),
    ],
)
def test_values_that_were_not_asked_for_are_found(
    response: str, answers: list[str], others: list[str], wrong: list[str]
) -> None:
    assert unasked(response, answers, others) == set(wrong)
    held = sum(found(answer, response) for answer in answers)
    assert score("all", response, answers, others) == pytest.approx(held / (len(answers) + len(wrong)))


@pytest.mark.parametrize("task", ["variables", "words"])
def test_naming_every_value_of_the_context_scores_little_and_is_right_to_ruler(task: str) -> None:
    one = example(task, 3000, seed=3)
    asked, held = set(one.answers), one.context.splitlines()[1]
    named = re.findall(r"VAR ([A-Z]{3})", held) if task == "variables" else held.split()
    assert asked < set(named) <= asked | set(one.others)
    for response in (", ".join(named), " ".join(named)):
        assert score(one.scoring, response, one.answers, one.others) == pytest.approx(len(asked) / len(set(named)))
        assert score(one.scoring, response, one.answers, one.others) <= 0.5
        assert ruler(one.scoring, response, one.answers) == 1.0


def test_rulers_figure_is_its_string_match() -> None:
    for response, all_of_them, any_of_them in (
        ("abc, xyz and def", 2 / 3, 1.0),
        ("ABCDEFG", 2 / 3, 1.0),  # within longer words, upper or lower case
        ("nothing\nghi", 1 / 3, 1.0),  # and in any line
        ("nothing", 0.0, 0.0),
    ):
        assert ruler("all", response, WORDS) == pytest.approx(all_of_them)
        assert ruler("part", response, WORDS) == any_of_them
    assert ruler("exact", "abc", WORDS) is None
    assert ruler("f1", "abc", WORDS) is None


def test_one_answer_costs_nothing_for_what_stands_beside_it() -> None:
    assert score("all", "71432, 71433 or 71434", ["71432"]) == 1.0


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
        {"context": "C", "input": "Q?", "answers": ["a"], "length": 7},
        {"input": "y" * 20 + "What?", "outputs": ["a"], "answer_prefix": " It is", "index": 0},
        {"id": 0, "context": "C", "input": "Q?", "answer": 42, "gen_prefix": " It", "max_new_tokens": 5},
    )
    setup = Setup(path, scoring="part", template="Read {context}. Then: {question} A:", tail=10)
    file = read_prompts(path, setup, "plain")
    got = file.examples
    assert [(one.context, one.question, one.answers) for one in got] == [
        ("x" * 14, "x" * 6 + "Who?", ("a", "b")),
        ("Read C", ". Then: Q? A:", ("a",)),
        ("Read C", ". Then: Q? A:", ("a",)),
        ("y" * 20 + "W", "hat? It is", ("a",)),
        ("Read C", ". Then: Q? A: It", ("42",)),
    ]
    assert [(one.lead, one.limit) for one in got] == [("", None)] * 3 + [(" It is", None), (" It", 5)]
    assert {one.task for one in got} == {"mine"}
    assert {one.scoring for one in got} == {"part"}
    assert (file.layout, file.guessed) == ("plain", False)
    assert [one.meta for one in got][2] == {"file": "mine.jsonl", "line": 3, "layout": "plain"}


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ([1], "line 1: a line is a JSON object, got list"),
        (
            {"prompt": "x" * 200},
            "line 1: answers are a string or a list of strings under answers, answer, outputs, none of them empty, got",
        ),
        ({"prompt": "x" * 200, "answers": []}, r"line 1: answers are .* got \[\]"),
        ({"prompt": "x" * 200, "answers": ["a", " "]}, "line 1: answers are"),
        ({"context": "C", "answers": "a"}, "line 1: a context comes with a question, under question or input"),
        ({"text": "C", "answers": "a"}, "line 1: a prompt is under prompt or input"),
        (
            {"prompt": "x" * 100, "answers": "a"},
            "line 1: a prompt is longer than its question of 100 characters, got 100",
        ),
        (
            {"context": ["a"], "question": "Q", "answers": "a"},
            r"line 1: context is text that is not empty, got \['a'\]",
        ),
        ({"context": "C", "question": ["x"], "answers": "a"}, r"line 1: question is text .* got \['x'\]"),
        (
            {"prompt": "x" * 200, "context": "C", "question": "Q", "answers": "a"},
            "line 1: a context comes with one question, got context, question and prompt",
        ),
        (
            {"context": "C", "question": "Q", "input": "I", "answers": "a"},
            "line 1: a context comes with one question, got context, question and input",
        ),
        (
            {"prompt": "x" * 200, "question": "Q", "answers": "a"},
            "line 1: a prompt without a context is one text, got prompt and question: name the long part context",
        ),
        ({"prompt": "x" * 200, "input": "Q", "answers": "a"}, "is one text, got prompt and input"),
        (
            {"context": "C", "question": "Q", "answers": ["a"], "answer": "b"},
            "line 1: answers stand under one name, got others under answers than under answer",
        ),
        ({"context": "C", "question": "Q", "answers": [None]}, r"line 1: answers are .* got \[None\]"),
        ({"context": "C", "question": "Q", "answers": float("nan")}, "line 1: answers are .* got nan"),
    ],
)
def test_unusable_lines_are_named(tmp_path: Path, record: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_prompts(write(tmp_path / "bad.jsonl", record))


def test_fields_that_are_null_are_not_there(tmp_path: Path) -> None:
    nothing = {"context": None, "question": None, "input": None, "answer": None}
    two = {"prompt": None, "context": "C", "question": "Q?", "input": "", "answers": ["a"], "answer": "a"}
    path = write(tmp_path / "mine.jsonl", {"prompt": "x" * 20 + "Who?", "answers": "a", **nothing}, two)
    whole, parts = read_prompts(path, Setup(path, tail=4), "plain").examples
    assert (whole.context, whole.question) == ("x" * 20, "Who?")
    assert (parts.context, parts.question, parts.answers) == ("C", "\n\nQ?", ("a",))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("9" * 5000, "a number has at most 4300 digits, got 5000; as text it may be longer"),
        ("[" * 100_000 + "]" * 100_000, "lists and objects are nested more than 100 deep"),
        ("[" * 200 + "]" * 200, "lists and objects are nested more than 100 deep"),
        (r'"\ud800"', r"text is whole Unicode characters, got half of a surrogate pair, \ud800"),
    ],
    ids=["digits", "nesting", "some nesting", "surrogate"],
)
@pytest.mark.parametrize("name", ["answers", "question", "unread"])
def test_lines_that_break_readers_are_named(tmp_path: Path, value: str, sentence: str, name: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"context": "C", "question": "Q?", "answers": "a"})
    path.write_text(
        path.read_text().rstrip() + f'\n{{"context": "C", "question": "Q?", "answers": "a", "{name}": {value}}}'
    )
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: {sentence}")):
        read_prompts(path)


def test_a_pair_of_surrogates_is_a_character_and_long_digits_may_be_text(tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_text(r'{"context": "\ud83d\ude00", "question": "Q?", "answers": "' + "9" * 5000 + '"}')
    (one,) = read_prompts(path, Setup(path, template="{context} {question}")).examples
    assert one.context == "\U0001f600"
    assert score(one.scoring, "9" * 5000, one.answers) == 1.0


def test_unusable_files_and_templates(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": \n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1: it is not JSON at column \d+: Expecting value"):
        read_prompts(path)
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"bad.jsonl is not UTF-8 \(byte 12 is 0xff\)"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(path)
    write(path, {"prompt": "x" * 200, "answers": "a"})
    for template in ("{context}", "{question} {context}", "{context} {context} {question}"):
        with pytest.raises(ValueError, match=r"a template holds \{context\} and behind it \{question\}"):
            read_prompts(path, Setup(path, template=template))


RECORD = {
    "task": "kv",
    "prompt": "p",
    "protocol": "question",
    "method": "quest",
    "budget": "64",
    "source": "quest",
    "score": 1.0,
    "rows": 100,
}


def test_records_are_there_when_a_run_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    first = Records(path, {"model": "m", "sink": 4})
    kept = first.add(RECORD)
    assert kept == {**RECORD, "settings": {"model": "m", "sink": 4}}
    again = Records(path, {"model": "m", "sink": 4})
    key = ("kv", "p", "question", "quest", "64", RECORD["source"], None)  # records of before name no layers: all
    assert again.found == {key: kept}


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


def test_a_record_that_a_full_disk_takes_a_part_of_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "eval.jsonl"
    records = Records(path, {})
    records.add(RECORD)
    whole = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, before[1]))  # a write beyond is cut, then refused
    try:
        with pytest.raises(OSError, match=r"eval\.jsonl"):
            records.add({**RECORD, "budget": "256"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole
    records.add({**RECORD, "budget": "256"})
    assert [one["budget"] for one in Records(path, {}).found.values()] == ["64", "256"]


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ('"score": null', "score is a number from 0 to 1, got None"),
        ('"score": "1.0"', "score is a number from 0 to 1, got '1.0'"),
        ('"score": NaN', "score is a number from 0 to 1, got nan"),
        ('"score": true', "score is a number from 0 to 1, got True"),
        ('"score": 100', "score is a number from 0 to 1, got 100"),
        ('"ruler": -1', "ruler is a number from 0 to 1, got -1"),
        ('"nll": NaN', "nll is a number from 0 to 1e+15, got nan"),
        ('"nll": 1, "scored_tokens": 0', "scored_tokens is a number from 1 to 1e+15, got 0"),
        (
            '"task": "agreement", "length": 9, "nll": 1, "scored_tokens": 1',
            "kl is a number from 0 to 1e+15, got None",
        ),
        ('"bytes_share": "all"', "bytes_share is a number from 0 to 1e+15, got 'all'"),
        ('"layers": 3', "layers is text, got 3"),
        ('"rows": Infinity', "rows is a number from 0 to 1e+15, got inf"),
        ('"rows": [1]', r"rows is a number from 0 to 1e+15, got [1]"),
        ('"depth": "deep"', "depth is a number from 0 to 1e+15, got 'deep'"),
        ('"answers": 5', "answers are a list, got 5"),
        ('"task": null', "task is text, got None"),
        ('"budget": [64]', "budget is text, got [64]"),
        ('"settings": 1', "settings are an object, got 1"),
        ('"seed": ' + "9" * 5000, "a number has at most 4300 digits, got 5000"),
        ('"seed": ' + "[" * 100_000, "lists and objects are nested more than 100 deep"),
        (r'"response": "\udc00"', r"got half of a surrogate pair, \udc00"),
    ],
)
def test_records_that_say_no_score_are_named_by_file_and_line(tmp_path: Path, field: str, sentence: str) -> None:
    path = tmp_path / "eval.jsonl"
    Records(path, {}).add(RECORD)
    whole = path.read_text()
    path.write_text(whole + whole.rstrip().removesuffix("}") + f", {field}}}\n")  # of two fields of a name, the last
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2 is a line that is no record")) as error:
        Records(path, {})
    assert sentence in str(error.value)
    assert path.read_bytes() == before


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    sentence = (
        r"what was measured \(task kv, protocol question, method quest, budget 64\) cannot be kept: nll is .* got nan"
    )
    with pytest.raises(ValueError, match=sentence):
        Records(path, {}).add({**RECORD, "nll": float("nan"), "scored_tokens": 3})
    assert path.read_bytes() == b""


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    Records(path, {"model": "m", "sink": 4}).add(RECORD)
    for settings in ({"model": "m", "sink": 0}, {"model": "m"}, {"model": "m", "sink": 4, "window": 64}):
        with pytest.raises(ValueError, match=r"results with another (sink|window) \(.*: name another folder"):
            Records(path, settings)
    path.write_text('{"trace": "text"}\n')
    with pytest.raises(ValueError, match="a line that is no record of this command"):
        Records(path, {"model": "m", "sink": 4})
