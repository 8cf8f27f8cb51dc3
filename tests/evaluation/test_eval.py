"""`sparseattn eval`: protocols, one prefill for all methods, resumption, tables and figures; and real small models."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner, Result

from sparseattn import SAAP, Quest, Selector, Window
from sparseattn.cli.app import app
from sparseattn.core.budget import Budget
from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.compared import FORCED, FULL, PROTOCOLS
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import KEY
from sparseattn.evaluation.tasks.registry import TASKS, example
from sparseattn.evaluation.tasks.run import Method, measure
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.load import load_model
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.reporting import eval_tables as report
from sparseattn.reporting.eval_records import by_place
from sparseattn.reporting.terminal import WIDE
from sparseattn.roles.roles import Roles
from sparseattn.selectors.parameters.saap_artefact import locate
from sparseattn.utils.locks import locked
from tests.evaluation.byte_llama import save_byte_llama

BYTES = Tokens(None)
METHODS = [Method(), Method(Quest(), 64, "64"), Method(Quest(), 256, "256"), Method(Window())]


class Scripted:
    """A decoder that answers from a script by method, and writes down what it is asked to do."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.reads: list[str] = []
        self.indexed: list[tuple[str, str]] = []
        self.fed: dict[tuple[str, Budget, str], str] = {}

    def read(self, tokens: Sequence[int]) -> str:
        self.reads.append(BYTES.text(tokens))
        return BYTES.text(tokens)

    def index(
        self,
        prefill: Any,
        tail: Sequence[int],
        selector: Selector | None,
        layers: Sequence[int] | None = None,
        bits: int | None = None,
    ) -> tuple[str, str]:
        label = FULL if selector is None else selector.label()
        self.indexed.append((label, prefill + BYTES.text(tail)))
        return self.indexed[-1]

    def start(self, indexed: Any, budget: Budget) -> Any:
        (label, prefill), decoder, said = indexed, self, 0
        place = (label, budget, prefill)
        self.fed[place] = ""

        class Session:
            def feed(self, tokens: Sequence[int]) -> Tensor:
                return torch.stack([self.step(token) for token in tokens])

            def step(self, token: int) -> Tensor:
                nonlocal said
                decoder.fed[place] += chr(token)
                answer = decoder.answers[label].encode() + b"\0"
                told = (prefill + decoder.fed[place]).encode()
                said = said + 1 if told[: len(QUESTION)] == QUESTION and len(told) > len(QUESTION) else 0
                return torch.nn.functional.one_hot(torch.tensor(answer[min(said, len(answer) - 1)]), 256).float()

            def facts(self) -> dict[str, Any]:
                return {"rows": len(decoder.fed[place])}

        return Session()


CONTEXT, ASKED = "key:71432\n", "key:"
QUESTION = (CONTEXT + ASKED).encode()
EXAMPLE = Example("kv", CONTEXT, ASKED, ("71432",), "all", {"length": 14, "depth": 0.5, "seed": 0})


def ask(answers: dict[str, str], protocols: Sequence[str], **options: Any) -> tuple[list[dict[str, Any]], Scripted]:
    decoder = Scripted(answers)
    prompt = Prompt.of(EXAMPLE, BYTES)
    return list(measure(prompt, METHODS, protocols, decoder, BYTES, ends=[0], **options)), decoder


ANSWERS = {"full": "71432", "quest": "71432.\nkey:", "window": "99999999999999999999999999999999999"}


def test_both_protocols_feed_the_same_tokens_and_read_the_context_once() -> None:
    records, decoder = ask(ANSWERS, ["question", "prefill"])
    assert decoder.reads == [CONTEXT]
    whole = CONTEXT + ASKED[:-1]
    assert decoder.indexed == [(label, text) for text in (CONTEXT, whole) for label in (FULL, "quest", "window")]
    assert [one["protocol"] for one in records] == ["question"] * 4 + ["prefill"] * 4
    # the last token of the question is fed in both: every token of the answer comes from the sparse path
    assert decoder.fed["quest", 64, CONTEXT] == ASKED + "71432."
    assert decoder.fed["quest", 64, whole] == ASKED[-1] + "71432."


def test_by_the_protocol_of_generate_the_first_token_comes_from_the_dense_prefill() -> None:
    said = {"full": "71432", "quest": "99", "window": "\n"}  # a method that would have begun otherwise goes on with it
    records, decoder = ask(said, ["generate"])
    assert [one["response"] for one in records] == ["71432", "79", "79", "7"]
    assert decoder.fed["quest", 64, CONTEXT + ASKED] == "79"
    assert decoder.reads == [CONTEXT]


