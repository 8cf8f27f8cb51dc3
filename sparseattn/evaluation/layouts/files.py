"""Files of lines as benchmarks publish them: JSON Lines, JSON, parquet, and folders of these or of `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparseattn.evaluation.layouts.base import Line
from sparseattn.evaluation.tasks.jsonlines import DIGITS, json_object
from sparseattn.utils.files import read_text
from sparseattn.utils.json_text import parse

TABLES = (".parquet", ".arrow")
TEXTS = (".jsonl", ".json")
ASKS = ("context", "prompt", "input", "question", "query")  # a line of every layout has one of them
ANSWERS = ("answer", "answers", "outputs", "output", "target")
BOM = "\ufeff"  # with which some programs begin a file of UTF-8


def lines(path: Path, skipped: list[Path] | None = None) -> Iterator[Line]:
    """Yield the lines of a file, or of every file of a folder in the order of their names.

    Of a folder's JSON files those without a prompt are skipped, such as templates and what `datasets` says of a set.

    Args:
        path: the file or folder.
        skipped: takes those that are skipped.

    Raises:
        OSError: no such file.
        ImportError: a table, and pyarrow is missing.
        ValueError: naming file and line: no object, a table that cannot be read, a folder without such files.
    """
    if not path.is_dir():
        yield from _of_file(path)
        return
    inside = [file for file in sorted(path.rglob("*")) if file.suffix in (*TABLES, *TEXTS) and file.is_file()]
    left_out = [file for file in inside if file.suffix == ".json" and not _asks(file)]
    if len(left_out) == len(inside):
        why = f", and {left_out[0]} holds no prompt" if left_out else ""
        raise ValueError(f"{path} is a folder without files that end with {', '.join((*TABLES, *TEXTS))}{why}")
    if skipped is not None:
        skipped += left_out
    for file in inside:
        if file not in left_out:
            yield from _of_file(file)


def _asks(path: Path) -> bool:
    """Whether the first line of a JSON file holds something to ask. Raises ValueError for a file that is no JSON."""
    words = _text(path)
    content = _json(path, words)
    if content is None:
        line = next(_of_file(path), None)
        # An object alone is more often a configuration.
        is_line = line is not None and ("\n" in words.strip() or any(name in line.fields for name in ANSWERS))
        return line is not None and is_line and any(name in line.fields for name in ASKS)
    listed = content.get("data") if isinstance(content, dict) else content
    first = listed[0] if isinstance(listed, list) and listed else None
    return isinstance(first, dict) and any(name in first for name in ASKS)


def _text(path: Path) -> str:
    return read_text(path).removeprefix(BOM)


def _of_file(path: Path) -> Iterator[Line]:
    if path.suffix in TABLES:
        from sparseattn.evaluation.layouts.tables import rows

        for number, row in enumerate(rows(path), 1):
            yield Line(path, number, row)
        return
    words = _text(path)
    if path.suffix == ".json" and (content := _json(path, words)) is not None:
        yield from _of_json(path, content)
        return
    texts = words.split("\n")
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                fields = json_object(text)
            except ValueError as error:
                ends = number == len(texts) and _ends_within(text, error)
                cut = "; the file ends within this line, as one that is cut off does" if ends else ""
                raise ValueError(f"{path}, line {number}: {error}{cut}") from None
            yield Line(path, number, fields)


def _ends_within(text: str, error: ValueError) -> bool:
    """Whether a line that is no JSON would have gone on behind its end."""
    why = error.__context__
    if not isinstance(why, json.JSONDecodeError):
        return False
    return why.msg.startswith("Unterminated string") or why.pos >= len(text.rstrip())


def _json(path: Path, words: str) -> list[Any] | dict[str, Any] | None:
    """Return what a .json file holds as a whole; None where it is JSON Lines, one line perhaps.

    Raises:
        ValueError: naming the file: it is neither.
    """
    first = words.lstrip().partition("\n")[0].strip()
    by_line = first.startswith("{") and first.endswith("}")
    try:
        content = parse(words, digits=DIGITS, finite=False, once=False)
    except ValueError as error:
        if by_line or not words.strip():
            return None
        raise ValueError(f"{path}: {error}") from None
    if isinstance(content, list) or (isinstance(content, dict) and isinstance(content.get("data"), list)):
        return content
    if by_line:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a line is a JSON object, got {type(content).__name__}")
    return content


def _of_json(path: Path, content: list[Any] | Mapping[str, Any]) -> Iterator[Line]:
    listed = content.get("data") if isinstance(content, Mapping) else content
    if not isinstance(listed, list):
        raise ValueError(f"{path} is JSON: a list of objects, or an object with such a list under data")
    for number, fields in enumerate(listed, 1):
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number}: a line is a JSON object, got {type(fields).__name__}")
        yield Line(path, number, fields)
