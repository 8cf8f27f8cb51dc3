"""Files of every format, mutated from a seed: each is read, or refused in a sentence that names the file.

    python -m scripts.mutations --seed 1 --count 5000
    python -m scripts.mutations --seed 1 --count 300 --format plan
    python -m scripts.mutations --case plan:1:17

A case is a valid file of the project's own making, one mutation of it, and the project's own reader or command. It
comes out `fine` (read), `refused` (in a sentence that names the file, of JSON lines the line, and of a field that was
changed the field), or it is a failure: `traceback` (anything else that is raised), `unnamed` (a sentence that lacks a
name), or `time` (longer than `LIMIT` seconds). The last line of each failure reproduces it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import math
import os
import random
import re
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # tests.report_records: small records of every kind, by the project's own writers

from sparseattn.cache.index_files import append_kept, load_index  # noqa: E402
from sparseattn.cli.app import app  # noqa: E402
from sparseattn.cli.command import raised_here  # noqa: E402
from sparseattn.core.rope import Rope  # noqa: E402
from sparseattn.cost_model.machine import Machine, Speed  # noqa: E402
from sparseattn.evaluation.builtin_traces import pieces_of  # noqa: E402
from sparseattn.evaluation.layouts.registry import read_prompts  # noqa: E402
from sparseattn.evaluation.tasks.records import Records as EvalRecords  # noqa: E402
from sparseattn.models.gguf import convert, folder_of  # noqa: E402
from sparseattn.recommend.records import TrialRecords as RecommendRecords  # noqa: E402
from sparseattn.roles.plan import Plan  # noqa: E402
from sparseattn.roles.role import Role  # noqa: E402
from sparseattn.roles.roles import Roles  # noqa: E402
from sparseattn.selectors.base import Rows  # noqa: E402
from sparseattn.selectors.pages.quest import Quest  # noqa: E402
from sparseattn.selectors.parameters.channel_calibration import Calibration  # noqa: E402
from sparseattn.selectors.parameters.layer_similarity import Similarity  # noqa: E402
from sparseattn.selectors.parameters.logit_fit import Estimates  # noqa: E402
from sparseattn.selectors.parameters.saap_artefact import Artefact  # noqa: E402
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition  # noqa: E402
from sparseattn.selectors.registry import make_selector  # noqa: E402
from sparseattn.serving.vllm import settings as vllm_settings  # noqa: E402
from sparseattn.traces.trace import Trace  # noqa: E402
from sparseattn.traces.trace_format import hash_of  # noqa: E402
from sparseattn.utils.tensor_files import HASH, content_hash  # noqa: E402

report_records: Any = importlib.import_module("tests.report_records")

LIMIT = 20  # seconds of a case
DEEP = 3000  # brackets within each other
FINE, REFUSED, TRACEBACK, UNNAMED, TIME = OUTCOMES = ("fine", "refused", "traceback", "unnamed", "time")
# Sentences about a file as a whole, which has no line to name.
WHOLE = re.compile(r"is empty|holds no prompt|is not UTF-8|holds no records")


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Args:
        make: its bytes, valid.
        read: what the project does with the file at a path.
        mutate: a mutation of the bytes: what was done, the keys that a refusal may name (none: any), and the bytes.
        name: of the file.
        lines: whether it is JSON lines, so that a refusal names one.
        file: whether there is a file to be named.
    """

    make: Callable[[], bytes]
    read: Callable[[Path], None]
    mutate: Callable[[random.Random, bytes], Mutation]
    name: str
    lines: bool = False
    file: bool = True


@dataclass(frozen=True)
class Mutation:
    """What was done, the keys of the field that was changed, and the bytes."""

    what: str
    keys: tuple[str, ...]
    data: bytes


@dataclass(frozen=True)
class Outcome:
    """Of a case: one of `OUTCOMES`, and for a failure what was raised or said."""

    kind: str
    said: str = ""


# -- mutations of bytes and texts --------------------------------------------------------------------------------------


