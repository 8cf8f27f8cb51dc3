"""Pictures of the documents, drawn from records; each says in itself which records it was drawn from.

`pictures.toml` has them: a function of `drawing.py`, records, and with `where` and `drop` which of their rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.evidence import frames, toml
from scripts.evidence.frames import Load, Record
from scripts.evidence.step import REPOSITORY
from scripts.evidence.tables import matches
from sparseattn.utils.files import write_atomic

DEFINED = Path(__file__).with_name("pictures.toml")
STAMP = re.compile(r"<!-- drawn from ([0-9a-f]{64}) -->\n")


def draw(definition: Mapping[str, Any], records: Sequence[Record], path: Path) -> None:
    """Draws a picture of records to a file."""
    from scripts.evidence.drawing import DRAWN  # which needs matplotlib

    where, drop = definition.get("where", {}), definition.get("drop")
    every = [frames.measured(record) for record in records]
    kept = [[row for row in rows if matches(row, where) and not (drop and matches(row, drop))] for rows in every]
    DRAWN[definition["draw"]](path, records, kept)


def redraw(load: Load, write: bool, root: Path = REPOSITORY) -> list[str]:
    """Draws the pictures that show other records than there are, or only says which; returns what is wrong."""
    wrong = []
    for name, picture in toml.read(DEFINED).items():
        path = root / "docs" / "figures" / f"{name}.svg"
        try:
            records = [load(one) for one in picture["records"]]
        except LookupError as error:
            wrong.append(f"docs/figures/{path.name}: {error.args[0]}")
            continue
        now = stamp(picture, records)
        if path.exists() and stamped(path) == now:
            continue
        if write:
            draw(picture, records, path)
            mark(path, now)
        else:
            wrong.append(f"docs/figures/{path.name} was drawn from other records; draw it by --documents")
    return wrong


def stamp(definition: Mapping[str, Any], records: Sequence[Record]) -> str:
    """SHA-256 of how records are drawn, and of them, however they are laid out in their files."""
    return hashlib.sha256(json.dumps([definition, records], sort_keys=True).encode()).hexdigest()


def mark(path: Path, stamp: str) -> None:
    """Writes a stamp into a picture, as a comment that no viewer shows."""
    head, svg, rest = path.read_text().partition("<svg ")
    write_atomic(path, f"{head}<!-- drawn from {stamp} -->\n{svg}{rest}".encode())


def stamped(path: Path) -> str | None:
    """The stamp that `mark` wrote, or None."""
    found = STAMP.search(path.read_text())
    return found[1] if found else None
