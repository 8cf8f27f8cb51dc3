"""The contract of a layout: what it needs to know of a file, and what it makes of each line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sparseattn.evaluation.tasks.base import Example

TEMPLATE = "{context}\n\n{question}"
TAIL = 100  # characters of a prompt without a question that count as one, as in Quest's LongBench code


@dataclass(frozen=True)
class Line:
    """One record of a file.

    Args:
        path: the file that it stands in; of a folder, the one inside.
        number: its place there, from 1 on: of JSON Lines the line, else the row.
        fields: what it holds.
    """

    path: Path
    number: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """What a user says of a file of prompts.

    Args:
        path: the file or folder.
        task: the benchmark's task, where neither lines nor file names say it.
        templates: the benchmark's own file of prompts, or a clone of its repository; None: beside the data.
        demos: the file that examples before the question are drawn from.
        chat: whether prompts are put as turns of a chat.
        scoring, template, tail: of the layout `plain`, see `plain.LAYOUT`.
    """

    path: Path
    task: str | None = None
    templates: Path | None = None
    demos: Path | None = None
    chat: bool = False
    scoring: str = "all"
    template: str = TEMPLATE
    tail: int = TAIL


# None: the benchmark leaves the line out. Raises ValueError in a sentence without the place, which `read_prompts` adds.
Reader: TypeAlias = Callable[[Line], "Example | None"]


@dataclass(frozen=True)
class Layout:
    """A benchmark's form of a line.

    Args:
        name: as `--layout` takes it.
        about: the benchmark, with its address.
        reads: the fields that become prompt, reference, limit or metric.
        idle: the fields that such lines have as well and that change none of these.
        fits: whether a line is of this form, by its fields and the name of its file.
        open: makes the reader of a file's lines. Raises ValueError for a `Setup` that it cannot use.
    """

    name: str
    about: str
    reads: frozenset[str]
    idle: frozenset[str]
    fits: Callable[[Line], bool]
    open: Callable[[Setup], Reader]