def mutated_bytes(draw: random.Random, data: bytes) -> Mutation:
    """Cut off, flipped, empty, doubled, with bytes that are no UTF-8, or with others of any kind."""
    at = draw.randrange(len(data) + 1)
    kind = draw.choice(("cut off", "flipped", "empty", "no UTF-8", "zero", "inserted", "doubled", "deep"))
    made = bytearray(data)
    if kind == "cut off":
        del made[at:]
    elif kind == "flipped":
        for _ in range(draw.choice((1, 1, 2, 8))):
            made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    elif kind == "empty":
        made.clear()
    elif kind == "doubled":
        made += data
    else:
        more = {
            "no UTF-8": b"\xff\xfe",
            "zero": b"\0",
            "inserted": bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 40)))),
            "deep": b"[" * DEEP,
        }
        made[at:at] = more[kind]
    return Mutation(f"{kind} at byte {at}", (), bytes(made))


# -- mutations of JSON -------------------------------------------------------------------------------------------------

NEST = "@@deep@@"  # stands for brackets within brackets until the text is made
ODD: tuple[Any, ...] = (
    *(None, True, False, "", "text", "0", 0, -1, 1, 2, 64, 1.5, -0.5, 1e15, 1e16, -1e300, 1e308, 2_000_000_000, 2**63),
    *(
        10**30,
        10**299,
        10**400,
        math.nan,
        math.inf,
        -math.inf,
        [],
        {},
        [[]],
        [None],
        {"": None},
        ["a", 1],
        {"a": {"b": []}},
    ),
    *("\ud800", "\x1b[31m", "x" * 5000, "9" * 400, "all", "mass:0.95", NEST),
)


def places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value within one, as keys and indices."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*keys, key)
        yield from places(inner, (*keys, key))


def mutated_value(draw: random.Random, value: Any) -> tuple[str, tuple[str, ...], Any]:
    """A JSON value with one place changed: what was done, the keys on the way there, and the value."""
    made = copy.deepcopy(value)
    found = list(places(made))
    kind = draw.choice(
        ("dropped", "renamed", "retyped", "retyped", "retyped", "wrapped", "emptied", "repeated", "scaled")
    )
    if not found:
        return "replaced", (), draw.choice(ODD)
    depth = draw.randrange(1, 1 + max(map(len, found)))  # fields of the top are as likely as the many far below
    place = draw.choice([one for one in found if len(one) == depth])
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    last, keys = place[-1], tuple(key for key in place if isinstance(key, str))
    old = holder[last]
    if kind == "dropped":
        del holder[last]
    elif kind == "renamed" and isinstance(holder, dict):
        keys = (*keys, draw.choice((f"{last}x", "", "other", "layers")))
        holder[keys[-1]] = holder.pop(last)
    elif kind == "wrapped":
        holder[last] = draw.choice(([old], {"value": old}, [old, old]))
    elif kind == "emptied" and isinstance(old, (list, dict, str)):
        holder[last] = type(old)()
    elif kind == "repeated" and isinstance(old, list):
        holder[last] = old + old
    elif kind == "scaled" and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[last] = old * draw.choice((-1, 0, 10, 1_000_000, 10**20)) + draw.choice((0, 0, 1))
    else:
        kind, holder[last] = "retyped", draw.choice(ODD)
    return f"{kind} {'.'.join(map(str, place))}", keys, made


def json_text(draw: random.Random, value: Any) -> str:
    """Of a value, with `NEST` as brackets."""
    return json.dumps(value).replace(f'"{NEST}"', "[" * DEEP + "]" * DEEP)


def twice(draw: random.Random, text: str) -> tuple[str, str]:
    """The text with one of its keys a second time, before itself, and the key."""
    keys = list(re.finditer(r'"([^"\\]*)": ', text))
    if not keys:
        return "", text
    one = draw.choice(keys)
    return one[1], f"{text[: one.start()]}{one[0]}null, {text[one.start() :]}"


def mutated_json(draw: random.Random, data: bytes) -> Mutation:
    """Of a file that is one JSON value."""
    if draw.random() < 0.2:
        return mutated_bytes(draw, data)
    if draw.random() < 0.1:
        key, text = twice(draw, data.decode())
        return Mutation(f"{key} twice", (key,), text.encode())
    what, keys, value = mutated_value(draw, json.loads(data))
    return Mutation(what, keys, json_text(draw, value).encode())


