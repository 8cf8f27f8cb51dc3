"""All layouts by name, and files read by one of them: the only place that knows which there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparseattn.evaluation.layouts import (
    babilong,
    helmet,
    infinitebench,
    kvpress,
    longbench,
    longbench2,
    mrcr,
    plain,
    ruler,
)
from sparseattn.evaluation.layouts.base import Layout, Line, Setup
from sparseattn.evaluation.layouts.files import lines
from sparseattn.evaluation.metrics.registry import check_metrics
from sparseattn.evaluation.tasks.base import Example
from sparseattn.utils.suggest import did_you_mean

# In the order in which they are tried where none is named: those whose fields say most come first.
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        kvpress.LAYOUT,
        longbench.LAYOUT,
        longbench2.LAYOUT,
        mrcr.LAYOUT,
        helmet.LAYOUT,
        infinitebench.LAYOUT,
        babilong.LAYOUT,
        ruler.LAYOUT,
        plain.LAYOUT,
    )
}
# A field that some layout reads -> the layouts that do: a line of another layout that has it is refused.
MATTERS = {
    name: [layout.name for layout in LAYOUTS.values() if name in layout.reads]
    for name in itertools.chain.from_iterable(layout.reads for layout in LAYOUTS.values())
}


@dataclass(frozen=True)
class PromptFile:
    """The examples of a file.

    Args:
        path: as it was given.
        layout: its name.
        guessed: whether the layout was told from the fields.
        examples: one a line.
        left_out: lines that the benchmark leaves out.
        skipped: JSON files of a folder that hold no prompt.
    """

    path: Path
    layout: str
    guessed: bool
    examples: Sequence[Example]
    left_out: int = 0
    skipped: Sequence[Path] = ()


def layout_named(name: str) -> tuple[Layout, str | None]:
    """Return the layout and the task of "longbench" or "longbench:qasper". Raises ValueError for no such layout."""
    known, _, task = name.partition(":")
    if known not in LAYOUTS:
        raise ValueError(
            f"there is no layout {known!r}{did_you_mean(known, LAYOUTS)}, there are {', '.join(sorted(LAYOUTS))}"
        )
    return LAYOUTS[known], task or None


def read_prompts(path: Path, setup: Setup | None = None, layout: str | None = None) -> PromptFile:
    """Return the examples of a file or folder.

    Args:
        path: the file or folder, see `files.lines`.
        setup: what the user says of it; None: nothing.
        layout: its name, with `:TASK` behind it or without; None: told from the fields of the lines.

    Raises:
        OSError: no such file.
        ImportError: a package that the file or a metric needs is missing.
        ValueError: naming file and line: no usable line, a field that its layout does not handle, lines of two
            layouts; no prompt at all.
    """
    setup = replace(setup or Setup(path), path=path)
    known, task = (None, None) if layout is None else layout_named(layout)
    skipped: list[Path] = []
    every = list(lines(path, skipped))
    if not every:
        raise ValueError(f"{path} holds no prompt")
    used = known or _guessed(every)
    try:
        reader = used.open(replace(setup, task=task))
    except ValueError as error:
        raise ValueError(f"{path} is of the layout {used.name}: {error}") from None
    examples = []
    for line in every:
        try:
            _check_fields(line, used)
            made = reader(line)
        except ValueError as error:
            raise ValueError(f"{line.path}, line {line.number}: {error}") from None
        if made is not None:
            place = {"file": line.path.name, "line": line.number, "layout": used.name}
            place |= {} if made.limit is None else {"limit": made.limit}
            examples.append(replace(made, meta={**place, **made.meta}))
    if not examples:
        raise ValueError(f"{path} holds no prompt of the layout {used.name}: it leaves all {len(every)} lines out")
    check_metrics({example.scoring for example in examples})
    return PromptFile(path, used.name, known is None, examples, len(every) - len(examples), skipped)


def layout_of(line: Line) -> Layout:
    """Return the layout that a line's fields tell."""
    return next(layout for layout in LAYOUTS.values() if layout.fits(line))


def _guessed(every: Sequence[Line]) -> Layout:
    first = layout_of(every[0])
    for line in every:
        if (other := layout_of(line)) is not first:
            raise ValueError(
                f"{line.path}, line {line.number}: its fields are those of the layout {other.name}, and those of line "
                f"{every[0].number} of {first.name}: a file has lines of one layout, say which with --layout"
            )
    return first


def _check_fields(line: Line, layout: Layout) -> None:
    """ValueError for a field that another layout reads and this one would drop."""
    for name, value in line.fields.items():
        if name in layout.reads or name in layout.idle or name not in MATTERS or _nothing(value):
            continue
        raise ValueError(
            f"the layout {layout.name} does not handle the field {name}, which changes prompt or score in "
            f"{', '.join(MATTERS[name])}: name the layout with --layout, or remove the field"
        )


def _nothing(value: Any) -> bool:
    return value is None or value == "" or value == [] or value == {}
