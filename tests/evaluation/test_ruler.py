"""RULER's tasks: its generator's prompts, within the length, with their answers in the context; and its metric."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from sparseattn.evaluation.metrics.registry import METRICS
from sparseattn.evaluation.ruler import words as words_module
from sparseattn.evaluation.ruler.documents import read_questions
from sparseattn.evaluation.ruler.needles import PLACES
from sparseattn.evaluation.ruler.sentences import Sentences
from sparseattn.evaluation.ruler.tasks import CWE, ESSAYS, FWE, QA, TEMPLATES, VT, Material, examples
from sparseattn.evaluation.ruler.templates import HIDDEN
from sparseattn.evaluation.ruler.words import Names, WordLists
from sparseattn.evaluation.tasks.base import Example, byte_count
from sparseattn.evaluation.tasks.run import ending, scored
from sparseattn.traces import texts
from tests.command import run
from tests.evaluation.ruler_material import hotpotqa, material, squad, words

NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.")


@pytest.fixture(scope="module")
def all_material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return material(tmp_path_factory.mktemp("ruler"))


def made(task: str, length: int, of: Material, n: int = 3, seed: int = 42) -> list[Example]:
    return list(islice(examples(task, length, of, count=words, seed=seed), n))


# Digests of what RULER's scripts (commit c3f5e3b) wrote with the tokenizer, words, text and questions of these tests.
THEIRS = {
    ("niah_single_1", 2048, 42): "6965951e295034d6",
    ("niah_single_2", 2048, 42): "0c5f1c6e09a58b4c",
    ("niah_single_3", 2048, 42): "bbdd650b8874a65f",
    ("niah_multikey_1", 2048, 42): "3d6e61d5b7391441",
    ("niah_multikey_2", 2048, 42): "914082abf2ea47d0",
    ("niah_multikey_3", 2048, 42): "b5a80826a280fa3b",
    ("niah_multivalue", 2048, 42): "84eac251e662546e",
    ("niah_multiquery", 2048, 42): "0d3e3ca897674478",
    ("vt", 2048, 42): "e7aea06c8df4c90c",
    ("cwe", 2048, 42): "2471079478d88004",
    ("fwe", 2048, 42): "e05d064f5d3ba6ef",
    ("qa_1", 2048, 42): "49121faa207eb6d7",
    ("qa_2", 2048, 42): "4f1997e05f5ae657",
    ("niah_single_1", 4096, 7): "0fb38593a5783cce",
    ("niah_single_2", 4096, 7): "55368d1073e25093",
    ("niah_single_3", 4096, 7): "4e9473e3915a3b79",
    ("niah_multikey_1", 4096, 7): "c2a5f643d7497cb1",
    ("niah_multikey_2", 4096, 7): "a52f99a8e26c1f11",
    ("niah_multikey_3", 4096, 7): "f88fcd318e524b79",
    ("niah_multivalue", 4096, 7): "03b70bc12f38626d",
    ("niah_multiquery", 4096, 7): "5eb28c706862f4a2",
    ("vt", 4096, 7): "28dc9a8e6000415a",
    ("cwe", 4096, 7): "0cdf5c2cb0a2d48e",
    ("fwe", 4096, 7): "57ebedb5a1d28f37",
    ("qa_1", 4096, 7): "f0ebbb57159532bd",
    ("qa_2", 4096, 7): "709e1bcc8e5dad22",
}


@pytest.mark.parametrize(("task", "length", "seed"), THEIRS)
def test_prompts_are_rulers_letter_for_letter(
    task: str, length: int, seed: int, all_material: Material, tmp_path: Path
) -> None:
    of = material(tmp_path, hotpotqa()) if task == "qa_2" else all_material
    ours = made("ruler/" + re.sub(r"^qa_\d$", "qa", task), length, of, seed=seed)
    text = json.dumps(
        [[(one.context + one.question).removesuffix(one.lead), one.lead, list(one.answers)] for one in ours]
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == THEIRS[task, length, seed]


@pytest.mark.parametrize("task", TEMPLATES)
@pytest.mark.parametrize("length", [1900, 2048, 4096])
def test_prompt_and_answer_fit_the_length(task: str, length: int, all_material: Material) -> None:
    for one in made(task, length, all_material):
        tokens = words(one.context) + words(one.question) + TEMPLATES[task].answer_tokens
        assert length // 4 < tokens <= length
        assert one.limit == TEMPLATES[task].answer_tokens
        assert one.question.endswith(one.lead)


def test_what_a_tokenizer_puts_around_a_prompt_counts(all_material: Material) -> None:
    tight = next(examples("ruler/niah_single_1", 2048, all_material, count=words, spare=300, answer_tokens=20))
    assert words(tight.context) + words(tight.question) + 20 + 300 <= 2048
    assert tight.limit == 20


@pytest.mark.parametrize("task", TEMPLATES)
def test_one_seed_gives_one_row_of_prompts(task: str, all_material: Material) -> None:
    three = made(task, 2048, all_material, 3)
    assert made(task, 2048, all_material, 2) == three[:2]
    assert [one.meta["sample"] for one in three] == [0, 1, 2]
    assert len({one.context for one in three}) == 3
    assert made(task, 2048, all_material, 3, seed=7)[0].context != three[0].context


@pytest.mark.parametrize("name", HIDDEN)
def test_needles_are_in_the_context_and_one_or_more_are_asked_for(name: str, all_material: Material) -> None:
    hidden = HIDDEN[name]
    for one in made(f"ruler/{name}", 2048, all_material):
        found = NEEDLE.findall(one.context)
        distractors = one.meta["distractors"] if hidden.haystack == "needle" else 0
        assert len(found) == hidden.named * hidden.each + distractors
        asked = re.search(r"special magic \w+ for (.*) mentioned in the provided text\?", one.question)
        assert asked is not None
        keys = re.split(r", (?:and )?", asked[1])
        assert len(set(keys)) == hidden.asked
        assert set(one.answers) == {value for key, value in found if key in keys}
        assert len(one.answers) == hidden.asked * hidden.each


def test_needles_lie_at_all_depths(all_material: Material) -> None:
    for task in ("ruler/niah_single_1", "ruler/niah_single_2", "ruler/niah_multikey_2"):
        depths = [
            one.context.index(one.answers[0]) / len(one.context)
            for one in made(task, 1500 if task in ESSAYS else 1000, all_material, 60)
        ]
        fifths = Counter(min(int(5 * depth), 4) for depth in depths)
        assert set(fifths) == set(range(5))
        assert max(fifths.values()) < 30


def test_needles_in_a_text_lie_between_its_sentences(all_material: Material) -> None:
    assert PLACES[:3] == [0, 3, 5]
    assert (len(PLACES), PLACES[-1]) == (40, 100)
    one = made("ruler/niah_multivalue", 3000, all_material, 1)[0]
    head, _, context = one.context.partition("\n")
    text = " ".join(all_material.text.split())
    pieces = [piece.strip() for piece in NEEDLE.split(context)[::3]]
    assert text.startswith(" ".join(piece for piece in pieces if piece))
    assert all(piece[-1] in ".!?'\")" for piece in pieces[:-1] if piece)
    assert "numbers" in head


def test_a_text_begins_anew_behind_its_end() -> None:
    sentences = Sentences(["Dr.", "Low", "sat.", "Rain", "fell."])
    assert sentences.of_words(5) == ["Dr. Low sat.", "Rain fell."]
    assert sentences.of_words(8) == ["Dr. Low sat.", "Rain fell.", "Dr. Low sat."]


def test_variables_are_those_that_the_assignments_give(all_material: Material) -> None:
    for one in made(VT, 2048, all_material):
        shown, _, asked_of = one.context.rpartition("Memorize and track")
        values: dict[str, str] = {}
        for name, given in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", asked_of):
            values[name] = values.get(given, given)
        asked = re.search(r"assigned the value (\d{5}) in", one.question)
        assert asked is not None
        assert {name for name, value in values.items() if value == asked[1]} == set(one.answers)
        assert len(one.answers) == 5
        assert "12345" not in shown
        assert re.search(r"they are:  (?:[A-Z]{3} ){4}[A-Z]{3}\n\n$", shown)


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_most_frequent(length: int, often: int, seldom: int, all_material: Material) -> None:
    for one in made(CWE, length, all_material):
        counts = Counter(re.findall(r"\d+\. (\S+)", one.context.rpartition("Below is")[2]))
        assert {word for word, times in counts.items() if times == often} == set(one.answers)
        assert Counter(counts.values()) == {often: 10, seldom: one.meta["distractors"] - 10}


def test_frequent_words_are_those_behind_the_dots(all_material: Material) -> None:
    for one in made(FWE, 4096, all_material):
        counts = Counter(one.context.partition("coded words. ")[2].split()).most_common(5)
        assert [word for word, _ in counts[:4]] == ["...", *one.answers]
        assert counts[3][1] > counts[4][1]


def test_documents_hold_those_of_the_question(tmp_path: Path) -> None:
    for held in (squad(), hotpotqa()):
        of = material(tmp_path, held)
        assert of.questions is not None
        for number, one in enumerate(made(QA, 3000, of, 5)):
            question = of.questions.questions[number]
            documents = re.split(r"(?:^|\n\n)Document \d+:\n", one.context.partition("documents.\n\n")[2])[1:]
            assert len(documents) == one.meta["distractors"]
            assert {of.questions.documents[own] for own in question.own} <= set(documents)
            assert one.answers == question.answers
            assert one.question.endswith(f"Question: {question.words} Answer:")
            assert one.scoring == "ruler/part"


def test_questions_with_more_documents_than_a_step_are_asked(tmp_path: Path) -> None:
    held = hotpotqa()
    for item in held:
        item["context"] = [[f"{title} {n}", sentences] for n in (1, 2) for title, sentences in item["context"]]
    assert max(len(item["context"]) for item in held) > 10
    for item, example in zip(held, made(QA, 6000, material(tmp_path, held), 2), strict=False):
        assert all(f"{title}\n{''.join(sentences)}" in example.context for title, sentences in item["context"])


def test_no_more_questions_than_the_file_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"questions\.json holds 20 questions, asked for 21 or more"):
        made(QA, 3000, material(tmp_path, hotpotqa()), 21)


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        ('{"data": [', "it is not JSON at column 11"),
        ('[{"question": "\\ud800"}]', "half of a surrogate pair"),
        ("[" * 200, "nested more than 100 deep"),
        ('{"data": [{"paragraphs": [{"context": 1, "qas": []}]}]}', "a document is text"),
        ('{"text": "an essay"}', "it is neither"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "a part of it has no 'context'"),
        ('[{"question": "who?", "answer": "", "context": []}]', "a question is text with one answer or more"),
        ('{"data": []}', "holds no question that has an answer"),
        ("[1]", "is none of SQuAD's form"),
    ],
)
def test_files_of_another_form_are_refused(held: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text(held)
    with pytest.raises(ValueError, match=sentence):
        read_questions(path)


def test_names_are_those_of_all_pairs_sorted() -> None:
    adjectives = ["blue", "blue-eyed", "bl", "black", "blue-eyed-grey", "red", "blue", "b"]
    nouns = ["ant", "eyed", "eyed-owl", "zebra", "ant", "-x", "eyed-grey"]
    names = Names(adjectives, nouns)
    assert list(names) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert names[3:5] == [names[3], names[4]]
    with pytest.raises(IndexError):
        names[len(names)]


def test_word_lists_are_those_of_the_pinned_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"verb": "run\ngo\n", "adjective": "old \nblue-eyed\n", "profanity": "bother\n", "noun": "owl\n"}

    def fetched(package: str, version: str, size: int, work: Path, *told: object) -> Path:
        assert (package, version) == ("wonderwords", "2.2.0")
        with zipfile.ZipFile(work / "words.whl", "w") as file:
            for name, held in lists.items():
                file.writestr(f"wonderwords/assets/{name}list.txt", held)
        return work / "words.whl"

    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(texts, "wheel", fetched)
    with pytest.raises(ValueError, match="from the package index gives a text of SHA-256"):
        WordLists.read()
    joined = "\n".join((lists["adjective"], lists["noun"], lists["verb"]))
    pinned = replace(words_module.LISTS, sha256=hashlib.sha256(joined.encode()).hexdigest())
    monkeypatch.setattr(words_module, "LISTS", pinned)
    read = WordLists.read()
    assert (read.adjectives, read.nouns, read.verbs) == (["old", "blue-eyed"], ["owl"], ["run", "go"])
    assert read.all == ["blue-eyed", "go", "old", "owl", "run"]
    assert list(read.names) == ["blue-eyed-owl", "old-owl"]


def test_the_metric_is_rulers(all_material: Material) -> None:
    for task in TEMPLATES:
        assert made(task, 2048, all_material, 1)[0].scoring in METRICS
    one = made(VT, 2048, all_material, 1)[0]
    assert scored(one, f"x{one.answers[0].lower()}x\n\n{one.answers[1]}")["score"] == 0.4


def test_responses_go_on_behind_a_line(all_material: Material) -> None:
    ended = ending(made(VT, 2048, all_material, 1)[0])
    assert not ended("AAAAA\nBBBBB")


def test_refused_lengths_and_names(all_material: Material) -> None:
    for task in TEMPLATES:
        with pytest.raises(ValueError, match=f"no prompt of {task} with .* fits in a length of 200"):
            made(task, 200, all_material)
    with pytest.raises(ValueError, match="there is no task 'ruler/niah' of RULER's, there are ruler/niah_single_1"):
        made("ruler/niah", 2048, all_material)


def test_lists_longer_than_wonderwords_need_a_file(all_material: Material) -> None:
    few = WordLists(["old"], [f"n{number}" for number in range(300)], ["go"])
    with pytest.raises(ValueError, match=r"a list of 4096 words is drawn, and there are 302: it needs a file of more"):
        made(CWE, 2048, Material(few))
    more = Material(few, more_words=[f"w{number}" for number in range(5000)])
    assert made(CWE, 4096, more, 1)[0].answers[0].startswith("n")  # the list itself is short
    assert made(CWE, 2048, Material(WordLists([], [], []), more_words=more.more_words), 1)[0].answers[0][0] == "w"


def test_punkt_is_asked_for_by_name(all_material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "punkt", None)
    with pytest.raises(ImportError, match=r"sparseattn\[ruler\]"):
        made("ruler/niah_single_2", 2048, all_material)
    assert made("ruler/niah_single_1", 2048, all_material)


def test_eval_records_rulers_score_and_seed(tmp_path: Path) -> None:
    asked = [{"question": f"{n}?", "answer": "yes", "context": [[f"{n}", [str(i)]] for i in range(10)]} for n in "ab"]
    (tmp_path / "qa.json").write_text(json.dumps(asked))
    options = ["--samples", 2, "--answer-tokens", 4, "--selector", "window", "--no-figures", "--out", tmp_path]
    options += ["--protocol", "prefill"]  # whose questions are not fed token by token
    done = run("eval --model reference --task ruler/fwe,ruler/qa --lengths 800", *options, "--qa", tmp_path / "qa.json")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(one["task"], one["sample"]) for one in records] == [
        (task, sample) for task in ("ruler/fwe", "ruler/qa") for sample in (0, 0, 1, 1)
    ]
    assert {(one["seed"], one["depth"], one["length"]) for one in records} == {(42, None, 800)}
    assert {one["scoring"] for one in records} == {"ruler/all", "ruler/part"}
    assert {one.get("file") for one in records} == {None, "qa.json"}
    assert all(0 <= one["score"] <= 1 and one["prompt_tokens"] + 4 <= 800 for one in records)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--task ruler/qa", "--task ruler/qa needs --qa, and only that task takes it"),
        ("--task ruler/fwe --qa qa.json", "--task ruler/qa needs --qa, and only that task takes it"),
        ("--task ruler/fwe --ruler-words words.json", "only --task ruler/cwe takes --ruler-words"),
        ("--task ruler/fwe --lengths 300", "--lengths 300: no prompt of ruler/fwe with 50 tokens for its answer fits"),
        ("--task ruler/qa --qa qa.json --samples 999", "questions with answers, fewer than --samples 999"),
        ("--task passkey --filler text.json", 'a .json file must have the form {"text": "..."}'),
        ("--task ruler/cwe --ruler-words words.json", "--ruler-words words.json must be a list of words, or an object"),
        ("--task ruler/cwe --ruler-words none.json", "--ruler-words none.json: it is not JSON at column 2"),
        ("--task passkey --filler none.json", "--filler none.json: it is not JSON at column 2"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    options: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qa.json").write_text(json.dumps(squad()))
    (tmp_path / "text.json").write_text('{"words": "no text"}')
    (tmp_path / "none.json").write_text("{")
    (tmp_path / "words.json").write_text("[]")
    done = run(f"eval --model reference --out out {options}")
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())


def test_an_example_that_no_length_holds_is_said(all_material: Material) -> None:
    sentence = (
        "no length holds a prompt of ruler/vt with this tokenizer: RULER shows an example of at most 500 tokens first"
    )
    with pytest.raises(ValueError, match=sentence):
        next(examples(VT, 8000, all_material, count=byte_count))
