"""The pictures of `bench`, `recall` and `eval`; the one file that needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.cli import eval_report
from sparseattn.cli.common import plain
from sparseattn.cli.report import Column
from sparseattn.curves import Curve
from sparseattn.files import write_atomic
from sparseattn.metrics import Evaluation
from sparseattn.tasks.run import FULL

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'sparseattn[plots]', or pass --no-figures") from error

# Okabe-Ito: told apart by colour-blind readers; markers repeat the distinction for grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MARKERS = "osD^vPX*"
COUNT = FuncFormatter(lambda value, _: f"{value:g}")
SHARE = FuncFormatter(lambda value, _: f"{100 * value:g}%")


def frontier(results: Sequence[Evaluation], path: Path) -> None:
    """Quality against cost for every selector of one trace, a point a budget, as a PNG."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    methods = list(dict.fromkeys(one.label for one in results))
    columns = (("bytes_share", "bytes read / bytes of the cache"), ("attended", "rows attended per query head"))
    rows = (("mass", "recovered attention mass"), ("relative_error", "relative output error"))
    for i, (quality, quality_label) in enumerate(rows):
        for j, (cost, cost_label) in enumerate(columns):
            axis = axes[i][j]
            for k, method in enumerate(methods):
                points = sorted((one.mean(cost), one.mean(quality)) for one in results if one.label == method)
                axis.plot(*zip(*points, strict=True), **_style(k, method))
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(SHARE if cost == "bytes_share" else COUNT)
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3)
            if quality == "relative_error":
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter(SHARE)
                axis.axhline(0.01, color="grey", linestyle="--", linewidth=1)
                axis.set_xlabel(cost_label)
            if j == 0:
                axis.set_ylabel(quality_label)
    one = results[0]
    figure.suptitle(
        f"{one.trace}: {one.settings['tokens']} tokens, last {one.settings['last']} decoded, sink "
        f"{one.settings['sink']}, window {one.settings['window']}; a point a budget, mean over layers and heads",
        fontsize=10,
    )
    _legend(figure, methods, ncols=3)
    _save(figure, path)


def recall(columns: Sequence[Column], level: float, path: Path) -> None:
    """Recall against the share of keys scanned: a column a source, queries to keys above, keys to keys below."""
    figure = Figure(figsize=(max(7.5, 0.6 + 3.1 * len(columns)), 6.6), layout="constrained")
    axes: Any = figure.subplots(2, len(columns), sharex=True, sharey=True, squeeze=False)
    labels = list(columns[0].asked)
    every = [curve for column in columns for curves in (column.asked, column.control) for curve in curves.values()]
    shares = [point.mean("scanned_share") for curve in every for point in curve.points]
    shares = [share for share in shares if share > 0]  # neither none nor unknown
    for j, column in enumerate(columns):
        axes[0][j].set_title(column.title, fontsize=10)
        axes[1][j].set_xlabel("keys scanned / keys")
        for axis, curves in zip((axes[0][j], axes[1][j]), (column.asked, column.control), strict=True):
            for label, curve in curves.items():
                points = sorted((point.mean("scanned_share"), point.mean("recall")) for point in curve.points)
                axis.plot(*zip(*points, strict=True), **_style(labels.index(label), label))
            axis.axhline(level, color="grey", linestyle="--", linewidth=1)
            axis.set_xlim(min(shares, default=0.01) / 1.3, max(shares, default=1.0) * 1.3)
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(SHARE)
            axis.tick_params(labelsize=8)
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_ylim(0, 1.03)
            axis.grid(alpha=0.3)
    k = columns[0].asked[labels[0]].settings["k"]
    for axis, direction in zip((axes[0][0], axes[1][0]), ("queries to keys", "keys to keys"), strict=True):
        axis.set_ylabel(f"{direction}\nrecall@{k}")
    shared = "; keys to keys knows no gap" if len({id(column.control) for column in columns}) < len(columns) else ""
    title = f"Recall against keys scanned: a point a setting of the index, mean over heads{shared}"
    figure.suptitle(title, fontsize=10)
    _legend(figure, labels, ncols=max(3, min(2 * len(columns), 5)))
    _save(figure, path)


def scaling(
    titles: Sequence[str], lines: Mapping[str, Sequence[Mapping[int, Curve]]], level: float, path: Path
) -> None:
    """What it takes to reach `level` as keys grow: keys scanned above, time below.

    `lines`: label -> for each column (`titles`) the number of keys -> its curve.
    """
    figure = Figure(figsize=(max(7.5, 0.6 + 3.4 * len(titles)), 6.6), layout="constrained")
    axes: Any = figure.subplots(2, len(titles), sharex=True, sharey="row", squeeze=False)
    labels = list(lines)
    for i, (measure, unit) in enumerate(((Curve.scanned_at, SHARE), (_milliseconds_at, COUNT))):
        reached = {
            label: [{n: measure(curve, level) for n, curve in sorted(column.items())} for column in columns]
            for label, columns in lines.items()
        }
        some = any(value > 0 for columns in reached.values() for column in columns for value in column.values())
        for j, axis in enumerate(axes[i]):
            for label, columns in reached.items():
                axis.plot(list(columns[j]), list(columns[j].values()), **_style(labels.index(label), label))
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({n for columns in reached.values() for n in columns[j]}))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:.3g}k"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_yscale("log" if some else "linear")  # without a value, a logarithmic axis is an error
            if some:
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(unit)
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3)
    for j, title in enumerate(titles):
        axes[0][j].set_title(title, fontsize=10)
        axes[1][j].set_xlabel("keys (k = 1,024)")
    axes[0][0].set_ylabel("keys scanned / keys")
    axes[1][0].set_ylabel("ms per token and layer")
    figure.suptitle(
        f"To find {level:g} of the exact top rows; a point is missing where that was not reached", fontsize=10
    )
    _legend(figure, labels, ncols=max(3, min(2 * len(titles), 5)))
    _save(figure, path)


