"""Documents whose numbers come from records: draws their tables and numbers anew, and says what is not as records give.

A table stands between `<!-- from RECORD: TABLE -->` (several records with commas) and `<!-- end -->`; `tables.toml`
defines it, and `column=value` or `column=value|value` behind its name leaves rows out. A number in a sentence is
followed by where it comes from, `43 %<!-- = RECORD: recovered[quest 256] | .0% -->`: an expression of
`expressions.py`, in which `column[...]` is of the rows of a method, a budget or of `column=value`, and a format of
`markdown.shown`. What a sentence claims stands beside it, `<!-- holds RECORD: kl[exact 64] < kl[quest 64] -->`. A
record may be followed by the frame of its rows, `RECORD.errors: ...`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.evidence import frames, tables
from scripts.evidence.expressions import Row, Scope, column, evaluate
from scripts.evidence.frames import Load
from scripts.evidence.markdown import shown
from scripts.evidence.step import REPOSITORY
from sparseattn.utils.files import write_atomic

BLOCK = re.compile(
    r"^<!-- from (?P<records>[\w., -]+): (?P<table>[\w-]+)(?P<where>(?: [\w.]+=\S+)*) -->\n(?P<body>.*?)^<!-- end -->$",
    re.S | re.M,
)
MARK = re.compile(r"^<!-- (?:from\b.*|end) -->$", re.M)
NUMBER = re.compile(
    r"(?P<value>[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?: %)?)<!-- = (?P<source>[\w.-]+): (?P<expression>.*?)"
    r"(?: \| (?P<form>\S+))? -->",
    re.S,
)
CLAIM = re.compile(r"<!-- holds (?P<source>[\w.-]+): (?P<expression>.*?) -->", re.S)
COMMENT = re.compile(r"<!-- (?:=|holds)\s")
BEGINS = re.compile(r"^[ >*-]*<!-- =", re.M)  # there a comment would begin a block of HTML
TERM = re.compile(
    r"(?:(?P<source>[\w.-]+)/)?(?P<name>[A-Za-z_][\w.@]*)\[(?P<rows>(?:[^\[\]]|\[(?:[^\[\]]|\[[^\]]*\])*\])*)\]"
)
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
DATED = ("CHANGELOG.md", "docs/lab/log")  # history is not drawn anew
UNITS = "%|ms|s|seconds|minutes|hours|h|times|KiB|MiB|GiB|kB|MB|GB|GB/s|rows/s|tokens/s"
# What `stray` looks for outside code: a number with a unit in which one measures, and a cell of numbers with a point.
MEASURED = re.compile(rf"(?<![\w.,`-])\d[\d,.]*(?: (?:{UNITS})|%)(?![\w/`])")
CELL = re.compile(r"\|[ <>~]*-?\d[\d,]*\.\d+(?:, \d[\d.]*)* *\|")


def documents(root: Path = REPOSITORY) -> list[Path]:
    """README.md and the pages of docs/, without the dated ones."""
    every = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in every if not path.relative_to(root).as_posix().startswith(DATED)]


def drawn(text: str, defined: Mapping[str, tables.Definition], load: Load) -> tuple[str, list[str]]:
    """A document with its tables and numbers drawn anew, and what is wrong with it.

    A table whose record is not there is empty, since a number without its record is nobody's; it is among what is
    wrong, as is a block whose table is not defined, which stays as it is.
    """
    wrong: list[str] = []

    def draw(found: re.Match[str]) -> str:
        title = found[0].partition(" -->")[0].removeprefix("<!-- from ")
        if found["table"] not in defined:
            wrong.append(f"block {title}: there is no table {found['table']!r}; there are {', '.join(sorted(defined))}")
            return found[0]
        try:
            body = table(defined[found["table"]], found["records"], found["where"], load) + "\n"
        except (LookupError, TypeError, ValueError) as error:
            wrong.append(f"block {title}: {error.args[0]}")
            body = ""
        return f"<!-- from {title} -->\n{body}<!-- end -->"

    def number(found: re.Match[str]) -> str:
        value = attempt(found)
        return found[0] if value is None else shown(value, found["form"] or ",") + found[0][len(found["value"]) :]

    def attempt(found: re.Match[str]) -> object:
        try:
            value = reference(found["source"], found["expression"], load)
            if value is None:
                raise LookupError("the record has no such value")
        except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
            wrong.append(f"{found['source']}: {' '.join(found['expression'].split())}: {error.args[0]}")
            return None
        return value

    marks, blocks = len(MARK.findall(text)), len(BLOCK.findall(text))
    if marks != 2 * blocks:
        wrong.append(f"{marks} lines begin or end a block, for {blocks} blocks: one is not closed")
    wrong += [f"a line begins with the comment of a number: {found[0]}" for found in BEGINS.finditer(text)]
    if len(COMMENT.findall(text)) != len(NUMBER.findall(text)) + len(CLAIM.findall(text)):
        wrong.append("a comment that begins with = or holds has no number before it, or no record")
    for claim in CLAIM.finditer(text):
        if attempt(claim) not in (True, None):
            wrong.append(f"this does not hold of {claim['source']}: {' '.join(claim['expression'].split())}")
    return NUMBER.sub(number, BLOCK.sub(draw, text)), wrong


def table(definition: tables.Definition, records: str, where: str, load: Load) -> str:
    """The Markdown of a table of records.

    Args:
        definition: of the table.
        records: their names, with commas.
        where: `column=value|value`, with spaces.
        load: reads a record.
    """
    named = [name.strip() for name in records.split(",")]
    wanted = {name: values.split("|") for name, _, values in (one.partition("=") for one in where.split())}
    every = (frames.read(load, name, frame) for name in named for frame in definition.get("rows", [""]))
    return tables.drawn(definition, [row for found in every for row in found], wanted)


def reference(source: str, expression: str, load: Load) -> object:
    """The value of an expression about a record, or a record and its frame.

    Raises:
        LookupError: a record, a column or such rows are not there.
        ValueError: rows of several budgets are meant.
    """

    def rows(name: str) -> Sequence[Row]:
        record, _, frame = name.partition(".")
        return frames.read(load, record, frame)

    values: dict[str, list[object]] = {}

    def term(found: re.Match[str]) -> str:
        mine = selected(rows(found["source"] or source), shlex.split(found["rows"]))
        name = f"_{len(values)}"
        values[name] = column(mine, found["name"])
        return name

    return evaluate(TERM.sub(term, " ".join(expression.split())), Scope(rows(source), alike=True), values)


def selected(rows: Sequence[Row], words: Sequence[str]) -> Sequence[Row]:
    """The rows of a method, of a budget, and of `column=value|value`, as many as are said."""
    for word in words:
        if pair := re.fullmatch(r"([\w.]+)=(.+)", word):
            rows = [row for row in rows if str(row.get(pair[1])) in pair[2].split("|")]
        else:
            rows = [row for row in rows if word in (row["typed"], str(row.get("budget")))]
        if not rows:
            raise LookupError(f"no row is of {word!r}")
    budgets = {row["budget"] for row in rows if "budget" in row and row.get("at") == row["budget"]}
    if len(budgets) > 1 and not any(word.startswith("budget=") for word in words):
        raise ValueError(f"these rows are of several budgets, {budgets}: name one")
    return rows


def redraw(defined: Mapping[str, tables.Definition], load: Load, write: bool, root: Path = REPOSITORY) -> list[str]:
    """Draws every document anew, or only looks; what is wrong, or differs where nothing is to be written."""
    wrong: list[str] = []
    for path in documents(root):
        text, name = path.read_text(), path.relative_to(root).as_posix()
        new, mine = drawn(text, defined, load)
        wrong += [f"{name}: {one}" for one in mine]
        if new != text and write:
            write_atomic(path, new.encode())
        elif new != text:
            wrong += [f"{name}: {one}" for one in differing(text, new)]
    return wrong


def differing(text: str, new: str) -> list[str]:
    """The blocks and numbers of `text` that records give otherwise."""
    blocks = [
        f"block {old['records']}: {old['table']} is not what the record gives; draw it by --documents"
        for old, now in zip(BLOCK.finditer(text), BLOCK.finditer(new), strict=True)
        if old[0] != now[0]
    ]
    numbers = [
        f"{old['value']} is {now['value']} by {old['source']}: {old['expression']}; draw it by --documents"
        for old, now in zip(NUMBER.finditer(text), NUMBER.finditer(new), strict=True)
        if old["value"] != now["value"]
    ]
    return blocks + numbers


def stray(text: str) -> list[str]:
    """Lines with numbers that look measured and stand outside of blocks and code, with no record behind them."""
    bare = FENCE.sub("", CLAIM.sub("", NUMBER.sub("", BLOCK.sub("", text))))
    bare = re.sub(r"`[^`\n]*`", "`", bare)
    return [line.strip() for line in bare.splitlines() if MEASURED.search(line) or CELL.search(line)]
