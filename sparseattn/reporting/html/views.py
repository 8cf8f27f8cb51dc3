"""What a section of the page is made of: sentences, and views that the page's scripts draw, each by one of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

Number: TypeAlias = "float | int | None"  # None where there is none: a script leaves the place empty
DIGITS = 5  # significant ones of a number in the page


@dataclass(frozen=True)
class Measure:
    """One thing that was measured.

    Args:
        key: under which points and cells hold it.
        label: what it is, for an axis or a column.
        form: "share" (shown in percent), "count" (whole), "number", or "text" in tables.
        log: whether an axis of it is logarithmic.
        better: "high", "low", or nothing where neither is.
        rule: where a thin line stands across the plot; None: nowhere.
        top: the largest value there can be, where colours end; None: the largest there is.
    """

    key: str
    label: str
    form: str = "number"
    log: bool = False
    better: str = ""
    rule: float | None = None
    top: float | None = None


@dataclass(frozen=True)
class Lines:
    """Quality against cost: a line a method, a point a budget, a panel for each value of `facet`.

    Args:
        title: in a few words. note: what a reader must know to read it right.
        facet: what tells panels apart ("trace").
        x, y: what may be chosen for the axes; the first is shown.
        points: `method`, `facet`, `at` (the budget, or what else tells points of a line apart) and `values` by key.
    """

    kind: ClassVar[str] = "lines"
    title: str
    facet: str
    x: Sequence[Measure]
    y: Sequence[Measure]
    points: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """Maps of coloured cells on one scale, a panel a method, or one panel.

    Args:
        x, y: what columns and rows are ("head", "layer").
        choices: what is chosen from lists; every panel has a value for each ("trace", "budget").
        measures: what cells may show; the first is shown.
        panels: `method` or None, `choice` by name, `columns`, `rows`, and `values` by key, `[rows][columns]`.
        methods: whether the rows of a panel are methods.
    """

    kind: ClassVar[str] = "heat"
    title: str
    x: str
    y: str
    choices: Sequence[str]
    measures: Sequence[Measure]
    panels: Sequence[Mapping[str, Any]]
    methods: bool = False
    note: str = ""


@dataclass(frozen=True)
class Given:
    """What plans give each layer and KV head, in the colours of methods.

    Args:
        plans: `name`, and `layers`, each with its number `layer`, whether its heads `agree`, and `heads`: `method` and
            `budget`, a text, of each.
    """

    kind: ClassVar[str] = "given"
    title: str
    plans: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows that can be sorted and filtered; `method` is the column by which switched-off methods leave, or None."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Measure]
    rows: Sequence[Sequence[Any]]
    method: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for, in groups: group -> name -> text."""

    kind: ClassVar[str] = "facts"
    title: str
    groups: Mapping[str, Mapping[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Explorer:
    """The attention of single tokens over their text; `data` is what `explorer.py` packs."""

    kind: ClassVar[str] = "explorer"
    title: str
    data: Mapping[str, Any]
    note: str = ""


View: TypeAlias = "Lines | Heat | Given | Table | Facts | Explorer"


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: of its anchor, a word.
        title: what it answers.
        said: findings in sentences, the most important one first; the page opens with the first of every section.
        views: in the order in which they stand.
        methods: that its views name, in the order of the records.
    """

    name: str
    title: str
    said: Sequence[str]
    views: Sequence[View]
    methods: Sequence[str] = field(default_factory=tuple)

    def record(self) -> dict[str, Any]:
        """As the page holds it."""
        views = [{"kind": view.kind, **dataclasses.asdict(view)} for view in self.views]
        return short({"name": self.name, "title": self.title, "said": list(self.said), "views": views})


def short(value: Any) -> Any:
    """A JSON value with numbers of `DIGITS` digits; what is no number in JSON is None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): short(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(one) for one in value]
    return value
