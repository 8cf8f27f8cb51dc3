"""Files of lines as benchmarks publish them: JSON Lines, JSON, parquet, and folders of these or of `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparseattn.evaluation.layouts.base import Line
from sparseattn.evaluation.tasks.jsonlines import DIGITS, json_object
from sparseattn.utils.files import read_text
from sparseattn.utils.json_text import parse

TABLES = (".parquet", ".arrow")
TEXTS = (".jsonl", ".json")


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, or of every file of a folder in the order of their names.

    Raises:
        OSError: no such file.
        ImportError: a table, and pyarrow is missing.
        ValueError: naming file and line: no object, a table that cannot be read, a folder without such files.
    """
    if not path.is_dir():
        yield from _of_file(path)
        return
    inside = [file for file in sorted(path.rglob("*")) if file.suffix in (*TABLES, ".jsonl") and file.is_file()]
    if not inside:
        raise ValueError(f"{path} is a folder without files that end with {', '.join((*TABLES, '.jsonl'))}")
    for file in inside:
        yield from _of_file(file)


def _of_file(path: Path) -> Iterator[Line]:
    if path.suffix in TABLES:
        from sparseattn.evaluation.layouts.tables import rows

        for number, row in enumerate(rows(path), 1):
            yield Line(path, number, row)
        return
    words = read_text(path)
    if (path.suffix == ".json" and words.lstrip()[:1] == "[") or _is_one_object(path, words):
        yield from _of_json(path, words)
        return
    texts = words.split("\n")
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                fields = json_object(text)
            except ValueError as error:
                cut = "; the file ends within this line, as one that is cut off does" if number == len(texts) else ""
                raise ValueError(f"{path}, line {number}: {error}{cut}") from None
            yield Line(path, number, fields)


def _is_one_object(path: Path, words: str) -> bool:
    """Whether a .json file is one object over several lines, such as `{"data": [...]}`."""
    first = words.lstrip().partition("\n")[0].strip()
    return path.suffix == ".json" and first.startswith("{") and not first.endswith("}")


def _of_json(path: Path, words: str) -> Iterator[Line]:
    try:
        content: Any = parse(words, digits=DIGITS, finite=False, once=False)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise ValueError(f"{path} is JSON: a list of objects, or an object with such a list under data")
    for number, fields in enumerate(content, 1):
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number}: a line is a JSON object, got {type(fields).__name__}")
        yield Line(path, number, fields)