def _milliseconds_at(curve: Curve, level: float) -> float:
    return 1000 * curve.seconds_at(level)


def accuracy(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Scores against the budget, a panel a task and protocol; what has no budget is a level."""
    panels = [
        (task, protocol, ours)
        for protocol, mine in eval_report.by(records, "protocol").items()
        for task, ours in eval_report.by(mine, "task").items()
    ]
    columns = min(3, len(eval_report.by(records, "task")))
    figure = Figure(figsize=(max(6.0, 3.8 * columns), 0.9 + 2.9 * -(-len(panels) // columns)), layout="constrained")
    axes: Any = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    methods = list(dict.fromkeys(one["method"] for one in records))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (task, protocol, mine) in zip(axes.flat, panels, strict=False):
        budgets = list(dict.fromkeys(one["budget"] for one in mine if one["budget"] is not None))
        for k, method in enumerate(methods):
            levels = [
                (budget, eval_report.value(eval_report.select(mine, (method, budget))))
                for budget in (*budgets, None)
                if eval_report.select(mine, (method, budget))
            ]
            style = _style(k, _shown(method))
            if [budget for budget, _ in levels] == [None]:
                dashes = "--" if method == FULL else ":"
                axis.axhline(levels[0][1], color=style["color"], linestyle=dashes, linewidth=1.4, label=style["label"])
            else:
                axis.plot([budgets.index(budget) for budget, _ in levels], [level for _, level in levels], **style)
        axis.set_xticks(range(len(budgets)), list(map(_shown, budgets)))
        axis.set_xlim(-0.3, max(len(budgets), 1) - 0.7)
        axis.set_xlabel("budget")
        axis.set_title(_shown(f"{task}, {protocol}"), fontsize=10)
        axis.grid(alpha=0.3)
        if "nll" in mine[0]:
            axis.set_ylabel("perplexity")
        else:
            axis.set_ylabel("score")
            axis.set_ylim(-0.03, 1.03)
            axis.yaxis.set_major_formatter(SHARE)
    model = records[0]["settings"]["model"]
    figure.suptitle(_shown(f"{model}: mean over lengths, depths and samples"), fontsize=10)
    _legend(figure, list(map(_shown, methods)), ncols=3 if columns == 1 else 5)
    _save(figure, path)


def heat(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The score at each length and depth of one task and protocol: a panel a method and budget."""
    lengths = sorted({one["length"] for one in records})
    depths = sorted({one["depth"] for one in records})
    rows = eval_report.rows_of(records)
    columns = min(4, len(rows))
    size = (
        max(6.0, 0.8 + columns * (1.0 + 0.45 * len(lengths))),
        1.0 + -(-len(rows) // columns) * (0.9 + 0.3 * len(depths)),
    )
    figure = Figure(figsize=size, layout="constrained")
    axes: Any = figure.subplots(-(-len(rows) // columns), columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    scale = Normalize(0.0, 1.0)
    for axis, row in zip(axes.flat, rows, strict=False):
        mine = eval_report.select(records, row)
        cells = [
            [eval_report.value(one for one in mine if (one["length"], one["depth"]) == (n, depth)) for n in lengths]
            for depth in depths
        ]
        axis.imshow(cells, norm=scale, cmap="cividis", aspect="auto")
        name = _shown(row[0] if row[1] is None else f"{row[0]}, {row[1]}")
        axis.set_title(name.replace("(", "\n(", 1), fontsize=8)  # a panel is narrow
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7, rotation=45)
        axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth", fontsize=8)
    figure.colorbar(ScalarMappable(scale, "cividis"), ax=axes, label="score", format=SHARE)
    one = records[0]
    what = f"{one['task']}, protocol {one['protocol']}, {one['settings']['model']}"
    figure.suptitle(_shown(f"{what}: tokens against the needle's depth"), fontsize=10)
    _save(figure, path)


def _shown(text: str) -> str:
    """Text of a file or an option as it is: no control characters, and no formula where it holds dollar signs."""
    return plain(text).replace("$", r"\$")


def _style(number: int, label: str) -> dict[str, Any]:
    return {
        "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],  # 64 pairs of colour and marker
        "color": COLOURS[number % len(COLOURS)],
        "label": label,
        "markersize": 5,
        "linewidth": 1.4,
    }


def _legend(figure: Figure, labels: Sequence[str], ncols: int) -> None:
    """Every label once, below the axes, whichever of them it is drawn in."""
    held: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            held.setdefault(label, handle)
    figure.legend(
        [held[label] for label in labels], labels, loc="outside lower center", ncols=min(ncols, len(labels)), fontsize=9
    )


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomic(path, buffer.getvalue())
