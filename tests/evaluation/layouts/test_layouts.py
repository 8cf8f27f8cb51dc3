"""Lines of each benchmark become its prompt, or a sentence with the field that is not handled."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparseattn.evaluation.layouts import helmet, registry
from sparseattn.evaluation.layouts.base import Layout, Reader, Setup
from sparseattn.evaluation.layouts.templates import load
from sparseattn.evaluation.metrics.registry import METRICS, metric_score
from sparseattn.evaluation.tasks.base import Chat, Example
from tests.evaluation.layouts import lines
from tests.evaluation.layouts.lines import read, write


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of prompts of ours, which HELMET's layout takes as if they were those of its commit."""

    def unchecked(setup: Setup) -> Reader:
        return helmet.reader(setup, load(helmet.PUBLISHED, setup))

    of_ours = Layout(**{**vars(helmet.LAYOUT), "open": unchecked})
    monkeypatch.setitem(registry.LAYOUTS, "helmet", of_ours)
    return lines.published(tmp_path / "clones")


def one_of(path: Path, layout: str | None = None, **setup: Any) -> Example:
    (example,) = read(path, layout, **setup).examples
    assert example.scoring in METRICS or example.scoring == "all"
    return example


# The six lines that were read wrong once: a field of each was dropped, and a score came all the same.


def test_kvpress_answer_prefix_begins_the_answer(tmp_path: Path) -> None:
    example = one_of(write(tmp_path / "data.jsonl", lines.KVPRESS))
    assert example.context == "The lamp is kept by Ada.\n"
    assert example.question == "Who keeps the lamp?\nThe lamp is kept by"
    assert example.chat == Chat("Who keeps the lamp?", "The lamp is kept by")
    assert (example.limit, example.scoring, example.task) == (32, "kvpress/ruler/part", "ruler/qa_1")


def test_longbench2_shows_the_choices(tmp_path: Path, clones: Path) -> None:
    example = one_of(write(tmp_path / "data.json", lines.LONGBENCH2), templates=clones)
    assert example.context == "Read.\nThe lamp is kept by Ada."
    assert example.question == "\nQ: Who keeps the lamp?\n(A) Ada (B) Bo (C) Cy (D) Di\nSay it."
    assert metric_score(example.scoring, "The correct answer is (A)", example.answers, {}) == 1
    assert metric_score(example.scoring, "A", example.answers, {}) == 0, "the letter alone is no answer of its form"


def test_mrcr_is_a_conversation(tmp_path: Path) -> None:
    path = write(tmp_path / "2needle.jsonl", lines.MRCR)
    example = one_of(path, chat=True)
    before = (("user", "write a line about lamps"), ("assistant", "A lamp is warm."))
    assert example.chat == Chat("Prepend aB3 to the 1st line about lamps.", before=before)
    assert (example.scoring, example.reference) == ("mrcr/similarity", {"prefix": "aB3"})
    with pytest.raises(ValueError, match="its prompts are conversations: ask them with --chat"):
        read(path)
    with pytest.raises(ValueError, match="line 1: the layout plain does not handle the field random_string_to_prepend"):
        read(path, "plain")
    bare = write(tmp_path / "bare.jsonl", {"prompt": lines.MRCR["prompt"], "answer": "A lamp is warm."})
    with pytest.raises(
        ValueError, match="line 1: prompt is a conversation, not a text: the layout mrcr reads such lines"
    ):
        read(bare)


def test_infinitebench_shows_the_options(tmp_path: Path, clones: Path) -> None:
    path = write(tmp_path / "longbook_choice_eng.jsonl", lines.INFINITEBENCH)
    example = one_of(path, templates=clones)
    assert example.question == "\nQ: Who keeps the lamp? A. Ada B. Bo C. Cy D. Di:"
    assert (example.limit, example.reference) == (40, {"label": ["Ada", "A"]})
    with pytest.raises(ValueError, match="line 1: the layout plain does not handle the field options, which changes"):
        read(path, "plain")