def mutated_lines(draw: random.Random, data: bytes) -> Mutation:
    """Of a file of JSON lines."""
    lines = data.decode().splitlines()
    keys: tuple[str, ...]
    at = draw.randrange(len(lines))
    chance = draw.random()
    if chance < 0.15:
        return mutated_bytes(draw, data)
    if chance < 0.3:
        kind = draw.choice(("dropped", "doubled", "swapped", "bracketed", "only"))
        if kind == "dropped":
            del lines[at]
        elif kind == "doubled":
            lines.insert(at, lines[at])
        elif kind == "swapped":
            lines.append(lines.pop(at))
        elif kind == "only":
            lines = [lines[at]]
        else:
            lines[at] = draw.choice(
                ("[1]", "7", '"text"', "null", "{}", "[" * DEEP + "]" * DEEP, '{"a":' * DEEP, "NaN")
            )
        return Mutation(f"line {at + 1} {kind}", (), "".join(f"{line}\n" for line in lines).encode())
    if chance < 0.4:
        key, lines[at] = twice(draw, lines[at])
        what, keys = f"{key} twice", (key,)
    elif chance < 0.6:  # in every line, as another release might have it
        state = draw.getstate()
        for i, line in enumerate(lines):
            draw.setstate(state)
            what, keys, value = mutated_value(draw, json.loads(line))
            lines[i] = json_text(draw, value)
        what, keys = f"{what} in every line", ()
    else:
        what, keys, value = mutated_value(draw, json.loads(lines[at]))
        lines[at] = json_text(draw, value)
    return Mutation(f"line {at + 1}: {what}", keys, "".join(f"{line}\n" for line in lines).encode())


# -- mutations of tensor files -----------------------------------------------------------------------------------------

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def mutated_tensor(draw: random.Random, one: torch.Tensor) -> tuple[str, torch.Tensor]:
    kind = draw.choice(("dtype", "flat", "more", "turned", "fewer", "none", "filled", "scalar", "bool"))
    if kind == "dtype":
        dtype = draw.choice(DTYPES)
        return f"as {dtype}", one.to(dtype)
    if kind == "bool":
        return "as bool", one.bool()
    if kind == "flat":
        return kind, one.flatten()
    if kind == "more":
        return "a dimension more", one[None]
    if kind == "turned":
        return kind, one.transpose(0, -1) if one.ndim > 1 else one.flip(0) if one.ndim else one
    if kind in ("fewer", "none"):
        dim = draw.randrange(one.ndim) if one.ndim else 0
        return f"{kind} of dimension {dim}", one.narrow(
            dim, 0, one.shape[dim] // 2 if kind == "fewer" else 0
        ) if one.ndim else one
    if kind == "scalar":
        return kind, one.flatten()[:1].reshape(()) if one.numel() else one
    made, value = one.clone(), draw.choice((math.nan, math.inf, -1, 0, 1e30, 2**40))
    if made.numel():
        with contextlib.suppress(RuntimeError, OverflowError):  # beyond the dtype
            made.view(-1)[draw.randrange(made.numel()) :] = value
    return f"filled with {value}", made