def test_responses_end_at_an_end_a_line_or_the_limit() -> None:
    records, _ = ask(ANSWERS, ["question"])
    responses = {(one["method"], one["budget"]): one["response"] for one in records}
    limit = 2 * len("71432\n") + 8
    assert responses == {
        (FULL, None): "71432",
        ("quest", "64"): "71432.\n",
        ("quest", "256"): "71432.\n",
        ("window", None): "9" * limit,
    }
    assert [one["score"] for one in records] == [1.0, 1.0, 1.0, 0.0]


def test_a_record_says_what_was_measured() -> None:
    records, _ = ask(ANSWERS, ["question"])
    one = records[1]
    assert {name: one[name] for name in ("task", "length", "depth", "seed", "method", "budget", "scoring")} == {
        "task": "kv",
        "length": 14,
        "depth": 0.5,
        "seed": 0,
        "method": "quest",
        "budget": "64",
        "scoring": "all",
    }
    assert (one["score"], one["ruler"]) == (1.0, 1.0)
    assert one["selector"] == repr(Quest())
    assert one["answers"] == ["71432"]
    assert one["prompt_tokens"] == len(QUESTION)
    assert one["rows"] == len(ASKED + "71432.")
    json.dumps(one)


def test_what_is_known_is_not_measured_again() -> None:
    prompt = Prompt.of(EXAMPLE, BYTES)
    keys = prompt.keys(["question", "prefill"], METHODS)
    records, decoder = ask(ANSWERS, ["question", "prefill"], known=keys[:3] + keys[4:])
    assert [(one["method"], one["protocol"]) for one in records] == [("window", "question")]
    assert decoder.reads == [CONTEXT]
    records, decoder = ask(ANSWERS, ["question", "prefill"], known=keys)
    assert records == []
    assert decoder.reads == []


def test_prompts_that_differ_have_different_keys() -> None:
    other = Example("kv", CONTEXT, ASKED, ("71433",), "all")
    assert Prompt.of(EXAMPLE, BYTES).keys(["question"], METHODS) != Prompt.of(other, BYTES).keys(["question"], METHODS)
    assert len(set(Prompt.of(EXAMPLE, BYTES).keys(["question", "prefill"], METHODS))) == 8


def test_a_long_prompt_loses_the_middle_of_its_context() -> None:
    example = Example("mine", "abcdefghij", "Q?", ("a",), "all", {"line": 3})
    prompt = Prompt.of(example, BYTES, limit=4)
    assert prompt.shortened(16, BYTES) is prompt
    assert BYTES.text(prompt.shortened(13, BYTES).context) == "abcghij"
    assert prompt.shortened(13, BYTES).facts["cut"] == 3
    assert BYTES.text(prompt.shortened(13, BYTES).question) == "Q?"
    assert BYTES.text(prompt.shortened(8, BYTES).context) == "aj"
    sentence = (
        r"a prompt of mine .line 3. has 2 tokens of a question and 4 of an answer: --max-length is 8 or more, got 7"
    )
    with pytest.raises(ValueError, match=sentence):
        prompt.shortened(7, BYTES, "--max-length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_llama(tmp_path_factory.mktemp("model"))


def run(*arguments: object) -> Result:
    """With the byte model where none is named: what leads there has to be fetched."""
    model = [] if "--model" in arguments else ["--model", "reference"]
    return CliRunner().invoke(app, ["eval", *model, *(str(argument) for argument in arguments)])


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]


SMALL = ["--lengths", "560", "--depths", "0.5", "--samples", "1", "--sink", "2", "--window", "8"]
UNTIMED = ("prefill_seconds", "index_seconds", "decode_seconds")


def test_full_attention_answers_as_the_model_generates(folder: Path) -> None:
    model, _ = load_model(folder)
    prompts = [Prompt.of(example("kv", 300, seed=seed), BYTES) for seed in range(3)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt.context + prompt.question])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=prompt.limit, do_sample=False)
        expected.append(BYTES.text(out[0, ids.shape[1] :].tolist()))
    decoder = ModelDecoder(model, chunk=128)
    for prompt, text in zip(prompts, expected, strict=True):
        for record in measure(prompt, [Method()], PROTOCOLS, decoder, BYTES):
            assert text.startswith(record["response"])
            assert record["dense_calls"] > 0
            assert record["sparse_calls"] == 0


def test_the_protocol_of_generate_answers_as_generate_with_a_sparse_cache(folder: Path) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8, chunk=4096)
    methods = [Method(Quest(page=4), 8, "8")]
    for seed in range(3):
        prompt = Prompt.of(example("kv", 300, seed=seed), BYTES)
        (record,) = measure(prompt, methods, ["generate"], decoder, BYTES)
        ids = torch.tensor([prompt.context + prompt.question])
        cache = SparseCache(model, Quest(page=4), 8, sink=2, window=8, seal=4)
        kept = {**cache_argument(cache), "max_new_tokens": prompt.limit, "do_sample": False}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **kept)
        assert BYTES.text(out[0, ids.shape[1] :].tolist()).startswith(record["response"])
        assert record["sparse_calls"] > 0