def test_helmet_shows_its_demos(tmp_path: Path, clones: Path) -> None:
    path = write(tmp_path / "json_kv" / "test_k3_dep6.jsonl", lines.HELMET)
    example = one_of(path, templates=clones)
    shown = "Key: b\nCorresponding value: 2\n\nKey: c\nCorresponding value: 3\n\n"
    assert example.context == lines.HELMET["context"]
    assert example.question == f"\n\nExtract.\n\n{shown}Key: a\nCorresponding value:"
    assert example.chat == Chat(f"\n\nExtract.\n\n{shown}Key: a")
    assert example.reference == {"begun": "Corresponding value:", "lead": "corresponding value:"}
    with pytest.raises(ValueError, match="line 1: the layout plain does not handle the field demos"):
        read(path, "plain")


def test_lm_evals_ruler_has_its_prefix(tmp_path: Path) -> None:
    line = {name: lines.RULER[name] for name in ("index", "input", "outputs", "length")}
    path = write(tmp_path / "data.jsonl", {**line, "gen_prefix": "Answer:", "max_length": 4096})
    example = one_of(path, "ruler:qa_1")
    assert example.question == "Answer from the text.\n\nQuestion: Who keeps the lamp? Answer:"
    assert example.context == "Read.\n\nDoc 1: The lamp is kept by Ada.\n\n"


def test_ruler_by_the_name_of_its_folder(tmp_path: Path) -> None:
    example = one_of(write(tmp_path / "qa_2" / "validation.jsonl", lines.RULER))
    assert (example.task, example.limit, example.scoring) == ("ruler/qa_2", 32, "ruler/part")
    assert example.chat == Chat("Answer from the text.\n\nQuestion: Who keeps the lamp?", " Answer:")
    needle = {**lines.RULER, "input": "Look.\nThe key is 7.\nWhat is the key?", "answer_prefix": " The key is"}
    example = one_of(write(tmp_path / "niah_single_1" / "validation.jsonl", needle))
    assert (example.context, example.question) == ("Look.\nThe key is 7.\n", "What is the key? The key is")
    assert (example.limit, example.scoring) == (128, "ruler/all")


def test_babilong(tmp_path: Path, clones: Path) -> None:
    example = one_of(write(tmp_path / "qa1" / "4k.jsonl", lines.BABILONG), templates=clones)
    whole = example.context + example.question
    assert whole == (
        "Say where.\nAnn is out. So: out.\nOne word.\n<context>\nMary went to the kitchen. It rained.\n</context>\n"
        "Q: Where is Mary?"
    )
    assert example.context.endswith("It rained."), "all behind the context is the question"
    assert metric_score(example.scoring, "In the kitchen.", example.answers, example.reference) == 1


def test_infinitebench_of_numbers(tmp_path: Path, clones: Path) -> None:
    call = {**lines.INFINITEBENCH, "input": "What does func_3(-2) return?", "answer": ["4"], "options": []}
    example = one_of(write(tmp_path / "code_run.jsonl", call), templates=clones)
    assert example.context.startswith("There is func_3.\n")
    assert example.question == "\nThe value of func_3(-2) is"
    assert example.reference == {"label": [4]}, "a table's text of a number is a number"
    asked = "Which? The largest number of the list is:"
    find = {**lines.INFINITEBENCH, "input": asked, "answer": 88, "options": []}
    example = one_of(write(tmp_path / "math_find.jsonl", find), templates=clones)
    assert example.context.startswith("What is the largest number in the following list?\n")
    assert (example.question, example.reference) == (f"\n{asked}", {"label": 88})


def passages(*texts: str) -> list[dict[str, Any]]:
    return [{"id": str(i), "title": "T", "text": words, "label": i} for i, words in enumerate(texts)]