def mutated_tensors(draw: random.Random, data: bytes) -> Mutation:
    """Of a safetensors file: its metadata or tensors, with hashes made anew, or its bytes."""
    from safetensors.torch import load, save

    size = int.from_bytes(data[:8], "little")
    keys: tuple[str, ...] = ()
    chance = draw.random()
    if chance < 0.12:
        return mutated_bytes(draw, data)
    header = json.loads(data[8 : 8 + size])
    if chance < 0.25:  # the header itself, which says where tensors lie
        what, _, value = mutated_value(draw, header)
        text = json_text(draw, value).encode(errors="replace")
        length = draw.choice((len(text),) * 8 + (0, 1, len(text) - 1, 2**63, 2**40))
        return Mutation(f"header: {what}", (), length.to_bytes(8, "little") + text + data[8 + size :])
    metadata: dict[str, Any] = header["__metadata__"]
    tensors = {name: one.clone() for name, one in load(data).items()}
    if chance < 0.6:
        name = draw.choice([key for key in metadata if key not in (HASH, "hashes")])
        text = metadata[name]
        keys = (name,)
        try:
            what, inner, value = mutated_value(draw, json.loads(text))
            metadata[name], keys = json_text(draw, value), (name, *inner)
        except ValueError:  # it is plain text
            what, metadata[name] = "another text", draw.choice(("", "text", f"{text}x", "7", "null"))
        if draw.random() < 0.1:
            what = draw.choice(("dropped", "deep", "no JSON"))
            metadata.pop(name) if what == "dropped" else metadata.update({name: "[" * DEEP if what == "deep" else "{"})
        what, keys = f"metadata {name}: {what}", keys
    else:
        name, keys = draw.choice(list(tensors)), ()
        kind = draw.choice(("dropped", "renamed", "copied", "changed", "changed", "changed", "changed"))
        if kind == "changed":
            what, tensors[name] = mutated_tensor(draw, tensors[name])
            what = f"{name}: {what}"
        else:
            what, one = f"{name} {kind}", tensors[name]
            if kind != "copied":
                del tensors[name]
            if kind != "dropped":
                tensors[
                    draw.choice((f"{name}x", "layers.0.other", "layers.x.keys", "a", "layers.99999999999.scale"))
                ] = one.clone()
    metadata = {key: text.encode(errors="replace").decode() for key, text in metadata.items()}
    tensors = {key: one.contiguous() for key, one in tensors.items()}
    if "hashes" in metadata:
        with contextlib.suppress(Exception):  # of a tensor that a trace cannot hold
            metadata["hashes"] = json.dumps({key: hash_of(key, one) for key, one in tensors.items()})
    if HASH in metadata:
        metadata[HASH] = content_hash(tensors, metadata)
    return Mutation(what, keys, save(tensors, metadata))


# -- mutations of GGUF files -------------------------------------------------------------------------------------------


def mutated_gguf(draw: random.Random, data: bytes) -> Mutation:
    """Of the numbers in a header, which count and measure, or of any bytes."""
    if draw.random() < 0.3:
        return mutated_bytes(draw, data)
    end = data.index(b"token_embd.weight")  # where the tensors' lines begin
    keys = list(re.finditer(rb"(?:llama|general|tokenizer)\.[a-z_.]+", data[:end]))
    made = bytearray(data)
    if keys and draw.random() < 0.6:
        one = draw.choice(keys)
        at = one.end()  # the type, and the number or the length behind it
        what = one[0].decode()
        if draw.random() < 0.2:
            made[at : at + 4] = struct.pack("<I", draw.choice((0, 4, 8, 9, 10, 12, 13, 2**31)))
            return Mutation(f"type of {what}", (), bytes(made))
        kind = struct.unpack("<I", data[at : at + 4])[0]
        value = draw.choice((0, 1, 3, 1000, 2_000_000_000, 2**32 - 1))
        if kind in (8, 10, 11):
            made[at + 4 : at + 12] = struct.pack("<Q", draw.choice((value, 2**63, 2**64 - 1)))
        elif kind == 9:
            made[at + 8 : at + 16] = struct.pack("<Q", draw.choice((value, 2**63, 2**64 - 1)))
        else:
            made[at + 4 : at + 8] = struct.pack("<I", value)
        return Mutation(f"{what} as {value}", (), bytes(made))
    at = draw.choice((8, 16, draw.randrange(4, max(end - 8, 5))))
    value = draw.choice((0, 1, 2_000_000_000, 2**40, 2**63, 2**64 - 1))
    made[at : at + 8] = struct.pack("<Q", value)
    return Mutation(f"{value} at byte {at}", (), bytes(made))


# -- mutations of a selector's text ------------------------------------------------------------------------------------