@pytest.mark.parametrize("protocol", ["question", "prefill"])
def test_exhaustive_selectors_leave_the_logits_as_they_are(folder: Path, protocol: str) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8, chunk=100)
    example_ = example("kv", 300, seed=1)
    text = (example_.context + example_.question).encode()
    prefill = decoder.read(list(text[:250]))
    tail = list(text[250:280]) if protocol == "prefill" else []
    logits = []
    for selector in (None, Quest(), Quest(group="each")):
        session = decoder.start(decoder.index(prefill, tail, selector), None)
        logits.append(session.feed(list(text[250 + len(tail) :])))
        facts = session.facts()
        assert facts["rows"] == pytest.approx(facts["context"])  # everything was read
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    assert (logits[0] - logits[2]).abs().max() < 1e-4
    session = decoder.start(decoder.index(prefill, tail, Window()), None)
    windowed = session.feed(list(text[250 + len(tail) :]))
    assert (logits[0] - windowed).abs().max() > 1e-3  # a method that reads less differs
    assert session.facts()["rows"] == 2 + 8


def test_sessions_do_not_disturb_each_other(folder: Path) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8)
    prefill = decoder.read(list(b"Every line is a key and its value.\nabcdef:123456\n" * 4))
    indexed = decoder.index(prefill, [], Quest())
    first = decoder.start(indexed, 16)
    alone = [first.feed([token]) for token in b"abcdef"]
    second, third = decoder.start(indexed, 16), decoder.start(indexed, 64)
    for token, logits in zip(b"abcdef", alone, strict=True):
        assert torch.equal(second.feed([token]), logits)
        third.feed([token])


@pytest.mark.parametrize("selector", [None, Quest(), Window()])
def test_tokens_fed_together_are_decoded_one_by_one(folder: Path, selector: Selector | None) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8)
    text = list(example("kv", 300).context.encode())
    indexed = decoder.index(decoder.read(text[:200]), text[200:210], selector)
    together, apart = decoder.start(indexed, 16), decoder.start(indexed, 16)
    logits = together.feed(text[210:250])
    assert logits.shape == (40, 256)
    one_by_one = torch.cat([apart.feed([token]) for token in text[210:250]])
    assert (logits - one_by_one).abs().max() < 1e-5
    facts, same = together.facts(), apart.facts()
    assert facts["context"] == same["context"] == sum(range(211, 251)) / 40
    assert facts["rows"] == pytest.approx(same["rows"])
    assert facts["sparse_calls"] == same["sparse_calls"] == (0 if selector is None else 2 * 40)


def test_what_was_not_compared_does_not_count(folder: Path) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8)
    prefill, facts = decoder.read(list(b"x" * 100)), []
    for method in (Quest(), Roles({0: "dense", 1: "quest"})):
        session = decoder.start(decoder.index(prefill, [], method, layers=[1]), 16)
        session.feed([1])
        facts.append(session.facts())
    assert facts[0]["rows"] == facts[1]["rows"] < 101, "layer 0 is dense in both, and none of those compared"
    assert facts[0]["bytes_share"] == facts[1]["bytes_share"] < 1


def test_an_answer_of_one_token_was_read_densely(folder: Path) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8)
    facts = decoder.start(decoder.index(decoder.read(list(b"x" * 100)), [], Quest()), 16).facts()
    assert (facts["rows"], facts["context"], facts["bytes_share"]) == (100, 100, 1)


def test_dense_layers_stay_dense(folder: Path) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8, dense_layers=1)
    session = decoder.start(decoder.index(decoder.read(list(b"x" * 100)), [], Window()), None)
    session.feed([1])
    assert session.facts()["sparse_calls"] == 1
    assert session.facts()["dense_calls"] == 1
    with pytest.raises(ValueError, match="the model has 2 layers: of them 0 to 1 may be dense, got 2"):
        ModelDecoder(model, dense_layers=2)