def test_helmet_draws_examples_from_a_second_file(tmp_path: Path, clones: Path) -> None:
    demos = write(
        tmp_path / "demos.jsonl",
        *({"question": f"d{i}", "answers": [f"a{i}"], "ctxs": passages(f"p{i}")} for i in range(9)),
    )
    line = {"question": "Who?", "answers": [["Ada"], ["Ada Byron"]], "ctxs": passages("x", "y")}
    path = write(tmp_path / "kilt" / "nq-dev-multikilt_1000_k2_dep0.jsonl", line)
    example = one_of(path, templates=clones, demos=demos)
    shown = re.findall(r"Q: d(\d)\nAnswer: a(\d)", example.context)
    assert len(set(shown)) == 2
    assert all(a == b for a, b in shown)
    assert example.context.endswith("\n\nDoc (T): x\n\nDoc (T): y")
    assert example.question == "\n\nQ: Who?\nAnswer:"
    assert (example.answers, example.limit, example.one_line) == (("Ada", "Ada Byron"), 20, True)
    with pytest.raises(
        ValueError, match="line 1: its examples come from a second file of HELMET's: name it with --demos"
    ):
        read(path, templates=clones)
    for damaged, said in (
        ({"answers": ["a"], "ctxs": passages("p"), "id": 3}, "it has no 'question'"),
        ({"question": "q", "answers": ["a"], "ctxs": [{"text": "p"}]}, "a passage of ctxs has what"),
    ):
        demos = write(tmp_path / "demos.jsonl", damaged, {**damaged, "question": "other"})
        with pytest.raises(ValueError, match=rf"line 1: example \d of .*demos.jsonl: {said}"):
            read(path, templates=clones, demos=demos)
    kept = {"question": "q", "answers": ["a1"], "answer": "a2", "ctxs": passages("p")}
    demos = write(tmp_path / "demos.jsonl", kept, {**kept, "question": "other"})
    assert one_of(path, templates=clones, demos=demos).context.count("Answer: a1") == 2
    asked = write(tmp_path / "kilt" / "nq-dev-multikilt_1000_k9_dep0.jsonl", {"query": "q", "ctxs": passages("p")})
    with pytest.raises(ValueError, match="line 1: question is text that is not empty, got None"):
        read(asked, templates=clones, demos=demos)


def test_helmet_ranks_and_leaves_popular_questions_out(tmp_path: Path, clones: Path) -> None:
    ranked = [{"qid": str(i), "query": f"q{i}", "ctxs": passages("x", "y", "z")} for i in range(5)]
    path = write(tmp_path / "msmarco" / "test.jsonl", ranked[0])
    example = one_of(path, templates=clones, demos=write(tmp_path / "ranked.jsonl", *ranked[1:]))
    assert example.reference["labels"] == {"0": 0, "1": 1, "2": 2}
    assert example.context.count("Ranking: 2 > 1 > 0") == 2
    assert metric_score(example.scoring, " 2 > 1 > 0", example.answers, example.reference) == 1

    asked = [
        {"id": str(i), "question": f"q{i}", "answers": ["a"], "ctxs": passages("x"), "s_pop": popular}
        for i, popular in enumerate((10, 1000, 999, 20))
    ]
    demos = write(tmp_path / "all.jsonl", *asked)
    file = read(write(tmp_path / "kilt" / "popqa_test_1000_k1_dep0.jsonl", *asked), templates=clones, demos=demos)
    assert ([example.meta["line"] for example in file.examples], file.left_out) == ([1, 3, 4], 1)
    assert all("q1" not in example.context for example in file.examples)


def test_helmets_ruler(tmp_path: Path, clones: Path) -> None:
    line = {"context": "VAR A = 7", "query": "7", "num_v": 1, "example": "Like so.", "outputs": ["A"]}
    example = one_of(write(tmp_path / "vt" / "validation_8192.jsonl", line), templates=clones)
    assert (example.task, example.context) == ("helmet/ruler_vt", "Like so.\n\nTrack.\nVAR A = 7")
    assert example.question == "\nQ: 7\nAnswer: 1 of 7:"
    assert metric_score(example.scoring, " B", example.answers, example.reference) == 1, (
        "RULER's match, with the beginning"
    )


def test_helmet_takes_its_own_file_of_prompts_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "json_kv" / "test.jsonl", lines.HELMET)
    with pytest.raises(
        ValueError, match=r"told apart by their order in data.py, and this file is not that of commit 4526dfb"
    ):
        read(path, templates=lines.published(tmp_path / "clones"))


ALL = {
    "longbench": ("data.jsonl", lines.LONGBENCH),
    "longbench2": ("data.jsonl", lines.LONGBENCH2),
    "kvpress": ("data.jsonl", lines.KVPRESS),
    "ruler": ("qa_1/validation.jsonl", lines.RULER),
    "mrcr": ("data.jsonl", lines.MRCR),
    "infinitebench": ("longbook_choice_eng.jsonl", lines.INFINITEBENCH),
    "helmet": ("json_kv/test.jsonl", lines.HELMET),
    "babilong": ("qa1/4k.jsonl", lines.BABILONG),
    "plain": ("data.jsonl", {"context": "C", "question": "Q?", "answers": "a"}),
}