def mutated_spec(draw: random.Random, data: bytes) -> Mutation:
    text = draw.choice(data.decode().splitlines())
    at = draw.randrange(len(text) + 1)
    kind = draw.choice(("deep", "deep", "letters", "number", "cut off", "long", "sign"))
    if kind == "deep":
        opening, closing = draw.choice(("[]", "()", "{}"))
        inner = draw.choice(("topp:inner=", "twostage:pages=", "", "quest:page="))
        text = (
            f"{draw.choice(('twostage:pages=', 'topp:inner=', 'quest:page='))}"
            + f"{opening}{inner}" * DEEP
            + "1"
            + closing * DEEP
        )
    elif kind == "letters":
        text = (
            text[:at]
            + "".join(draw.choice("[](){}=:,.'\"\\ \0é\ud800-+*0") for _ in range(draw.choice((1, 2, 5))))
            + text[at:]
        )
    elif kind == "number":
        text = re.sub(
            r"\d+", lambda match: draw.choice(("0", "-1", "1e400", "9" * 400, "9" * 5000, "1.5", "nan")), text, count=1
        )
    elif kind == "cut off":
        text = text[:at]
    elif kind == "sign":
        text = f"quest:page={draw.choice('-~+(') * 5000}1"
    else:
        text = text[:at] + draw.choice("ax,:=[") * 20_000 + text[at:]
    return Mutation(kind, (), text.encode(errors="surrogatepass"))


# -- valid files -------------------------------------------------------------------------------------------------------


@functools.cache
def _folder() -> Path:
    """Where records of every kind lie; of this process, removed with it."""
    held = tempfile.TemporaryDirectory(prefix="mutations-")
    _KEPT.append(held)
    report_records.fill(Path(held.name))
    return Path(held.name)


_KEPT: list[Any] = []


def _record(path: str) -> Callable[[], bytes]:
    return lambda: (_folder() / path).read_bytes()


def _saved(save: Callable[[Path], object]) -> Callable[[], bytes]:
    """The bytes that something writes to a path."""

    def make() -> bytes:
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            save(Path(folder) / "file.safetensors")
            return (Path(folder) / "file.safetensors").read_bytes()

    return make


def _json_of(make: Callable[[], Any]) -> Callable[[], bytes]:
    return lambda: json.dumps(make()).encode()


def _plan() -> Plan:
    layers: dict[int, Any] = {
        0: "window",
        1: [Role("quest", 64), "dense"],
        2: Role("twostage:pages=[quest:page=8],times=4", 0.05),
    }
    made = {"bound": {"measure": "kl", "most": 0.1}, "cost": {"plan": 1.0, "full": 2.0}, "versions": {"torch": "2"}}
    return Plan(layers, "small", model={"name": "reference", "fingerprint": "0" * 16}, made=made)


def _roles() -> Roles:
    return Roles(
        {0: "dense", 1: ["window", Role("lowbit:bits=1", "mass:0.95")], 3: Role("quest", 32)}, "mixed", {"of": "a"}
    )


def _machine() -> Machine:
    speeds = {name: {"dense": Speed(1e-5, 1e12), "attend": Speed(1e-5, 1e11, 1e-9)} for name in ("bfloat16", "float32")}
    return Machine("here", 1e10, speeds, "cpu", False, "measured", {"cores": 2})


def _rows() -> Rows:
    made = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 1, 2, 64, 16, generator=made)
    return Rows(keys, values, torch.arange(64).expand(1, -1))


def _index() -> bytes:
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        append_kept(Quest(8), _rows(), folder)
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


def _artefact(path: Path) -> None:
    made = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    layers = {
        i: Partition(draw(2, 4, 8), Classifier(draw(2, 3, 8), draw(2, 3), draw(2, 4, 3), draw(2, 4))) for i in (0, 2)
    }
    ropes = {0: Rope.of(8), 2: Rope.of(8)}
    Artefact(layers, ropes=ropes, meta={"model": "m", "heads": 2, "group": 1, "size": 8}).save(path)


def _calibration(path: Path) -> None:
    layers = {i: {"basis": torch.eye(8).expand(2, 8, 8).clone(), "variance": torch.ones(2, 8)} for i in (0, 1)}
    Calibration("loki", layers, roped=False, ropes={0: Rope.of(8), 1: Rope.of(8)}, meta={"model": "m"}).save(path)


