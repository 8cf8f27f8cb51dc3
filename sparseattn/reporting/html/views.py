"""What a section of the page is made of: sentences, and views.

The page's template writes tables and facts; scripts draw the others, each kind by one of its own (`assets/KIND.js`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from sparseattn.evaluation.measure_table import COUNT, SIGNIFICANT, measure
from sparseattn.reporting.html.percentages import MISSING, percent, typeset
from sparseattn.reporting.table import Column, Table

DIGITS = 5  # significant ones of a number in the page
FULL = "full"  # attention itself, to which methods are compared: grey, and never switched off


@dataclass(frozen=True)
class Axis:
    """A measure as plots and maps show it; `axis` makes one of the table of measures.

    Args:
        key: under which points and cells hold it.
        label: what it is, for an axis or in a list to choose from.
        form: "share" (shown in percent), "count" (whole) or "number".
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


def axis(key: str, **changes: Any) -> Axis:
    """Return a measure as plots and maps show it, by its name in records; `changes` are fields of `Axis`."""
    known = measure(key)
    form = "share" if known.unit == "share" else "count" if known.unit == "rows" else "number"
    changes = {"label": known.label, **changes}
    changes["label"] = typeset(changes["label"])
    return replace(Axis(key, "", form, better=known.better, top=known.top), **changes)


def cost(key: str, **changes: Any) -> Axis:
    """Return what methods read or take as a logarithmic axis; that less is better goes without saying."""
    return axis(key, log=True, better="", top=None, **changes)


def column(key: str, head: str | None = None) -> Column:
    """Return a measure as a column of the page's tables, where all but counts have three digits."""
    known = measure(key)
    if known.unit == "share":
        return Column(head or known.short, percent, missing=MISSING)
    if known.format != COUNT:
        known = replace(known, format=SIGNIFICANT)
    return Column.of(known, head, missing=MISSING)


def text(head: str) -> Column:
    """Return a column of text of the page's tables."""
    return Column.text(head, missing=MISSING)


@dataclass(frozen=True)
class Lines:
    """Quality against cost: one line per method, one point per budget, one plot per value of `facet`.

    Args:
        title: in a few words.
        note: what a reader must know to read it right.
        facet: what tells plots apart ("trace").
        x, y: what may be chosen for the axes; the first is shown.
        points: `method`, `facet`, `at` (the budget, or what else tells points of a line apart) and `values` by key.
        marked: plans, as dots among the lines: `name`, `facet`, `values` by key, and `beside`, by the key of the y axis
            the `method` that needs least of the first x axis for as much there, and how much `value` is.
    """

    kind: ClassVar[str] = "lines"
    title: str
    facet: str
    x: Sequence[Axis]
    y: Sequence[Axis]
    points: Sequence[Mapping[str, Any]]
    note: str = ""
    marked: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Heat:
    """Maps of coloured cells on one scale, one panel per method, or one panel.

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
    measures: Sequence[Axis]
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
class Subject:
    """What a section's records are about, for the page's heading.

    Args:
        models: as records name them.
        tokens: lengths of the contexts.
        of: traces, texts or tasks.
    """

    models: Sequence[str] = ()
    tokens: Sequence[int] = ()
    of: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: of its anchor, a word.
        title: what it answers.
        findings: in sentences, the most important one first; the page opens with the first of every section.
        views: in the order in which they stand.
        methods: that its views name, in the order of the records.
        subject: what it is about.
    """

    name: str
    title: str
    findings: Sequence[str]
    views: Sequence[View]
    methods: Sequence[str] = field(default_factory=tuple)
    subject: Subject = Subject()

    def figures(self) -> dict[str, View]:
        """Return the views by the names of their figures in the page."""
        return {f"{self.name}-view-{number}": view for number, view in enumerate(self.views, 1)}

    def data(self) -> dict[str, Any]:
        """Return what scripts draw, by the names of its figures."""
        return {
            name: short({"kind": view.kind, **dataclasses.asdict(view)})
            for name, view in self.figures().items()
            if not isinstance(view, Table | Facts)
        }


def short(value: Any) -> Any:
    """Return a JSON value with numbers of `DIGITS` digits; what is no number in JSON is None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): short(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(inner) for inner in value]
    return value
