"""The section of `by-layer.jsonl`: methods at equal rows and at equal bytes, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.core.budget import budget_label
from sparseattn.reporting.html.folders import Record
from sparseattn.reporting.html.percentages import typeset
from sparseattn.reporting.html.shared_fields import BUDGET, COUNT, HEADS, NAME, NUMBER, ORIGIN, distinct, models_of
from sparseattn.reporting.html.views import Heat, Section, Subject, View, axis, column, text
from sparseattn.reporting.table import Table
from sparseattn.utils.json_fields import FieldError, Flag, Items, Maybe, Number, Object, Text

FILE = "by-layer.jsonl"

MEASURES = (axis("relative_error"), axis("recovered"))


def _layers_fit(record: Mapping[str, Any], name: str) -> None:
    """Raise FieldError unless a method has a number a layer."""
    count = len(record["layers"])
    for i, method in enumerate(record["methods"]):
        for measure in MEASURES:
            if len(method[measure.key]) != count:
                raise FieldError(f"methods[{i}].{measure.key} is a list of {count} items, as layers is")


METHOD = Object(
    {
        "label": NAME,
        "budgets": Items(BUDGET),
        "scans_all": Flag(),
        "missed": COUNT,
        "wins": Maybe(COUNT),
        "mean": Object({"relative_error": Number(0)}, dict.fromkeys(("attended", "bytes_share", "recovered"), NUMBER)),
        **{measure.key: HEADS for measure in MEASURES},
    }
)
FIELDS = Object(
    {
        "trace": NAME,
        "equal": Text(among=("rows", "bytes")),
        "at": BUDGET,
        "layers": Items(COUNT, 1),
        "methods": Items(METHOD, 1),
    },
    ORIGIN,
    _layers_fit,
)


def check(record: Record, before: Sequence[Record]) -> None:
    """Raise FieldError where a line is no comparison of `bench`; `before` are those above it."""
    FIELDS.check(record)


def section(records: Sequence[Record]) -> Section:
    """Return a map of methods by layers for each comparison, and a table of them."""
    methods = dict.fromkeys(method["label"] for record in records for method in record["methods"])
    views: list[View] = [_map(records), _table(records)]
    about = Subject(models_of(records), (), distinct(records, "trace"))
    return Section("layers", "Quality by layer", [_best(record) for record in records], views, tuple(methods), about)


def _condition(record: Record) -> str:
    if record["equal"] == "bytes":
        return typeset(f"equal bytes ({budget_label(record['at'])} of the cache)")
    return f"equal tokens (those of budget {budget_label(record['at'])})"


def _best(record: Record) -> str:
    """Say which method has the smallest error there, and how it varies over layers."""
    rivals = [method for method in record["methods"] if not method["scans_all"]] or record["methods"]
    best = min(rivals, key=lambda method: method["mean"]["relative_error"])
    by_layer = zip(best["relative_error"], record["layers"], strict=True)
    errors = [(error, layer) for error, layer in by_layer if error is not None]
    who = "" if best["scans_all"] else " among the methods that do not score every key"
    sentence = f"{record['trace']}, at {_condition(record)}: {best['label']} has the smallest error{who}: "
    sentence += f"{best['mean']['relative_error']:.1%} on average"
    if len(errors) > 1:
        (least, low), (most, high) = min(errors), max(errors)
        sentence += f", between {least:.1%} (layer {low}) and {most:.1%} (layer {high})"
    return f"{sentence}."


def _map(records: Sequence[Record]) -> Heat:
    panels: list[dict[str, Any]] = [
        {
            "method": None,
            "choice": {"trace": record["trace"], "compared at": _condition(record)},
            "columns": record["layers"],
            "rows": [method["label"] for method in record["methods"]],
            "values": {measure.key: [method[measure.key] for method in record["methods"]] for measure in MEASURES},
        }
        for record in records
    ]
    note = "The mean over the heads of each layer. Bytes include those read to choose rows."
    return Heat("Methods by layer", "layer", "method", ("trace", "compared at"), MEASURES, panels, True, note)


def _table(records: Sequence[Record]) -> Table:
    means = ("attended", "bytes_share", "relative_error", "recovered")
    columns = [
        *map(text, ("trace", "compared at", "method", "budget")),
        *map(column, (*means, "missed", "wins")),
    ]
    rows = [
        [
            *(record["trace"], _condition(record), method["label"], " and ".join(map(budget_label, method["budgets"]))),
            *(method["mean"].get(key) for key in means),
            *(method["missed"], method["wins"]),
        ]
        for record in records
        for method in record["methods"]
    ]
    note = (
        "A method with two budgets alternates between them, token by token. A head is missed if less than half of its "
        "far attention is recovered. It is won if no other method recovers more; methods that score every key do not "
        "compete."
    )
    return Table("Every comparison", columns, rows, note, row_head=2)