def _estimates(path: Path) -> None:
    layers = {i: (torch.ones(2, 2), torch.zeros(2, 2)) for i in (0, 1)}
    Estimates("quest:page=16,group=sum,int8=False", layers, {"model": "m", "traces": ["a"]}).save(path)


def _similarity(path: Path) -> None:
    Similarity([0, 1, 2], torch.full((3, 3, 2, 2), 0.5).float(), {"model": "m"}).save(path)


def _eval_settings() -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((_folder() / "eval" / "eval.jsonl").read_text().splitlines()[0])["settings"]
    return settings


def _recommend_settings() -> dict[str, Any]:
    first: dict[str, Any] = json.loads((_folder() / "recommend" / "recommend.jsonl").read_text().splitlines()[0])
    return {name: value for name, value in first.items() if name != "record"}


def _prompts() -> bytes:
    lines: list[dict[str, Any]] = [
        {"context": "The key is 7. " * 20, "question": "What is the key?", "answers": ["7", 7]},
        {"input": "x" * 300, "outputs": ["x"], "answer_prefix": "It is"},
        {"prompt": "word " * 80, "answer": "word"},
    ]
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


def _gguf() -> bytes:
    """A llama of two layers with no weights worth reading: header, entries and tensors of the right shapes."""
    import numpy
    from gguf import GGUFWriter

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        path = Path(folder) / "tiny.gguf"
        out = GGUFWriter(str(path), "llama")
        for add, value in (
            (out.add_context_length, 64), (out.add_embedding_length, 16), (out.add_block_count, 2),
            (out.add_feed_forward_length, 24), (out.add_head_count, 2), (out.add_head_count_kv, 1),
            (out.add_rope_dimension_count, 8), (out.add_vocab_size, 260),
        ):  # fmt: skip
            add(value)
        out.add_layer_norm_rms_eps(1e-6)
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("gpt-2")
        out.add_token_list([chr(0x100 + i) for i in range(257)] + [chr(0x100) + chr(0x101), "<s>", "</s>"])
        out.add_token_types([1] * 260)
        out.add_token_merges([f"{chr(0x100)} {chr(0x101)}"])
        shapes = {"token_embd": (260, 16), "output_norm": (16,), "output": (260, 16)}
        for i in range(2):
            shapes |= {f"blk.{i}.{name}": (16,) for name in ("attn_norm", "ffn_norm")}
            shapes |= {f"blk.{i}.attn_q": (16, 16), f"blk.{i}.attn_k": (8, 16), f"blk.{i}.attn_v": (8, 16)}
            shapes |= {f"blk.{i}.attn_output": (16, 16), f"blk.{i}.ffn_gate": (24, 16), f"blk.{i}.ffn_up": (24, 16)}
            shapes |= {f"blk.{i}.ffn_down": (16, 24)}
        for name, shape in shapes.items():
            out.add_tensor(f"{name}.weight", numpy.full(shape, 0.1, dtype=numpy.float32))
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        return path.read_bytes()


# -- readers -----------------------------------------------------------------------------------------------------------


class Said(ValueError):
    """A command's refusal, as it stands on standard error."""


