"""Documents whose numbers come from records: finds the blocks, draws them anew, and says what is not as records give.

A block begins with a line `<!-- from RECORD: VIEW -->` (several records with commas) and ends with `<!-- end -->`.
What lies between is what the view of that name makes of the records.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from scripts.evidence.step import REPORTED, REPOSITORY, RESULTS
from sparseattn.utils.files import write_atomic

View: TypeAlias = "Callable[..., str]"

BLOCK = re.compile(r"^<!-- from (?P<records>[\w., -]+): (?P<view>[\w-]+) -->\n(?P<body>.*?)^<!-- end -->$", re.S | re.M)
MARK = re.compile(r"^<!-- (?:from\b.*|end) -->$", re.M)
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
DATED = ("CHANGELOG.md", "docs/log")  # history is not drawn anew
UNITS = "%|ms|s|seconds|minutes|hours|h|times|KiB|MiB|GiB|kB|MB|GB|GB/s|rows/s|tokens/s"
# What `stray` looks for outside code: a number with a unit in which one measures, and a cell of numbers with a point.
MEASURED = re.compile(rf"(?<![\w.,`-])\d[\d,.]*(?: (?:{UNITS})|%)(?![\w/`])")


def documents(root: Path = REPOSITORY) -> list[Path]:
    """README.md and the pages of docs/, without the dated ones."""
    every = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in every if not any(path.relative_to(root).as_posix().startswith(one) for one in DATED)]


def loader(results: Path = RESULTS, reported: Path = REPORTED) -> Callable[[str], Mapping[str, Any]]:
    """Reads a record by its name: of a step, or one that somebody else reported.

    Raises of it:
        LookupError: there is no such record yet.
    """

    @functools.cache
    def load(name: str) -> Mapping[str, Any]:
        path = results / f"{name}.json"
        if (theirs := reported / path.name).exists():
            path = theirs
        if not path.exists():
            raise LookupError(f"there is no record {path.name} in {results}: python -m scripts.evidence --only {name}")
        record: Mapping[str, Any] = json.loads(path.read_text())
        return record

    return load


def drawn(text: str, views: Mapping[str, View], load: Callable[[str], Mapping[str, Any]]) -> tuple[str, list[str]]:
    """A document with its blocks drawn anew, and what is wrong with it.

    A block whose record is not there is empty, since a number without its record is nobody's; it is among what is
    wrong, as is a block whose view is not there, which stays as it is.
    """
    wrong: list[str] = []

    def draw(found: re.Match[str]) -> str:
        title = f"{found['records']}: {found['view']}"
        if found["view"] not in views:
            wrong.append(f"block {title}: there is no view {found['view']!r}; there are {', '.join(sorted(views))}")
            return found[0]
        try:
            body = views[found["view"]](*(load(name.strip()) for name in found["records"].split(","))) + "\n"
        except (LookupError, TypeError, ValueError) as error:
            wrong.append(f"block {title}: {error.args[0]}")
            body = ""
        return f"<!-- from {title} -->\n{body}<!-- end -->"

    marks, blocks = len(MARK.findall(text)), len(BLOCK.findall(text))
    if marks != 2 * blocks:
        wrong.append(f"{marks} lines begin or end a block, for {blocks} blocks: one is not closed")
    return BLOCK.sub(draw, text), wrong


def redraw(
    views: Mapping[str, View], load: Callable[[str], Mapping[str, Any]], write: bool, root: Path = REPOSITORY
) -> list[str]:
    """Draws every document anew, or only looks; what is wrong, or differs where nothing is to be written."""
    wrong: list[str] = []
    for path in documents(root):
        text, name = path.read_text(), path.relative_to(root).as_posix()
        new, mine = drawn(text, views, load)
        wrong += [f"{name}: {one}" for one in mine]
        if new != text and write:
            write_atomic(path, new.encode())
        elif new != text:
            wrong += [f"{name}: {one}" for one in differing(text, new)]
    return wrong


def differing(text: str, new: str) -> list[str]:
    """The blocks of `text` that records give otherwise."""
    return [
        f"block {old['records']}: {old['view']} is not what the record gives; draw it by --documents"
        for old, now in zip(BLOCK.finditer(text), BLOCK.finditer(new), strict=True)
        if old[0] != now[0]
    ]


CELL = re.compile(r"\|[ <>~]*-?\d[\d,]*\.\d+(?:, \d[\d.]*)* *\|")


def stray(text: str) -> list[str]:
    """Lines with numbers that look measured and stand outside of blocks and code."""
    bare = FENCE.sub("", BLOCK.sub("", text))
    bare = re.sub(r"`[^`\n]*`", "`", bare)
    return [line.strip() for line in bare.splitlines() if MEASURED.search(line) or CELL.search(line)]
