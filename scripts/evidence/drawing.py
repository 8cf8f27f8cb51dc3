"""How records are drawn: each function takes the file to write, records, and the rows of each that are to be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.scaling import picture
from scripts.evidence import derived, families
from scripts.evidence.frames import Record, Row
from scripts.evidence.tables import matches
from sparseattn.evaluation.attention_stats import Inspection
from sparseattn.evaluation.by_head import Comparison, Reading
from sparseattn.evaluation.intervals import wilson
from sparseattn.evaluation.recall_curve import Curve
from sparseattn.evaluation.result import Evaluation
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting import plots
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots import panels
from sparseattn.reporting.recall_tables import Recalled

Rows: TypeAlias = "Sequence[Row]"  # of one record
LED = ("quest", "quest:page=8,int8=True", "lowbit", "retroinfer", "exact:group=softmax")  # lines of `field`


def frontier(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Quality of the methods of a trace against bytes and rows."""
    plots.frontier([_evaluation(row) for row in rows[0]], path)


def steps(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Recall of the best rows at every decoded token."""
    plots.by_step([_evaluation(row) for row in rows[0]], "recall@10", path)


def _evaluation(row: Row) -> Evaluation:
    """A measurement as `bench` has it, of its means alone."""
    heads = {name.removeprefix("mean."): _tensor([[value]]) for name, value in row.items() if name.startswith("mean.")}
    settings = {name: row[name] for name in ("tokens", "last", "sink", "window")}
    by_step = {
        name.removeprefix("steps."): _tensor(layers)[:, None]  # [layers,1,T]: the mean over heads
        for name, layers in row.items()
        if name.startswith("steps.")
    }
    named = (row["trace"], row["selector"], row["label"], row["budget"])
    return Evaluation(*named, settings, tuple(row["layers"]), heads, by_step)


def _tensor(values: Sequence[Any]) -> torch.Tensor:
    known = [[float("nan") if value is None else value for value in line] for line in values]
    return torch.tensor(known, dtype=torch.float64)


def layers(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """What methods recover by layer, at equal rows and at equal bytes."""
    plots.by_layer([_comparison(one) for one in records[0]["by_layer"]], path)


def _comparison(one: Mapping[str, Any]) -> Comparison:
    """A comparison as `bench --by-layer` has it, of the means of layers alone."""
    readings = {}
    for method in one["methods"]:
        heads = {"recovered": _tensor([[value] for value in method["recovered"]])}
        of = Evaluation(one["trace"], method["selector"], method["label"], None, {}, tuple(one["layers"]), heads)
        readings[method["label"]] = Reading(of, of)
    return Comparison(one["equal"], one["at"], readings)


def inspected(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Distances, shares and pages of a trace by layer."""
    heads = {
        row["layer"]: {
            name.removeprefix("heads."): _tensor([values])[0]
            for name, values in row.items()
            if name.startswith("heads.")
        }
        for row in rows[0]
    }
    one = rows[0][0]
    settings = {name: one[name] for name in ("sink", "window", "last", "tokens")}
    plots.inspection(Inspection(one["trace"], settings, heads), path)


def _curves(rows: Rows, **of: Any) -> dict[str, Curve]:
    """Of each index, its curve on the rows with such values."""
    mine = [row for row in rows if matches(row, of)]
    return {
        label: derived.curve([row for row in mine if row["label"] == label])
        for label in dict.fromkeys(row["label"] for row in mine)
    }


def recall(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Recall against keys scanned, of the most keys of each record."""
    columns = []
    for mine in rows:
        keys = max(row["keys"] for row in mine)
        control = _curves(mine, keys=keys, direction=derived.CONTROL)
        for gap in dict.fromkeys(row["gap"] for row in mine if row["direction"] == derived.ASKED):
            of = f"trace {mine[0]['source']}" if gap is None else f"gap {gap:g}"
            asked = _curves(mine, keys=keys, direction=derived.ASKED, gap="none" if gap is None else gap)
            columns.append(Recalled(f"{of}, {keys:,} keys", asked, control))
    plots.recall(columns, derived.LEVEL, path)


def growth(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Keys scanned and time as the keys of a trace grow."""
    directions = (derived.ASKED, derived.CONTROL)
    counts = sorted({row["keys"] for row in rows[0]})
    curves = {(keys, way): _curves(rows[0], keys=keys, direction=way) for keys in counts for way in directions}
    lines = {
        label: [{keys: curves[keys, way][label] for keys in counts} for way in directions]
        for label in curves[counts[0], derived.ASKED]
    }
    plots.scaling(list(directions), lines, derived.LEVEL, path, rows[0][0]["source"])


def agreement(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Divergence from full attention against rows and bytes."""
    plots.agreement([{**_asked(row), "prompt": f"{row['text']} {row['start']}"} for mine in rows for row in mine], path)


def accuracy(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """Score against budget."""
    plots.accuracy([_asked(row) for row in rows[0]], path)


def _asked(row: Row) -> Row:
    """A line of `eval`, whose budgets are text and whose settings lie apart."""
    return {**row, "budget": None if row["budget"] is None else str(row["budget"]), "settings": row}


def scaling(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """A step by context, batch and budget."""
    picture(records[0], path)


def field(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """A panel a model: every method and budget a grey point, and a line for each of `LED`, with what one types."""
    figure, axes = panels.panel_grid(1, len(records), (2.7, 3.6), LED, sharey=True)
    for axis, record, mine in zip(axes.flat, records, rows, strict=True):
        points = families.points(record, mine)
        axis.scatter(
            [p["bytes_share"] for p in points], [p["kl"] for p in points], s=9, color="#c7c7c7", label="_every"
        )
        for number, name in enumerate(LED):
            line = sorted((p["bytes_share"], p["kl"]) for p in points if p["method"] == name)
            axis.plot(*zip(*line, strict=True), **style(number, name))
        panels.logarithmic(axis, panels.SHARE)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(panels.COUNT)
        axis.set_xlim(right=1.1)
        axis.grid(alpha=0.3)
        axis.set_title(f"{mine[0]['model']}, {mine[0]['length']:,} tokens", fontsize=10, loc="left")
        axis.set_xlabel("bytes read / bytes of the cache")
    axes.flat[0].set_ylabel("KL divergence, nats per token")
    panels.heading(figure, "KL divergence from full attention against bytes read; grey: every other method and budget")
    name_ends(figure, axes.flat)
    panels.save(figure, path)


def protocols(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """A row a method, best first, with its score by each protocol and the interval of 95 %."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows[0]:
        scores.setdefault(row["method"], {}).setdefault(row["protocol"], []).append(row["score"])
    first = next(iter(scores[FULL]))
    order = sorted(scores, key=lambda method: _mean(scores[method][first]))
    figure, axes = panels.bare_grid(1, 1, (7.0, 0.9 + 0.34 * len(order)))
    axis = axes.flat[0]
    for number, protocol in enumerate(scores[FULL]):
        known = [(at, scores[method][protocol]) for at, method in enumerate(order) if protocol in scores[method]]
        _answered(axis, [(place + 0.2 * (1 - number), of) for place, of in known], style(number, protocol))
    _methods_on(axis, order)
    axis.set_xlabel("prompts answered, with intervals of 95 %")
    axis.legend(title="protocol", fontsize=8, title_fontsize=8, loc="lower right")
    one = rows[0][0]
    panels.heading(figure, f"RULER: {one['model']}, {one['length']:,} tokens, {one_budget(rows[0])} rows by choice")
    panels.save(figure, path)


def by_length(path: Path, records: Sequence[Record], rows: Sequence[Rows]) -> None:
    """A panel a model and length, a row a method in the order of their means, with its score and interval of 95 %."""
    scores: list[dict[str, list[float]]] = [{} for _ in rows]
    for known, mine in zip(scores, rows, strict=True):
        for row in mine:
            known.setdefault(row["method"], []).append(row["score"])
    order = sorted(scores[0], key=lambda method: sum(_mean(known[method]) for known in scores))
    figure, axes = panels.bare_grid(
        len(rows), len(rows), (2.0 + 2.2 * len(rows), 0.9 + 0.28 * len(order)), sharex=True, sharey=True
    )
    for axis, known, mine in zip(axes.flat, scores, rows, strict=True):
        for number, wanted in enumerate((True, False)):  # full attention in a colour of its own
            of = [(at, known[method]) for at, method in enumerate(order) if (method == FULL) == wanted]
            _answered(axis, of, style(number, "_"))
        _methods_on(axis, order)
        axis.set_title(f"{mine[0]['model']}, {mine[0]['length']:,} tokens", fontsize=9, loc="left")
    figure.supxlabel("prompts answered, with intervals of 95 %", fontsize=9)
    panels.heading(figure, f"RULER's needles by method, {one_budget(rows[0])} rows by choice")
    panels.save(figure, path)


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _answered(axis: Any, of: Sequence[tuple[float, Sequence[float]]], look: Mapping[str, Any]) -> None:
    """Draw the mean of scores and its interval at each place of the y-axis."""
    axis.plot([_mean(scores) for _, scores in of], [at for at, _ in of], **{**look, "linestyle": "none"})
    for at, scores in of:
        axis.hlines(at, *wilson(scores), color=look["color"], linewidth=1, alpha=0.7)


def _methods_on(axis: Any, order: Sequence[str]) -> None:
    """Name the methods on the y-axis, and shares on the x-axis."""
    axis.set_yticks(range(len(order)), ["full attention" if method == FULL else method for method in order])
    axis.set_xlim(-0.03, 1.03)
    axis.xaxis.set_major_formatter(panels.SHARE)
    axis.grid(alpha=0.3)


def one_budget(rows: Rows) -> int:
    """Return the budget that all rows have that have one."""
    (budget,) = {int(row["budget"]) for row in rows if row["budget"] is not None}
    return budget


DRAWN: dict[str, Callable[[Path, Sequence[Record], Sequence[Rows]], None]] = {
    one.__name__: one
    for one in (
        accuracy,
        agreement,
        by_length,
        field,
        frontier,
        growth,
        inspected,
        layers,
        protocols,
        recall,
        scaling,
        steps,
    )
}