def command(*arguments: str | Path) -> None:
    """Runs a command in this process; `Said` with what it says where it refuses, and what it raises otherwise."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    if done.exit_code == 2 and isinstance(done.exception, SystemExit):
        raise Said(" ".join(done.stderr.split()))
    if done.exception is not None and not (isinstance(done.exception, SystemExit) and done.exit_code in (0, 1)):
        raise done.exception


def report(path: Path) -> None:
    command("report", path.parent, "--out", path.parent / "page.html")


def info(path: Path) -> None:
    """`info FILE`, which says what damage there is and ends with 1."""
    command("info", path)


def _trace(path: Path) -> None:
    trace = Trace.open(path)
    trace.verify()
    for index in trace.layers:
        trace.layer(index)
    pieces_of(trace)
    info(path)


def _and_info(load: Callable[[Path], object]) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        load(path)
        info(path)

    return read


def _selector(path: Path) -> None:
    text = path.read_bytes().decode(errors="surrogatepass")
    repr(make_selector(text))
    Role(text)


def _converted(path: Path) -> None:
    os.environ["SPARSEATTN_CACHE"] = str(path.parent / "cache")
    convert(path, folder_of(path))


def _vllm(path: Path) -> None:
    os.environ[vllm_settings.VARIABLE] = path.read_bytes().decode(errors="replace").replace("\0", "")
    try:
        vllm_settings.configured(None)
    finally:
        del os.environ[vllm_settings.VARIABLE]


VLLM = {"layers": {"0": "dense", "1": {"method": "quest:page=16", "budget": 64}}, "sink": 4, "window": 64, "above": 0}

SPECS = (
    *("quest:page=16,group=sum", "lowbit:bits=1,page=16", "infllm:distance=64"),
    "twostage:pages=[quest:page=8,int8=True],times=4",
)

FORMATS: dict[str, Format] = {
    **{
        f"report {name}": Format(_record(f"{folder}/{name}"), report, mutated_lines, name, lines=True)
        for folder, name in (
            *(("bench", "bench.jsonl"), ("bench", "by-layer.jsonl"), ("inspect", "inspect.jsonl")),
            *(("recall", "recall.jsonl"), ("eval", "eval.jsonl"), ("recommend", "recommend.jsonl")),
        )
    },
    "eval records": Format(
        _record("eval/eval.jsonl"),
        lambda path: void(EvalRecords(path, _eval_settings())),
        mutated_lines,
        "eval.jsonl",
        lines=True,
    ),
    "recommend records": Format(
        _record("recommend/recommend.jsonl"),
        lambda path: void(RecommendRecords(path, _recommend_settings())),
        mutated_lines,
        "recommend.jsonl",
        lines=True,
    ),
    "prompts": Format(_prompts, lambda path: void(read_prompts(path)), mutated_lines, "own.jsonl", lines=True),
    "plan": Format(
        _json_of(lambda: _plan().record()), lambda path: void(repr(Plan.load(path))), mutated_json, "plan.json"
    ),
    "roles": Format(
        _json_of(lambda: _roles().record()), lambda path: void(repr(Roles.load(path))), mutated_json, "roles.json"
    ),
    "machine": Format(
        _json_of(lambda: _machine().as_dict()), lambda path: void(Machine.load(str(path))), mutated_json, "cpu.json"
    ),
    "vllm settings": Format(_json_of(lambda: VLLM), _vllm, mutated_json, "settings.json", file=False),
    "selector": Format(lambda: "\n".join(SPECS).encode(), _selector, mutated_spec, "selector.txt", file=False),
    "trace": Format(_saved(lambda path: report_records.trace().save(path)), _trace, mutated_tensors, "t.safetensors"),
    "index": Format(_index, lambda path: void(load_index(Quest(8), _rows(), path)), mutated_tensors, "i.safetensors"),
    "artefact": Format(_saved(_artefact), _and_info(Artefact.load), mutated_tensors, "saap.safetensors"),
    "calibration": Format(_saved(_calibration), _and_info(Calibration.load), mutated_tensors, "loki.safetensors"),
    "estimates": Format(_saved(_estimates), _and_info(Estimates.load), mutated_tensors, "mass.safetensors"),
    "similarity": Format(_saved(_similarity), _and_info(Similarity.load), mutated_tensors, "kascade.safetensors"),
    "gguf": Format(_gguf, _converted, mutated_gguf, "tiny.gguf"),
}


def void(_: object) -> None:
    """Forgets what was read."""


# -- cases -------------------------------------------------------------------------------------------------------------


@functools.cache
def valid(name: str) -> bytes:
    """The bytes of a format's valid file."""
    return FORMATS[name].make()


def mutation(name: str, seed: int, number: int) -> Mutation:
    """The mutation of a case."""
    return FORMATS[name].mutate(random.Random(f"{name} {seed} {number}"), valid(name))