def test_all_tasks_and_protocols_in_one_run(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("".join(example("passkey", 600, seed=seed).context for seed in range(4)))
    own = tmp_path / "own.jsonl"
    own.write_text(
        json.dumps({"context": "The sky is blue. " * 20, "input": "What colour?", "answers": ["blue"]}) + "\n"
    )
    out = tmp_path / "deep" / "out"
    done = run(
        *["--model", folder, *SMALL, "--task", ",".join([*TASKS, "agreement"]), "--text", text, "--last", "8"],
        *["--filler", text, "--prompts", own, "--scoring", "f1", "--answer-tokens", "3"],
        *["--protocol", "question,prefill", "--selector", "quest", "--selector", "window"],
        *["--budget", "10%,32", "--out", out],
    )
    assert done.exit_code == 0, done.output
    records = lines(out)
    methods = [("full", None), ("quest", "32"), ("quest", "10%"), ("window", None)]
    for task in (*TASKS, "own", "agreement"):
        for protocol in [FORCED] if task == "agreement" else ["question", "prefill"]:
            mine = [one for one in records if one["task"] == task and one["protocol"] == protocol]
            assert [(one["method"], one["budget"]) for one in mine] == methods
            assert len({one["prompt"] for one in mine}) == 1
    assert len(records) == (2 * 6 + 1) * 4
    for one in records:
        assert one["settings"]["sink"] == 2
        assert one["versions"]["torch"]
        assert one["prompt_tokens"] <= 560
        if one["method"] == "window":
            assert one["rows"] == 10
        elif one["method"] == "quest" and one["budget"] == "32":
            assert 10 < one["rows"] <= 2 + 8 + 15 + 32  # a page less one row waits to be sealed
    assert [one["scoring"] for one in records if one["task"] == "own"] == ["f1"] * 8
    said = " ".join(done.output.split())  # a table breaks lines where the model's path ends
    for protocol in ("question", "prefill"):
        assert f"protocol {protocol}" in said
        assert f"{protocol}: full attention has " in said
    assert "agreement with full attention: book.txt (a file), 560 tokens, 1 window, so no interval" in said
    assert "agreement at 560 tokens (book.txt; 1 window): " in said
    assert sorted(path.name for path in out.iterdir()) == ["accuracy.png", "agreement.png", "eval.jsonl"]


def test_a_killed_run_goes_on_where_it_stopped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--model", folder, *SMALL, "--lengths", "300,560", "--task", "kv", "--answer-tokens", "2"]
    options += ["--selector", "quest", "--budget", "32,64", "--no-figures"]
    assert run(*options, "--out", tmp_path / "whole").exit_code == 0
    whole = (tmp_path / "whole" / "eval.jsonl").read_bytes()
    rows = whole.splitlines(keepends=True)
    assert len(rows) == 6
    reads: list[int] = []
    read = ModelDecoder.read

    def counted(self: ModelDecoder, tokens: Sequence[int]) -> Any:
        reads.append(len(tokens))
        return read(self, tokens)

    monkeypatch.setattr(ModelDecoder, "read", counted)
    (tmp_path / "cut").mkdir()
    for kept, prefills in ((6, 0), (4, 1), (1, 2)):
        (tmp_path / "cut" / "eval.jsonl").write_bytes(b"".join(rows[:kept]) + (b'{"task": "k' if kept < 6 else b""))
        reads.clear()
        done = run(*options, "--out", tmp_path / "cut", "--json")
        assert done.exit_code == 0, done.output
        assert len(reads) == prefills
        again = lines(tmp_path / "cut")
        shown = [json.loads(line) for line in done.stdout.splitlines()]
        assert {one.pop("uninformative") for one in shown} == {True}  # a random model answers nothing
        assert {one.pop("full_answers") for one in shown} == {0.0}
        assert shown == again
        for one, other in zip(again, map(json.loads, rows), strict=True):
            for name in UNTIMED:
                del one[name], other[name]
            assert one == other


def test_more_methods_come_on_top_and_other_settings_do_not(folder: Path, tmp_path: Path) -> None:
    options = ["--model", folder, *SMALL, "--task", "kv", "--answer-tokens", "2", "--no-figures", "--out", tmp_path]
    assert run(*options, "--selector", "window").exit_code == 0
    done = run(*options, "--selector", "quest", "--budget", "32")
    assert done.exit_code == 0, done.output
    assert [one["method"] for one in lines(tmp_path)] == ["full", "window", "quest"]
    assert not [line for line in done.stdout.splitlines() if re.match(r"\s*window +-", line)]
    before = (tmp_path / "eval.jsonl").read_bytes()
    for option in (["--sink", "0"], ["--dense-layers", "1"], ["--answer-tokens", "3"], ["--seal", "64"]):
        done = run(*options, "--selector", "window", *option)
        assert done.exit_code == 2
        assert "holds results with another" in done.output
    assert (tmp_path / "eval.jsonl").read_bytes() == before


def test_a_retrained_artefact_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    shutil.copy(locate("reference"), path)
    prompt, saap = Prompt.of(EXAMPLE, BYTES), SAAP(artefact=str(path))
    (before,) = prompt.keys(["question"], [Method(saap, 64, "64")])
    assert prompt.keys(["question"], [Method(SAAP(artefact=str(path)), 64, "64")]) == [before]
    with path.open("ab") as file:
        file.write(b"\0")
    (after,) = prompt.keys(["question"], [Method(saap, 64, "64")])
    assert [name for name, one, other in zip(KEY, before, after, strict=True) if one != other] == ["source"]


def test_a_retrained_model_is_another(folder: Path) -> None:
    model, same = load_model(folder)[0], load_model(folder)[0]
    assert ModelDecoder(model).fingerprint() == ModelDecoder(same).fingerprint()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1e-3
    assert ModelDecoder(model).fingerprint() != ModelDecoder(same).fingerprint()


def test_heat_maps_are_drawn_where_there_is_a_grid(folder: Path, tmp_path: Path) -> None:
    options = ["--model", folder, "--lengths", "300,560", "--depths", "0,1", "--samples", "1", "--task", "kv,words"]
    done = run(*options, "--selector", "quest", "--budget", "32", "--answer-tokens", "2", "--out", tmp_path)
    assert done.exit_code == 2  # 300 bytes do not hold the words
    assert "a words prompt with seed 0 has at least" in done.output
    more = "--lengths 560,600 --selector quest --budget 32 --answer-tokens 2 --out"
    done = run(*options, *more.split(), tmp_path)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["accuracy.png", "heat-kv-question.png"]
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--task", "passkeys"], "--task takes one or more of passkey, multikey, kv, variables, words, agreement"),
        (
            ["--protocol", "both"],
            "--protocol takes one or more of question, prefill, generate, separated by commas, got 'both'",
        ),
        (["--task", "agreement"], "--task agreement needs --text, and only that task takes it"),
        (["--text", "x.txt"], "--task agreement needs --text, and only that task takes it"),
        (["--task", "agreement", "--text", "none.txt"], "none.txt is neither a file nor one of the texts by name ("),
        (
            ["--task", "agreement", "--text", "apache-2.0", "--last", "600"],
            "is too short for --last 600 and the 2 tokens before",
        ),
        (["--sparse-layers", "1-0"], '--sparse-layers takes layers and ranges separated by commas, such as "'),
        (["--sparse-layers", "1-"], "or all, got '1-'"),
        (["--sparse-layers", "1,2"], "--sparse-layers names layers of 0, 1, which attend to the whole context and are"),
        (["--dense-layers", "1", "--sparse-layers", "0"], "names layers of 1, which attend to the whole context and"),
        (["--scoring", "rouge"], "--scoring must be one of all, part, exact, f1, got 'rouge'"),
        (["--dtype", "int8"], "'int8' is not one of 'float32'"),
        (["--samples", "0"], "--samples must be 1 or more, got 0"),
        (["--protocol", "generate", "--answer-tokens", "1"], "--answer-tokens 1 has no effect on --protocol generate"),
        (["--seed", "-1"], "--seed is 0 to 4294967295, as NumPy takes them, got -1"),
        (["--lengths", "0"], "--lengths must be 1 or more, got 0"),
        (["--lengths", "many"], "--lengths takes integers separated by commas, got 'many'"),
        (["--lengths", "100"], "a passkey prompt with seed 0 has at least"),
        (["--lengths", "560,1010"], "has 1024 positions, --lengths 1010 with an answer of 22 tokens takes 1032"),
        (["--lengths", "99999999"], "has 1024 positions, a prompt of --lengths 99999999 takes 99999999"),
        (["--seal", "0"], "--seal must be 1 or more, got 0"),
        (["--selector", "infllm", "--seal", "64"], "seal is at least the unit of infllm:"),
        (["--window", "560"], "--sink 4 and --window 560 read all 560 rows of the longest prompt, so that no method"),
        (["--depths", "2"], "a depth lies between 0 (first) and 1 (last), got 2"),
        (["--dense-layers", "2"], "the model has 2 layers: of them 0 to 1 may be dense, got 2"),
        (["--selector", "quests"], "no selector is called 'quests'"),
        (["--budget", "8"], "a budget of 8 rows is less than one span"),
        (["--task", "kv", "--prompts", "none.jsonl"], "cannot use none.jsonl: No such file or directory"),
        (["--filler", "none.txt"], "none.txt is neither a file nor one of the texts by name (alice, "),
        (["--model", "./none"], "no such model folder: ./none"),
        (["--model", "reference", "--device", "nowhere"], "nowhere is not a torch device"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    folder: Path, tmp_path: Path, options: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("--model", folder, "--lengths", "560", "--out", tmp_path / "out", *options)
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "out" / "eval.jsonl").exists()


def test_prompts_too_long_for_the_model_are_refused_or_cut(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    record = {"context": "The sky is blue. " * 100, "question": "What colour?", "answers": ["blue"]}
    own.write_text(json.dumps(record) + "\n")
    options = ["--model", folder, "--prompts", own, "--selector", "window", "--no-figures", "--out", tmp_path / "out"]
    done = run(*options)
    assert done.exit_code == 2
    sentence = "the model has 1024 positions, a prompt of own (file own.jsonl, line 1) with its answer takes 1778"
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "out" / "eval.jsonl").exists(), "refused before anything is measured"
    done = run(*options, "--max-length", "1000")
    assert done.exit_code == 0, done.output
    for one in lines(tmp_path / "out"):
        assert one["prompt_tokens"] == 1000 - 64
        assert one["cut"] == 1778 - 1000


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "with its answer takes 1778; --max-length 1024 cuts the middle out of its context"),
        (["--max-length", "1025"], "--max-length must not exceed the model's 1024 tokens, got 1025"),
        (
            ["--max-length", "50"],
            "a prompt of own (file own.jsonl, line 1) has 14 tokens of a question and 64 of an answer: --max-length is "
            "80 or more, got 50",
        ),
        (["--max-length", "0"], "--max-length must be 1 or more, got 0"),
    ],
)
def test_a_length_that_does_not_fit_names_its_option(
    folder: Path, tmp_path: Path, given: list[str], sentence: str
) -> None:
    own = tmp_path / "own.jsonl"
    record = {"context": "The sky is blue. " * 100, "question": "What colour?", "answers": ["blue"]}
    own.write_text(json.dumps(record) + "\n")
    done = run("--model", folder, "--prompts", own, "--no-figures", "--out", tmp_path / "out", *given)
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "out" / "eval.jsonl").exists()


