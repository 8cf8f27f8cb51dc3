"""Pictures of the documents, drawn from records; each says in itself which records it was drawn from."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.step import REPOSITORY
from sparseattn.files import write_atomic

Record: TypeAlias = "Mapping[str, Any]"

SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = b"Records"  # of the text in a picture that holds the SHA-256 of the records it shows


def frontier(record: Record, path: Path) -> None:
    """Quality of every method of a trace against bytes and rows."""
    from sparseattn.cli import plots

    plots.frontier([_evaluation(one) for one in rows(record)], path)


def _evaluation(one: Record) -> Evaluation:
    """A measurement as `bench` has it, of its means alone."""
    means = {name.removeprefix("mean."): value for name, value in one.items() if name.startswith("mean.")}
    heads = {name: torch.tensor([[float("nan") if value is None else value]]) for name, value in means.items()}
    settings = {name: one[name] for name in ("tokens", "last", "sink", "window")}
    return Evaluation(one["trace"], one["selector"], one["label"], one["budget"], settings, tuple(one["layers"]), heads)


def recall(*records_and_path: Any) -> None:
    """Recall against keys scanned, of the most keys of each record."""
    from sparseattn.cli import plots

    *records, path = records_and_path
    columns = []
    for record in records:
        found = Swept(record)
        keys = found.keys[-1]
        control = {label: found.curve(label, keys, CONTROL) for label in found.labels}
        for gap in found.gaps:
            title = f"trace {found.name}, {keys:,} keys" if gap is None else f"gap {gap:g}, {keys:,} keys"
            asked = {label: found.curve(label, keys, ASKED, gap) for label in found.labels}
            columns.append(Column(title, asked, control))
    plots.recall(columns, LEVEL, path)


def growth(record: Record, path: Path) -> None:
    """Keys scanned and time as the keys of a trace grow."""
    from sparseattn.cli import plots

    found = Swept(record)
    lines = {
        label: [{keys: found.curve(label, keys, direction) for keys in found.keys} for direction in (ASKED, CONTROL)]
        for label in found.labels
    }
    plots.scaling([ASKED, CONTROL], lines, LEVEL, path, found.name)


def agreement(*records_and_path: Any) -> None:
    """Divergence from full attention against rows and bytes."""
    from sparseattn.cli import plots

    *records, path = records_and_path
    plots.agreement([{**one, "settings": record["settings"]} for record in records for one in rows(record)], path)


def accuracy(record: Record, path: Path) -> None:
    """Score against budget."""
    from sparseattn.cli import plots

    shown = [one for one in rows(record) if one["method"] not in ("Random", "Quest(group='each')")]
    plots.accuracy([{**one, "settings": record["settings"]} for one in shown], path)


def scaling(record: Record, path: Path) -> None:
    """A step by context, batch and budget."""
    from benchmarks.scaling import picture

    picture(record, path)


# Picture below docs/ -> the records it shows, and what draws it.
PICTURES: dict[str, tuple[tuple[str, ...], Callable[..., None]]] = {
    "eval-accuracy.png": (("eval-reference-cpu",), accuracy),
    "scaling-cpu.png": (("scaling-cpu",), scaling),
}


def redraw(load: Callable[[str], Record], write: bool, root: Path = REPOSITORY) -> list[str]:
    """Draws the pictures that show other records than there are, or only says which; returns what is wrong."""
    wrong = []
    for name, (records, draw) in PICTURES.items():
        path = root / "docs" / name
        try:
            shown = [load(one) for one in records]
        except LookupError as error:
            wrong.append(f"docs/{name}: {error.args[0]}")
            continue
        now = stamp(shown)
        if path.exists() and stamped(path.read_bytes()) == now:
            continue
        if write:
            draw(*shown, path)
            write_atomic(path, marked(path.read_bytes(), now))
        else:
            wrong.append(f"docs/{name} was drawn from other records; draw it by --documents")
    return wrong


def stamp(records: list[Record]) -> str:
    """SHA-256 of records, however they are laid out in their files."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def marked(png: bytes, words: str) -> bytes:
    """The picture with `words` as a text chunk behind its header."""
    at = len(SIGNATURE) + 25  # the header is 13 bytes and 12 of a chunk's own
    body = KEYWORD + b"\0" + words.encode()
    chunk = struct.pack(">I", len(body)) + b"tEXt" + body + struct.pack(">I", zlib.crc32(b"tEXt" + body))
    return png[:at] + chunk + png[at:]


def stamped(png: bytes) -> str | None:
    """The words of `marked`, or None."""
    at = len(SIGNATURE)
    while at + 8 <= len(png):
        (size,) = struct.unpack_from(">I", png, at)
        body = png[at + 8 : at + 8 + size]
        if png[at + 4 : at + 8] == b"tEXt" and body.startswith(KEYWORD + b"\0"):
            return body.split(b"\0", 1)[1].decode()
        at += 12 + size
    return None