class _Late(BaseException):
    """A case that takes longer than it may; no handler of the code that is run catches it."""


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(name: str, made: Mutation) -> Outcome:
    """What the project does with mutated bytes of a format."""
    form = FORMATS[name]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "held" / form.name
        path.parent.mkdir()
        path.write_bytes(made.data)
        try:
            with _within(LIMIT):
                form.read(path)
        except _Late:
            return Outcome(TIME, f"longer than {LIMIT} s")
        except (ValueError, OSError, ImportError) as error:
            if not (isinstance(error, (Said, OSError)) or raised_here(error)):
                return Outcome(TRACEBACK, "".join(traceback.format_exception(error)[-4:]))
            return _judged(form, made, str(error))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return Outcome(TRACEBACK, "".join(traceback.format_exception(error)[-4:]))
    return Outcome(FINE)


def _judged(form: Format, made: Mutation, said: str) -> Outcome:
    """`REFUSED`, or `UNNAMED` where the sentence lacks the file, the line or the field."""
    if form.file and form.name not in said:
        return Outcome(UNNAMED, f"no file in: {said}")
    if "\n" in said:
        return Outcome(UNNAMED, f"more than a line: {said}")
    if form.lines and not re.search(r"line \d+", said) and not WHOLE.search(said):
        return Outcome(UNNAMED, f"no line in: {said}")
    if "nested more than" in said:  # before anything is parsed: by line and column
        return Outcome(REFUSED, said)
    keys = [key for key in made.keys if key] if form.file and (form.lines or form.mutate is mutated_json) else []
    if keys and not any(_in(key, said) for key in keys):
        return Outcome(UNNAMED, f"none of the fields {', '.join(made.keys)} in: {said}")
    return Outcome(REFUSED, said)


def _in(key: str, said: str) -> bool:
    return key in said or key.encode(errors="replace").decode()[:20] in said


@dataclass
class Count:
    """Outcomes by format, and the failures."""

    by_format: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, seed: int, number: int, made: Mutation, found: Outcome) -> None:
        self.by_format.setdefault(name, collections.Counter())[found.kind] += 1
        if found.kind not in (FINE, REFUSED):
            again = f"python -m scripts.mutations --case '{name}:{seed}:{number}'"
            self.failures.append(f"{name}, {made.what}: {found.kind}\n{found.said.rstrip()}\n{again}")

    def total(self, kind: str) -> int:
        return sum(one[kind] for one in self.by_format.values())

    def table(self) -> str:
        head = f"{'format':24}" + "".join(f"{kind:>11}" for kind in OUTCOMES)
        rows = [f"{name:24}" + "".join(f"{one[kind]:11,}" for kind in OUTCOMES) for name, one in self.by_format.items()]
        return "\n".join([head, *rows, f"{'all':24}" + "".join(f"{self.total(kind):11,}" for kind in OUTCOMES)])


def run(seed: int, numbers: Sequence[int], formats: Sequence[str] = tuple(FORMATS)) -> Count:
    """Cases by their numbers; each number is a case of one of the formats in turn."""
    count = Count()
    for number in numbers:
        name = formats[number % len(formats)]
        made = mutation(name, seed, number)
        count.add(name, seed, number, made, outcome(name, made))
    return count


def main(given: Sequence[str] | None = None) -> int:
    """Prints counts and failures; 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--format", choices=list(FORMATS), action="append", help="repeat for more; default all")
    parser.add_argument("--case", help="FORMAT:SEED:NUMBER, as a failure is reported")
    parser.add_argument("--most", type=int, default=20, help="failures that are printed")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    if asked.case:
        name, seed, number = asked.case.rsplit(":", 2)
        made = mutation(name, int(seed), int(number))
        found = outcome(name, made)
        print(f"{made.what}: {found.kind}\n{found.said}")
        return int(found.kind not in (FINE, REFUSED))
    count = run(asked.seed, range(asked.count), asked.format or tuple(FORMATS))
    for failure in count.failures[: asked.most]:
        print(failure, end="\n\n")
    print(count.table())
    return int(bool(count.failures))


if __name__ == "__main__":
    sys.exit(main())