@pytest.mark.parametrize("layout", ALL)
def test_the_layout_is_told_from_the_fields(layout: str, tmp_path: Path, clones: Path) -> None:
    name, line = ALL[layout]
    file = read(write(tmp_path / name, line), templates=clones, chat=True)
    assert (file.layout, file.guessed) == (layout, True)
    assert file.examples[0].meta["layout"] == layout
    assert set(ALL) == set(registry.LAYOUTS)


DROPPED = [
    (name, field)
    for name, layout in registry.LAYOUTS.items()
    for field in sorted(registry.MATTERS)
    if field not in layout.reads | layout.idle
]


@pytest.mark.parametrize(("layout", "field"), DROPPED)
def test_a_field_that_another_layout_reads_is_refused(layout: str, field: str, tmp_path: Path, clones: Path) -> None:
    """No field that makes a prompt or a score elsewhere is dropped in silence."""
    name, line = ALL[layout]
    path = write(tmp_path / name, {**line, field: "x"})
    with pytest.raises(
        ValueError, match=f"line 1: the layout {layout} does not handle the field {field}, which changes"
    ):
        read(path, layout, templates=clones, chat=True)


def test_lines_of_two_layouts_are_refused(tmp_path: Path, clones: Path) -> None:
    path = write(tmp_path / "data.jsonl", lines.LONGBENCH, lines.LONGBENCH, lines.LONGBENCH2)
    sentence = (
        "line 3: its fields are those of the layout longbench2, and those of line 1 of longbench: a file has lines"
    )
    with pytest.raises(ValueError, match=sentence):
        read(path, templates=clones)


