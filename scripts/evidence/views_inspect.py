"""Views of `inspect`: why methods find or miss rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import bullets, parts, table, text
from sparseattn.evaluation.attention_stats import Inspection
from sparseattn.reporting import inspect_tables

Record: TypeAlias = "Mapping[str, Any]"

# Column -> measure of the record, and how it is shown.
COLUMNS = {
    "query to key distance": ("distance_ratio", "{:.1f}"),
    "far": ("far_mass", "{:.0%}"),
    "best 64 rows": ("top_share@64", "{:.0%}"),
    "best 256": ("top_share@256", "{:.0%}"),
    "best 1,024": ("top_share@1024", "{:.0%}"),
    "same as the token before": ("overlap@1", "{:.0%}"),
    "best 16 pages": ("best_share@16", "{:.0%}"),
    "bound's 16 pages": ("bound_share@16", "{:.0%}"),
    "bound's 32 pages of 8": ("bound_share@8", "{:.0%}"),
}


def by_layer(*records: Record) -> str:
    """A table a trace: a row a layer, and the mean of all."""
    return parts(*(part for record in records for part in _trace(record)))


def _trace(record: Record) -> list[str]:
    layers = rows(record)
    one = layers[0]
    words = text(
        f"`{one['trace']}`, the last {one['last']} of {one['tokens']:,} tokens, mean over the heads of a layer, sink "
        f"{one['sink']}, window {one['window']}:"
    )
    lines = [[str(one["layer"]), *_cells([one])] for one in layers]
    lines.append(["all", *_cells(layers)])
    return [words, table(["layer", *COLUMNS], lines)]


def _cells(layers: list[dict[str, Any]]) -> list[str]:
    cells = []
    for measure, shown in COLUMNS.values():
        known = [one[f"mean.{measure}"] for one in layers if one[f"mean.{measure}"] is not None]
        cells.append(shown.format(sum(known) / len(known)).replace("%", " %") if known else "")
    return cells


def short(*records: Record) -> str:
    """The mean over all layers, a row a trace."""
    lines = []
    for record in records:
        layers = rows(record)
        lines.append([f"`{layers[0]['trace']}`", *_cells(layers)])
    return table(["trace", *COLUMNS], lines)


def findings(*records: Record) -> str:
    """What the command says of each trace, in its own words."""
    said = (sentence for record in records for sentence in inspect_tables.findings(inspection(record)))
    return bullets(*(re.sub(r"(?<=\d)%", " %", sentence) for sentence in said))


def inspection(record: Record) -> Inspection:
    """A record as the command had it."""
    layers = rows(record)
    settings = {name: layers[0][name] for name in ("sink", "window", "last", "tokens")}
    heads = {
        one["layer"]: {
            name.removeprefix("heads."): torch.tensor([float("nan") if value is None else value for value in values])
            for name, values in one.items()
            if name.startswith("heads.")
        }
        for one in layers
    }
    return Inspection(layers[0]["trace"], settings, heads)
