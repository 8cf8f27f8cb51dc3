"""JSON that others may have written, its fields, and the doors where files of it are read."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparseattn import make_selector
from sparseattn.cli.app import app
from sparseattn.core.budget import budget_label, parse_budget
from sparseattn.cost_model.machine import Machine, MachineError
from sparseattn.evaluation.tasks.jsonlines import append
from sparseattn.models.errors import ModelError
from sparseattn.models.gguf_header import check_header
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.traces.trace import Trace, TraceError
from sparseattn.utils.json_fields import Either, FieldError, Flag, Items, Maybe, Number, Object, Text, Values
from sparseattn.utils.json_text import DEPTH, DIGITS, JsonError, parse, parse_object
from tests import report_records as records

NESTED = 3000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[" * NESTED + "]" * NESTED,
            f"lists and objects are nested more than {DEPTH} deep, from column {DEPTH + 1} on",
        ),
        ('\n{"a":' * NESTED, f"nested more than {DEPTH} deep, from line {DEPTH + 2}, column 1 on"),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "nested more than"),
        ('{"a": {"b": [0, NaN]}}', r"NaN is no number in JSON \(in a.b\[1\]\)"),
        ('{"a": -Infinity}', r"-Infinity is no number in JSON \(in a\)"),
        ('{"a": 1e400}', r"a number is one that a float holds, got 1e400 \(in a\)"),
        ('{"a": ' + "9" * (DIGITS + 1) + "}", rf"a number has at most {DIGITS} digits, got {DIGITS + 1}; .*\(in a\)"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', r"'b' comes twice \(in a.b\)"),
        (r'{"a": ["\udc00"]}', r"half of a surrogate pair, \\udc00 \(in a\[0\]\)"),
        (r'{"a": {"\ud800": 1}}', r"half of a surrogate pair, \\ud800 \(in a\)"),
        ('{"a": 1,\n "b" 2}', "it is not JSON at line 2, column 6: Expecting ':' delimiter"),
        (b'{"a": "\xff"}', r"it is not UTF-8 \(byte 7 is 0xff\)"),
        ("", "it is not JSON at column 1"),
    ],
    ids=lambda given: None if isinstance(given, bytes) else given[:24],
)
def test_what_is_no_json_of_this_kind_is_told_by_its_place(text: str | bytes, sentence: str) -> None:
    with pytest.raises(JsonError, match=sentence):
        parse(text)


@pytest.mark.parametrize("text", ['"' + "[{" * NESTED + '"', '["\\"' + "[" * NESTED + '"]', "[" * DEPTH + "]" * DEPTH])
def test_brackets_within_texts_nest_nothing(text: str) -> None:
    assert parse(text) == json.loads(text)


def test_nesting_is_found_in_linear_time() -> None:
    """Quotes behind quotes, of which none is closed, and escapes, in megabytes."""
    begun = time.process_time()
    for text in ("[" * 2_000_000, "[" * 200 + '"' + '\\"' * 1_000_000, "[" * 200 + '"\\' * 1_000_000, "[]" * 1_000_000):
        with pytest.raises(JsonError):
            parse(text)
    assert time.process_time() - begun < 5


def test_numbers_that_a_reader_checks_itself_may_pass() -> None:
    held = parse_object('{"a": NaN, "b": 1e400, "a": 1}', finite=False, once=False)
    assert held == {"a": 1, "b": float("inf")}
    assert parse("9" * 400, digits=400) == int("9" * 400)
    with pytest.raises(JsonError, match=r"a JSON object is due, got \[1\]"):
        parse_object("[1]")


def test_what_could_not_be_read_again_is_not_appended(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be kept in .*a.jsonl: a number of it is NaN or infinite"):
        append(tmp_path / "a.jsonl", {"kl": float("nan")})
    assert not (tmp_path / "a.jsonl").exists()


POINT = Object(
    {"kl": Number(0), "heads": Items(Number(), 2)}, {"budget": Maybe(Either((Text(), Number(1)), "is a budget"))}
)
LINE = Object(
    {"name": Text(among=("a", "b")), "points": Items(POINT, 1), "of": Values(Flag(), 1)},
    {"only": Object({"x": Flag()}, closed=True)},
)
RIGHT: dict[str, Any] = {
    "name": "a",
    "points": [{"kl": 1, "heads": [1, 2.5], "budget": None}],
    "of": {"x": True},
    "more": 7,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": 7}, "name is text, got 7"),
        ({"name": "c"}, "name is one of a, b, got 'c'"),
        ({"points": {}}, r"points is a list, got {}"),
        ({"points": []}, "points is a list of 1 items or more, got 0"),
        ({"points": [7]}, r"points\[0\] is an object, got 7"),
        ({"points": [{"kl": 1}]}, r"points\[0\].heads is missing"),
        ({"points": [{"kl": -1, "heads": [1, 1]}]}, r"points\[0\].kl is a number from 0 to 1e\+15, got -1"),
        ({"points": [{"kl": True, "heads": [1, 1]}]}, r"points\[0\].kl is a number"),
        ({"points": [{"kl": 10**299, "heads": [1, 1]}]}, r"points\[0\].kl is a number .* got 10000.*\.\.\."),
        ({"points": [{"kl": float("nan"), "heads": [1, 1]}]}, r"points\[0\].kl is a number"),
        ({"points": [{"kl": 1, "heads": [1, "x"]}]}, r"points\[0\].heads\[1\] is a number"),
        ({"points": [{"kl": 1, "heads": [1, 1], "budget": []}]}, r"points\[0\].budget is a budget, got \[\]"),
        ({"of": {}}, "of is an object of 1 fields or more, got 0"),
        ({"of": {"x": 1}}, "of.x is true or false, got 1"),
        ({"only": {"x": True, "y": 1}}, "only has x, got 'y'"),
    ],
)
def test_a_field_is_refused_by_its_name(change: dict[str, Any], sentence: str) -> None:
    LINE.check(RIGHT)
    with pytest.raises(FieldError, match=f"^{sentence}"):
        LINE.check({**RIGHT, **change})


# -- the doors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    records.fill(folder)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """Of the test alone: it writes into it."""
    return shutil.copytree(filled, tmp_path / "records")


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("bench/bench.jsonl", {"machine": "a laptop"}, "machine is an object, got 'a laptop'"),
        ("bench/bench.jsonl", {"versions": [1]}, "versions is an object, got [1]"),
        ("bench/bench.jsonl", {"budget": 10**299}, "budget is rows, a share of the context, a text or null, got 1000"),
        (
            "bench/bench.jsonl",
            {"mean": {"relative_error": float("nan")}},
            "NaN is no number in JSON (in mean.relative_error)",
        ),
        ("bench/bench.jsonl", {"layers": []}, "layers is a list of 1 items or more, got 0"),
        ("bench/by-layer.jsonl", {"methods": []}, "methods is a list of 1 items or more, got 0"),
        ("inspect/inspect.jsonl", {"heads": {}}, "heads.distance_ratio is missing"),
        ("inspect/inspect.jsonl", {"tokens": 10}, "tokens is more than sink and window, got 10"),
        ("recall/recall.jsonl", {"mean": 7}, "mean is an object, got 7"),
        ("eval/eval.jsonl", {"settings": []}, "settings is an object, got []"),
        ("eval/eval.jsonl", {"score": None}, "score is a number from 0 to 1, got None"),
        ("recommend/recommend.jsonl", {"record": ["plan"]}, "record is text, got ['plan']"),
        ("recommend/recommend.jsonl", {"points": []}, "points is a list of 1 items or more, got 0"),
        ("recommend/recommend.jsonl", {"layer": 9}, "layer 9 is not among the layers of a line of settings above"),
    ],
)
def test_a_report_refuses_a_record_by_file_line_and_field(
    folder: Path, file: str, change: dict[str, Any], said: str
) -> None:
    path = folder / file
    lines = path.read_text().splitlines()
    at = 2 if "recommend" in file else 0  # the first of a frontier
    lines[at] = json.dumps({**json.loads(lines[at]), **change})
    path.write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["report", str(path.parent), "--out", str(folder / "page.html")])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    assert f"{path}, line {at + 1} is no " in (told := " ".join(done.stderr.split()))
    assert said in told


def test_a_report_shows_answers_without_those_of_full_attention(tmp_path: Path) -> None:
    records.write(tmp_path / "eval.jsonl", [one for one in records.answers() if one["method"] != "full"])
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "full attention was not measured" in (tmp_path / "page.html").read_text()


def test_nested_plans_and_selectors_are_refused_at_once(tmp_path: Path) -> None:
    deep = "[" * NESTED + "]" * NESTED
    layers = {"0": "dense", "1": "@"}
    for name, kind in (("roles", Roles), ("plan", Plan)):
        record = {"format": f"sparseattn-{name}", "version": 1, "layers": layers}
        record |= {"model": {"name": "m", "fingerprint": "f"}, "sink": 4, "window": 64} if name == "plan" else {}
        path = tmp_path / f"{name}.json"
        for text in (deep, json.dumps(f"twostage:pages={'[twostage:pages=' * NESTED}quest{']' * NESTED}")):
            path.write_text(json.dumps(record).replace('"@"', text))
            begun = time.process_time()
            with pytest.raises(
                ValueError, match=rf"{name}.json is no file of {name} .*(nested more than \d+ deep|at most 10,000)"
            ):
                kind.load(path)
            assert time.process_time() - begun < 1
    for spec in (
        f"quest:page={deep}",
        f"twostage:pages={deep}",
        f"quest:page={'(' * NESTED}",
        f"quest:page={'-' * 9000}1",
    ):
        with pytest.raises(ValueError, match=r"nested more than|is of type int"):
            make_selector(spec)
    with pytest.raises(ValueError, match="has at most 10,000 characters, got 20,"):
        make_selector("quest:page=" + "1" * 20_000)


def test_budgets_beyond_any_context_are_refused() -> None:
    for budget in (10**400, "9" * 400, "mass:0.5:" + "9" * 400):
        with pytest.raises(ValueError, match=r"a budget is at most 1,000,000,000,000,000 rows"):
            Role("quest", budget)
    assert budget_label(parse_budget("1000000000000000")) == "1000000000000000"


def test_a_machines_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    right = {
        "format": 2,
        "name": "here",
        "bandwidth": 1e9,
        "device": "cpu",
        "predicted": False,
        "source": "s",
        "about": {},
    }
    right["speeds"] = {"float32": {"dense": {"launch": 1e-6, "flops": None}}}
    path.write_text(json.dumps(right))
    assert Machine.load(str(path)).speeds["float32"]["dense"].launch == 1e-6
    for change, said in (
        ({"about": "text"}, "about is an object"),
        ({"speeds": {"float32": {"dense": {"launch": "1"}}}}, "speeds.float32.dense.launch is a number"),
        ({"speeds": {"float32": {"dense": {"launch": 1, "flops": 0}}}}, "speeds.float32.dense.flops is a number"),
    ):
        path.write_text(json.dumps(right | change))
        with pytest.raises(MachineError, match=f"m.json is no profile of a machine: {said}"):
            Machine.load(str(path))


def test_a_traces_text_is_an_object(tmp_path: Path) -> None:
    made = records.trace()
    with pytest.raises(TraceError, match="text in its meta is an object, got 'a novel'"):
        Trace.build([made.layer(0)], made.positions, {"text": "a novel"}).save(tmp_path / "t.safetensors")


# -- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf() -> bytes:
    pytest.importorskip("gguf")
    from scripts.mutations import valid

    return valid("gguf")


def number(data: bytes, key: bytes, value: int) -> bytes:
    """The file with the whole number of an entry changed."""
    at = data.index(key) + len(key) + 4
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


def test_counts_of_a_gguf_file_are_those_of_its_tensors(gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf)
    assert check_header(path).entries["llama.block_count"] == 2
    for key, value, said in (
        (b"llama.block_count", 2_000_000_000, "llama.block_count is 2000000000, and the file has tensors of 2 blocks"),
        (b"llama.block_count", 0, "llama.block_count is 0, and the file has tensors of 2 blocks"),
        (
            b"llama.embedding_length",
            2_000_000_000,
            "llama.embedding_length is 2000000000, and the largest dimension of a",
        ),
        (b"llama.feed_forward_length", 10**9, "llama.feed_forward_length is 1000000000, and the largest dimension"),
        (b"llama.attention.head_count", 10**9, "llama.attention.head_count is 1000000000, and the largest"),
        (b"llama.context_length", 2**32 - 1, "llama.context_length is a number of tokens up to"),
    ):
        path.write_bytes(number(gguf, key, value))
        with pytest.raises(ModelError, match=rf"m.gguf is no GGUF file that can be used: {said}"):
            check_header(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"GGML" + data[4:], "it begins with b'GGML'"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "its version is 9"),
        (
            lambda data: data[:8] + struct.pack("<Q", 2**63) + data[16:],
            "the number of tensors is 9,223,372,036,854,775,808",
        ),
        (lambda data: data[:16] + struct.pack("<Q", 2**40) + data[24:], "the number of entries is 1,099,511,627,776"),
        (lambda data: data[:24] + struct.pack("<Q", 2**62) + data[32:], "the length of the key of entry 0 is"),
        (lambda data: data[:100], "it ends within|has .* more bytes"),
    ],
)
def test_lengths_of_a_gguf_file_end_with_it(gguf: bytes, change: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(change(gguf))
    with pytest.raises(ModelError, match=rf"m.gguf is no GGUF file that can be used: .*({said})"):
        check_header(path)


def test_a_gguf_tensor_begins_and_ends_within_the_file(gguf: bytes, tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", b"token_embd.weight"
    at = gguf.index(name) + len(name) + 4
    path.write_bytes(gguf[:at] + struct.pack("<Q", 2**50) + gguf[at + 8 :])
    with pytest.raises(ModelError, match=r"token_embd.weight has dimensions .* which the file has no room for"):
        check_header(path)
    at += 2 * 8 + 4
    path.write_bytes(gguf[:at] + struct.pack("<Q", sys.maxsize) + gguf[at + 8 :])
    with pytest.raises(ModelError, match=r"token_embd.weight begins at byte .* behind the file's end"):
        check_header(path)