@pytest.mark.parametrize("answer", ["9" * 5000, "[" * 100_000, r'"\ud800"'], ids=["digits", "nesting", "surrogate"])
def test_prompts_that_break_readers_are_a_sentence(tmp_path: Path, answer: str) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(f'\n{{"context": "C", "question": "Q?", "answers": {answer}}}\n')
    done = run("--prompts", own, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.exception
    assert "own.jsonl, line 2: " in " ".join(done.output.split())


@pytest.mark.parametrize("score", ["null", '"1.0"', "NaN"])
def test_records_without_a_score_are_a_sentence(folder: Path, tmp_path: Path, score: str) -> None:
    options = ["--model", folder, *SMALL, "--task", "kv", "--answer-tokens", "2", "--selector", "window"]
    options += ["--no-figures", "--out", tmp_path]
    assert run(*options).exit_code == 0
    path = tmp_path / "eval.jsonl"
    first, second = path.read_text().splitlines()
    broken = f'{first}\n{second.removesuffix("}")}, "score": {score}}}\n'  # of two fields of a name, the last counts
    path.write_text(broken)
    done = run(*options)
    assert done.exit_code == 2, done.exception
    said = " ".join(done.output.split())
    assert "eval.jsonl, line 2 is a line that is no record of this command: score is a number from 0 to 1, got" in said
    assert path.read_text() == broken


def test_a_second_run_into_a_folder_says_who_holds_it(folder: Path, tmp_path: Path) -> None:
    options = ["--model", folder, *SMALL, "--task", "kv", "--answer-tokens", "2", "--selector", "window"]
    options += ["--no-figures", "--out", tmp_path]
    with locked(tmp_path / "eval.lock", "it"):
        done = run(*options)
    assert done.exit_code == 2, done.output
    said = " ".join(done.output.split())
    assert f"--out {tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} since 20" in said
    assert not (tmp_path / "eval.jsonl").exists()
    assert run(*options).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["eval.jsonl"]


def test_text_of_files_is_shown_as_it_is(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "\x1b[2J[red]a$\\frac$\u202e.jsonl"
    own.write_text(json.dumps({"context": "The sky is blue. " * 20, "question": "What?", "answers": ["blue"]}) + "\n")
    model = tmp_path / "[" / "blue]"  # in a path, what ends a style to rich that was never begun
    model.parent.mkdir()
    model.symlink_to(folder)
    options = ["--model", model, "--prompts", own, "--answer-tokens", "2", "--selector", "window", "--sink", "2"]
    done = run(*options, "--window", "8", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.exception
    assert "[2J[red]a$\\frac$" in done.output
    assert "[/blue], protocol question" in " ".join(done.output.split())
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output
    assert (tmp_path / "out" / "accuracy.png").exists()


def test_the_table_shows_rulers_figure_where_several_values_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = [
        made(FULL, None, 9, 0.75, task="words", ruler=1.0, answers=["a", "b"]),
        made(FULL, None, 9, 1.0, task="kv", ruler=1.0, answers=["a"]),
        made(FULL, None, 9, 0.0, task="passkey", ruler=1.0, answers=["14"]),  # in 3.14: RULER counts that
        made(FULL, None, 9, 0.5, task="own", ruler=None, answers=["a"]),
    ]
    Console(width=WIDE).print(*report.tables(records))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = ["words", "10", "RULER", "kv", "10", "passkey", "10", "RULER", "own", "10"]
    assert ["method", "budget", "rows", "sparse", "steps", *head] in shown
    assert ["full", "-", "9", "-", "75", "100", "100", "0", "100", "50"] in shown


@pytest.fixture
def tokenizer() -> Any:
    """Byte pairs, with a token for the beginning of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator([example("passkey", 5000).context], trainer)
    bare.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>")


@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_in_tokens_with_the_one_for_the_beginning(tokenizer: Any, task: str) -> None:
    tokens = Tokens(tokenizer)
    one = example(task, 500, count=tokens.count, spare=tokens.spare)
    prompt = Prompt.of(one, tokens)
    assert 500 - 40 < prompt.tokens <= 500
    assert prompt.context[0] == tokenizer.bos_token_id not in prompt.context[1:] + prompt.question
    assert tokens.text([*prompt.context, *prompt.question]) == one.context + one.question


def test_a_beginning_that_the_tokenizer_does_not_mark_is_not_marked(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = None
    assert Tokens(tokenizer).start == []


def test_prompts_in_a_chat_template(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Tokens(tokenizer, chat=True)
    with pytest.raises(ValueError, match="no chat template"):
        Tokens(None, chat=True)
    tokenizer.chat_template = "<s>User: {{ messages[0]['content'] }}\nModel:"
    tokens = Tokens(tokenizer, chat=True)
    one = example("kv", 500, count=tokens.count, spare=tokens.spare)
    prompt = Prompt.of(one, tokens)
    assert 500 - 40 < prompt.tokens <= 500
    assert tokenizer.decode(prompt.context) == "<s>User: " + one.context
    asked, _, key = one.question.partition("\n")
    assert asked.startswith("What is the value of ")
    assert tokenizer.decode(prompt.question) == f"{asked}\nModel:{key}", "the model goes on with its own turn"


@pytest.mark.parametrize("task", TASKS)
def test_every_question_ends_with_the_beginning_of_its_answer(tokenizer: Any, task: str) -> None:
    one = example(task, 900, seed=3)
    assert one.lead
    assert one.question.endswith(one.lead)
    plain = Prompt.of(one, Tokens(tokenizer))
    assert tokenizer.decode(plain.question) == one.question
    tokenizer.chat_template = "User: {{ messages[0]['content'] }}\nModel: "
    chat = Prompt.of(one, Tokens(tokenizer, chat=True))
    before = one.question.removesuffix(one.lead).rstrip()
    assert tokenizer.decode(chat.question) == f"{before}\nModel: {one.lead}"


def made(method: str, budget: str | None, rows: float, score: float, **facts: Any) -> dict[str, Any]:
    """A record by hand."""
    settings = {"model": "m", "sink": 4, "window": 64, "dense_layers": 0}
    one = {"task": "kv", "prompt": "p", "protocol": "question", "length": 10, "depth": 0.0, "settings": settings}
    return {**one, "method": method, "budget": budget, "rows": rows, "score": score, **facts}


def test_the_closing_line_names_the_fewest_rows_near_full_attention_on_every_task() -> None:
    records = [
        *(made(FULL, None, 1000, score, task=task) for task, score in (("kv", 1.0), ("kv", 0.5), ("passkey", 1.0))),
        *(made("quest", "64", 100, score, task=task) for task, score in (("kv", 1.0), ("kv", 0.5), ("passkey", 0.9))),
        *(made("quest", "256", 300, score, task=task) for task, score in (("kv", 1.0), ("kv", 0.5), ("passkey", 0.99))),
        *(made("exact", "256", 320, 1.0, task=task) for task in ("kv", "kv", "passkey")),
        *(made("window", None, 68, 0.0, task=task) for task in ("kv", "kv", "passkey")),
    ]
    assert report.verdicts(records) == [
        "question: full attention has kv 75%, passkey 100%. Fewest tokens read within 2 points of that on every task: "
        "quest at budget 256: 300 tokens, 1.0 points lost on the worst task."
    ]
    few = [
        one for one in records if (one["method"], one["budget"]) in ((FULL, None), ("quest", "64"), ("window", None))
    ]
    assert report.verdicts(few) == [
        "question: full attention has kv 75%, passkey 100%. No method stays within 2 points of that on every "
        "task. Closest: quest at budget 64: 100 tokens, 10.0 points lost on the worst task."
    ]
    longer = [made(FULL, None, 1000, 0.0, task="kv", length=9000), made("exact", "256", 320, 1.0, task="kv", length=8)]
    (line,) = report.verdicts([*records, *longer])
    assert line.endswith("No other method was measured on all of these prompts."), "the length of 9000 is missing"
    (line,) = report.verdicts([*records, *longer, *(made("quest", "256", 300, 0.0, task="kv", length=9000),)])
    assert "quest at budget 256: 300 tokens" in line
    assert line.endswith("3 more of the table's rows are not of all of these prompts.")


def test_what_full_attention_does_not_answer_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from sparseattn.cli.eval_show import show

    def asked(task: str, right: int, **facts: Any) -> list[dict[str, Any]]:
        return [
            made(method, None, 9, float(n < right), task=task, prompt=f"{task}{n}", **facts)
            for method in (FULL, "window")
            for n in range(5)
        ]

    records = [
        *asked("kv", 4),
        *asked("kv", 3, length=4000),
        *asked("passkey", 0, protocol="prefill"),
        *asked("own", 0, scoring="f1", length=None),  # words shared with an answer, which is never all of them
        *asked("mine", 1, length=None),
    ]
    behind = "fewer than 80%: nothing is learned there of the methods"
    said = [
        f"full attention answers 60% of kv at 4,000 tokens (protocol question, 5 prompts), {behind}",
        f"full attention answers 20% of mine (protocol question, 5 prompts), {behind}",
        f"full attention answers 0% of passkey at 10 tokens (protocol prefill, 5 prompts), {behind}",
    ]
    assert report.cautions(records) == said
    show(records, tmp_path / "eval.jsonl", json=True, figures=False)
    shown = capsys.readouterr()
    assert not shown.out
    assert [line for line in shown.err.splitlines() if line.startswith("sparseattn: ")] == [
        f"sparseattn: {line}" for line in said
    ]
    column = report.marked(asked("kv", 3))
    assert {(one["full_answers"], one["uninformative"]) for one in column} == {(0.6, True)}
    column = report.marked([*asked("kv", 4), *asked("kv", 1, protocol="prefill")])
    assert [(one["full_answers"], one["uninformative"]) for one in column] == [(0.8, False)] * 10 + [(0.2, True)] * 10
    assert not report.marked(asked("own", 1, scoring="f1"))[0]["uninformative"]
    (forced,) = report.marked([{"protocol": "forced", "nll": 1.0, "method": "window", "budget": None}])
    assert "uninformative" not in forced


def test_sets_of_layers_are_methods_of_their_own_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    records = [made(FULL, None, 9, 1.0), *(made("quest", "64", 9, 0.5, layers=layers) for layers in (None, "0-9", "7"))]
    Console(width=WIDE).print(*report.tables(records))
    shown = capsys.readouterr().out
    assert [line.split("  ")[0].strip() for line in shown.splitlines()[-5:-1]] == [
        *("full", "quest", "quest, layers 0-9", "quest, layers 7")
    ]


def test_figures_of_methods_without_budgets_and_of_many_panels(tmp_path: Path) -> None:
    from sparseattn.reporting import plots

    plain = [made(FULL, None, 9, 1.0), made("window", None, 9, 0.0)]
    plots.accuracy(plain, tmp_path / "plain.png")
    many = [
        made(method, budget, 9, 0.5, length=length, depth=depth, task=task, protocol=protocol)
        for method, budget in ((FULL, None), *(("quest", str(n)) for n in range(5)))
        for length in (10, 20)
        for depth in (0.0, 1.0)
        for task in ("kv", "passkey", "multikey", "words")
        for protocol in ("question", "prefill")
    ]
    plots.accuracy(many, tmp_path / "many.png")
    grids = by_place(many)
    assert list(grids)[:2] == ["kv-question", "passkey-question"]
    assert len(grids) == 8
    plots.heat(grids["kv-question"], tmp_path / "heat.png")
    for name in ("plain", "many", "heat"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--protocol", "prefill"], "--engine vllm cannot run --protocol"),
        (["--task", "agreement", "--text", "alice"], "--engine vllm cannot run (--task agreement|--text)"),
        (["--budget", "5%"], "--engine vllm needs a --budget in tokens, such as 1024, got 5%"),
        (["--selector", "exact", "--budget", "64"], "has another kind of index"),
        (["--endpoint", "http://127.0.0.1:1"], "give one of the two"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_any_work(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["eval", "--engine", "vllm", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert re.search(said, " ".join(done.output.split())), done.output
    assert not (tmp_path / "out").exists()


def test_an_absent_vllm_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseattn.serving.vllm.installed.DISTRIBUTIONS", ("no-such-vllm",))
    done = CliRunner().invoke(app, ["eval", "--engine", "vllm", "--out", str(tmp_path / "out"), "--budget", "64"])
    assert done.exit_code == 2
    assert "serves with vLLM 0.27 to 0.32, and none is installed here" in " ".join(done.output.split())