@pytest.mark.parametrize(
    ("layout", "line", "sentence"),
    [
        (
            "kvpress",
            {**lines.KVPRESS, "task": "shortdep_qa"},
            "there is no metric for the task 'shortdep_qa' of kvpress",
        ),
        ("kvpress", {**lines.KVPRESS, "max_new_tokens": 0}, "max_new_tokens is a whole number of 1 or more, got 0"),
        ("kvpress", {**lines.KVPRESS, "answer": ""}, "answers are .* under answer, .* got ''"),
        ("kvpress", {**lines.KVPRESS, "task": "code_run"}, "kvpress has no score for InfiniteBench's code_run"),
        ("longbench2", {**lines.LONGBENCH2, "answer": "E"}, "the answer is one of the letters A, B, C, D, got 'E'"),
        ("longbench2", {**lines.LONGBENCH2, "choice_C": None}, "choice_C is text that is not empty, got None"),
        (
            "ruler",
            {**lines.RULER, "gen_prefix": "Answer:"},
            "an answer has one beginning, got answer_prefix and gen_prefix",
        ),
        ("ruler", {**lines.RULER, "input": "Who?"}, "a prompt of qa_1 ends with 2 paragraph"),
        ("mrcr", {**lines.MRCR, "prompt": "Hello"}, "it is not JSON"),
        ("mrcr", {**lines.MRCR, "prompt": json.dumps(lines.TURNS[:2])}, "the last turn of the prompt is the user's"),
        ("mrcr", {**lines.MRCR, "answer": "A lamp"}, "the answer begins with random_string_to_prepend"),
        (
            "infinitebench",
            {**lines.INFINITEBENCH, "options": ["a"]},
            "options is a list of 4 texts, none of them empty",
        ),
        (
            "infinitebench",
            {**lines.INFINITEBENCH, "answer": ["Eve"]},
            "the answer of longbook_choice_eng is one of the opt",
        ),
        ("helmet", {**lines.HELMET, "demos": [["b", "2"]]}, "demos are 2 pairs of key and value or more"),
        ("helmet", {"docs": [], "question": "Q"}, "docs are of ALCE, whose citations HELMET has a model judge"),
        (
            "babilong",
            {**lines.BABILONG, "target": " "},
            "answers are a string .* under target, none of them empty, got ' '",
        ),
    ],
)
def test_unusable_lines_are_named(layout: str, line: Any, sentence: str, tmp_path: Path, clones: Path) -> None:
    path = write(tmp_path / ALL[layout][0], ALL[layout][1], line)
    with pytest.raises(ValueError, match=f"line 2: .*{sentence}"):
        read(path, layout, templates=clones, chat=True)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("longbnech", r"there is no layout 'longbnech' \(did you mean 'longbench2?'\?\), there are babilong, "),
        ("ruler:niah", r"ruler has no task 'niah'.*, it has niah_single_1"),
        (
            "ruler",
            "which task of ruler it is decides how it is asked and scored, and 'data' or .* is none: give --layout",
        ),
    ],
)
def test_unknown_layouts_and_tasks_are_a_sentence(layout: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(write(tmp_path / "data.jsonl", lines.RULER), layout)


def more_lines() -> list[tuple[str, str, dict[str, Any]]]:
    """Lines of every kind that a layout has: layout, name of the file, fields."""
    asked = {"question": "q", "answers": ["a"], "ctxs": passages("x", "y"), "s_pop": 10, "id": "7"}
    helmets = {"context": "C", "query": "7", "type_needle_v": "n", "num_v": 1, "example": "E", "outputs": ["A"]}
    return [
        *((layout, *held) for layout, held in ALL.items()),
        ("longbench", "trec.jsonl", {**lines.LONGBENCH, "dataset": "trec", "all_classes": ["a", "b"]}),
        ("kvpress", "l.jsonl", {**lines.KVPRESS, "task": "trec", "answers": ["a"], "all_classes": ["a"]}),
        ("kvpress", "i.jsonl", {**lines.KVPRESS, "task": "passkey"}),
        ("kvpress", "v.jsonl", {**lines.KVPRESS, **{f"choice_{letter}": "c" for letter in "ABCD"}}),
        ("infinitebench", "code_run.jsonl", {**lines.INFINITEBENCH, "input": "func_3(-2)", "answer": 4}),
        ("infinitebench", "math_find.jsonl", {**lines.INFINITEBENCH, "input": "The first of", "answer": [4.5]}),
        ("infinitebench", "math_calc.jsonl", {**lines.INFINITEBENCH, "answer": [[1, 2]], "options": []}),
        ("infinitebench", "longbook_qa_eng.jsonl", {**lines.INFINITEBENCH, "options": []}),
        ("infinitebench", "kv_retrieval.jsonl", {**lines.INFINITEBENCH, "options": []}),
        ("longbench", "p.jsonl", {**lines.LONGBENCH, "dataset": "passage_retrieval_en", "answers": ["Paragraph 3"]}),
        ("infinitebench", "passkey.jsonl", {**lines.INFINITEBENCH, "answer": "71432"}),
        ("helmet", "vt/v.jsonl", helmets),
        ("helmet", "niah_multivalue/v.jsonl", helmets),
        ("helmet", "kilt/popqa_test_1.jsonl", asked),
        ("helmet", "kilt/nq-dev.jsonl", asked),
        ("helmet", "msmarco/m.jsonl", {"qid": "7", "query": "q", "ctxs": passages("x", "y")}),
    ]


ODD = (
    None,
    "",
    " ",
    "x",
    0,
    -1,
    2.5,
    float("nan"),
    10**400,
    True,
    [],
    [None],
    [1],
    ["x"],
    [[]],
    [{}],
    {},
    {"a": 1},
    "\0",
)


@pytest.mark.parametrize(("layout", "name", "line"), more_lines())
def test_odd_fields_are_an_example_or_a_sentence(
    layout: str, name: str, line: dict[str, Any], tmp_path: Path, clones: Path
) -> None:
    """Whatever a field holds: no other error, neither where a line is read nor where a response is scored."""
    shown = [
        {
            "question": f"d{i}",
            "qid": f"d{i}",
            "id": f"d{i}",
            "query": "q",
            "answers": ["b"],
            "ctxs": passages("z"),
            "s_pop": 1,
        }
        for i in range(3)
    ]
    demos = write(tmp_path / "demos.jsonl", *shown)
    made = 0
    for field, value in itertools.product(line, ODD):
        path = write(tmp_path / name, {**line, field: value})
        examples: Sequence[Example] = ()
        with contextlib.suppress(ValueError):
            examples = read(path, layout, templates=clones, demos=demos, chat=True).examples
        for example in examples:
            made += 1
            for response in ("", "x", "A > 1 2.5 (A)", "Paragraph 7") if example.scoring in METRICS else ():
                score = metric_score(example.scoring, response, example.answers, example.reference)
                assert 0 <= score <= 1, (field, value)
    assert made, "some changes leave a usable line"
