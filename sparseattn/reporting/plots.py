"""The pictures of `bench`, `recall`, `eval` and `inspect`; the one file that needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparseattn.evaluation import intervals
from sparseattn.evaluation.attention_stats import BEST, COUNTS, NEEDED, PAGES, Inspection
from sparseattn.evaluation.recall_curve import Curve
from sparseattn.evaluation.replay import Evaluation
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting import agreement_tables, eval_tables
from sparseattn.reporting.line_style import COLOURS, name_ends, room, style
from sparseattn.reporting.replay_tables import Recalled
from sparseattn.reporting.terminal import plain
from sparseattn.utils.files import write_atomic

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'sparseattn[plots]', or pass --no-figures") from error

COUNT = FuncFormatter(lambda value, _: f"{value:g}")
SHARE = FuncFormatter(lambda value, _: f"{100 * value:g}%")
COLUMNS = 4  # panels beside each other, of pictures with one a layer
HEADS = 10  # that are numbered, or have a tick, in such a panel


def frontier(results: Sequence[Evaluation], path: Path) -> None:
    """Quality against bytes read and against rows, for every selector of one trace, a point a budget, as a PNG."""
    methods = list(dict.fromkeys(one.label for one in results))
    figure, axes = panel_grid(2, 2, (4.6, 3.2), methods, sharex="col", sharey="row")
    columns = (("bytes_share", "bytes read / bytes of the cache"), ("attended", "rows attended per query head"))
    rows = (("mass", "recovered attention mass"), ("relative_error", "relative output error"))
    for i, (quality, quality_label) in enumerate(rows):
        for j, (cost, cost_label) in enumerate(columns):
            axis = axes[i][j]
            for k, method in enumerate(methods):
                points = sorted((one.mean(cost), one.mean(quality)) for one in results if one.label == method)
                axis.plot(*zip(*points, strict=True), **style(k, method))
            logarithmic(axis, SHARE if cost == "bytes_share" else COUNT)
            axis.grid(alpha=0.3)
            if quality == "relative_error":
                axis.axhline(0.01, color="grey", linestyle="--", linewidth=1)
                axis.set_yscale("log")  # behind the line, as matplotlib warns of a scale that spans one value
                axis.yaxis.set_major_formatter(SHARE)
                axis.set_xlabel(cost_label)
            if j == 0:
                axis.set_ylabel(quality_label)
    one = results[0]
    figure.suptitle(
        f"{one.trace}: {one.settings['tokens']} tokens, last {one.settings['last']} decoded, sink "
        f"{one.settings['sink']}, window {one.settings['window']}; a point a budget, mean over layers and heads",
        fontsize=10,
    )
    name_ends(figure, axes.flat)
    save(figure, path)


def recall(columns: Sequence[Recalled], level: float, path: Path) -> None:
    """Recall against the share of keys scanned: a column a source, queries to keys above, keys to keys below."""
    labels = list(columns[0].curves)
    figure, axes = panel_grid(2, len(columns), (3.0, 3.0), labels, sharex=True, sharey=True)
    every = [curve for column in columns for curves in (column.curves, column.control) for curve in curves.values()]
    shares = [point.mean("scanned_share") for curve in every for point in curve.points]
    shares = [share for share in shares if share > 0]  # neither none nor unknown
    for j, column in enumerate(columns):
        axes[0][j].set_title(column.title, fontsize=10)
        axes[1][j].set_xlabel("keys scanned / keys")
        for axis, curves in zip((axes[0][j], axes[1][j]), (column.curves, column.control), strict=True):
            for label, curve in curves.items():
                points = sorted((point.mean("scanned_share"), point.mean("recall")) for point in curve.points)
                axis.plot(*zip(*points, strict=True), **style(labels.index(label), label))
            axis.axhline(level, color="grey", linestyle="--", linewidth=1)
            axis.set_xlim(min(shares, default=0.01) / 1.3, max(shares, default=1.0) * 1.3)
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(SHARE)
            axis.tick_params(labelsize=8)
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_ylim(0, 1.03)
            axis.grid(alpha=0.3)
    k = columns[0].curves[labels[0]].settings["k"]
    for axis, direction in zip((axes[0][0], axes[1][0]), ("queries to keys", "keys to keys"), strict=True):
        axis.set_ylabel(f"{direction}\nrecall@{k}")
    shared = "; keys to keys knows no gap" if len({id(column.control) for column in columns}) < len(columns) else ""
    title = f"Recall against keys scanned: a point a setting of the index, mean over heads{shared}"
    figure.suptitle(title, fontsize=10)
    name_ends(figure, axes.flat)
    save(figure, path)


def scaling(
    titles: Sequence[str], lines: Mapping[str, Sequence[Mapping[int, Curve]]], level: float, path: Path, source: str
) -> None:
    """What it takes to reach `level` as the keys of `source` grow: keys scanned above, time below.

    `lines`: label -> for each column (`titles`) the number of keys -> its curve.
    """
    labels = list(lines)
    figure, axes = panel_grid(2, len(titles), (3.2, 3.0), labels, sharex=True, sharey="row")
    for i, (measure, unit) in enumerate(((Curve.scanned_at, SHARE), (_milliseconds_at, COUNT))):
        reached = {
            label: [{n: measure(curve, level) for n, curve in sorted(column.items())} for column in columns]
            for label, columns in lines.items()
        }
        some = any(value > 0 for columns in reached.values() for column in columns for value in column.values())
        for j, axis in enumerate(axes[i]):
            for label, columns in reached.items():
                axis.plot(list(columns[j]), list(columns[j].values()), **style(labels.index(label), label))
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
        shown(f"{source}: to find {level:g} of the exact top rows; a point is missing where that was not reached"),
        fontsize=10,
    )
    name_ends(figure, axes.flat)
    save(figure, path)


def _milliseconds_at(curve: Curve, level: float) -> float:
    return 1000 * curve.seconds_at(level)


def accuracy(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Scores against the budget, a panel a task and protocol; what has no budget is a level.

    Over few prompts every mean has a bar: the interval of 95 % (`intervals`).
    """
    panels = [
        (task, protocol, ours)
        for protocol, mine in eval_tables.by(records, "protocol").items()
        for task, ours in eval_tables.by(mine, "task").items()
    ]
    columns = min(3, len(eval_tables.by(records, "task")))
    methods = list(dict.fromkeys(map(eval_tables.named, records)))
    figure, axes = panel_grid(-(-len(panels) // columns), columns, (3.4, 2.6), methods)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    barred = False
    for axis, (task, protocol, mine) in zip(axes.flat, panels, strict=False):
        budgets = list(dict.fromkeys(one["budget"] for one in mine if one["budget"] is not None))
        fewest = min(len(eval_tables.select(mine, row)) for row in eval_tables.rows_of(mine))
        barred |= fewest < intervals.FEW
        for k, method in enumerate(methods):
            beside = 0.05 * (k - (len(methods) - 1) / 2) if fewest < intervals.FEW else 0.0  # so that bars are seen
            rows = {budget: eval_tables.select(mine, (method, budget)) for budget in (*budgets, None)}
            held = [(budget, ours) for budget, ours in rows.items() if ours]
            if not held:
                continue
            look = style(k, plain(method))
            if [budget for budget, _ in held] == [None]:
                dashes = "--" if method == FULL else ":"
                level = eval_tables.value(held[0][1])
                axis.axhline(level, color=look["color"], linestyle=dashes, linewidth=1.4, label=look["label"])
                places = [-0.5 + 0.5 * beside]
            else:
                places = [budgets.index(budget) + beside for budget, _ in held]
                axis.plot(places, [eval_tables.value(ours) for _, ours in held], **look)
            for place, (_, ours) in zip(places, held, strict=True):
                if len(ours) < intervals.FEW:
                    around = intervals.wilson([one["score"] for one in ours])
                    axis.vlines(place, *around, color=look["color"], linewidth=1, alpha=0.7)
        axis.set_xticks(range(len(budgets)), list(map(shown, budgets)))
        axis.set_xlim(-0.75, max(len(budgets), 1) - 0.5)
        unit = ", rows" if all(budget.isdigit() for budget in budgets) else ""  # a share says its unit itself
        axis.set_xlabel(f"budget{unit} beyond sink and window")
        axis.set_title(shown(f"{task}, {protocol}, {_prompts(fewest)}"), fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylabel("score")
        axis.set_ylim(-0.03, 1.03)
        axis.yaxis.set_major_formatter(SHARE)
    bars = "\nbars: intervals of 95%, as prompts are few" if barred else ""
    model = records[0]["settings"]["model"]
    figure.suptitle(shown(f"{model}: mean over lengths, depths and samples") + bars, fontsize=10)
    name_ends(figure, axes.flat[: len(panels)])
    save(figure, path)


def agreement(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Divergence from full attention against rows, and bytes if all say what they read: a row of panels for each text
    and length, a point a budget. Bars are intervals over windows; what does not diverge has no place on the axis."""
    panels = agreement_tables.panels(records)
    sparse = {place: [one for one in mine if one["method"] != FULL] for place, mine in panels.items()}
    methods = list(dict.fromkeys(eval_tables.named(one) for mine in sparse.values() for one in mine))
    costs = [("rows read per query head of a sparse layer", _rows, COUNT)]
    if all(one.get("bytes_share") is not None for mine in sparse.values() for one in mine):
        costs.append(("bytes read / bytes of the cache", agreement_tables.bytes_share, SHARE))
    figure, axes = panel_grid(len(panels), len(costs), (4.2, 2.8), methods, sharex="col", sharey="row")
    for line, (place, mine) in zip(axes, sparse.items(), strict=True):
        lines = {
            name: [eval_tables.select(mine, row) for row in eval_tables.rows_of(mine) if row[0] == name]
            for name in methods
        }
        means = [eval_tables.mean(one["kl"] for one in point) for points in lines.values() for point in points]
        floor = min((mean for mean in means if mean > 0), default=1.0) / 2
        for axis, (_, cost, unit) in zip(line, costs, strict=True):
            for k, (name, points) in enumerate(lines.items()):
                look = style(k, plain(name))
                placed = sorted((cost(point), [one["kl"] for one in point]) for point in points)
                placed = [(x, kl) for x, kl in placed if sum(kl) > 0]
                axis.plot([x for x, _ in placed], [sum(kl) / len(kl) for _, kl in placed], **look)
                for x, kl in placed:
                    if (around := intervals.student(kl)) is not None:
                        low, high = max(around[0], floor), max(around[1], floor)
                        axis.vlines(x, low, high, color=look["color"], linewidth=1, alpha=0.7)
            logarithmic(axis, unit)
            if any(mean > 0 for mean in means):  # without a value, a logarithmic axis is an error
                axis.set_yscale("log")
                axis.set_ylim(bottom=floor)
            axis.yaxis.set_major_formatter(COUNT)
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3)
        line[0].set_ylabel("KL, nats a token")
        line[0].set_title(shown(agreement_tables.title(place, mine)), fontsize=10, loc="left")
    for axis, (label, _, _) in zip(axes[-1], costs, strict=True):
        axis.set_xlabel(label)
    head = f"{records[0]['settings']['model']}: divergence of the next token's distribution from full attention's"
    barred = any(len(eval_tables.select(mine, eval_tables.rows_of(mine)[0])) > 1 for mine in sparse.values() if mine)
    bars = "\nbars: 95% intervals over windows, cut at the foot" if barred else ""
    figure.suptitle(shown(head) + bars, fontsize=10)
    name_ends(figure, axes.flat)
    save(figure, path)


def _rows(records: Sequence[Mapping[str, Any]]) -> float:
    return eval_tables.mean(one["rows"] for one in records)


def _prompts(count: int) -> str:
    return f"{count} prompt{'s' * (count != 1)}"


def heat(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The score at each length and depth of one task and protocol: a panel a method and budget."""
    lengths = sorted({one["length"] for one in records})
    depths = sorted({one["depth"] for one in records})
    rows = eval_tables.rows_of(records)
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
        mine = eval_tables.select(records, row)
        cells = [
            [eval_tables.value(one for one in mine if (one["length"], one["depth"]) == (n, depth)) for n in lengths]
            for depth in depths
        ]
        axis.imshow(cells, norm=scale, cmap="cividis", aspect="auto")
        name = shown(row[0] if row[1] is None else f"{row[0]}, {row[1]}")
        axis.set_title(name.replace("(", "\n(", 1), fontsize=8)  # a panel is narrow
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7, rotation=45)
        axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth", fontsize=8)
    figure.colorbar(ScalarMappable(scale, "cividis"), ax=axes, label="score", format=SHARE)
    one = records[0]
    what = f"{one['task']}, protocol {one['protocol']}, {one['settings']['model']}"
    figure.suptitle(shown(f"{what}: tokens against the needle's depth"), fontsize=10)
    save(figure, path)


def inspection(found: Inspection, path: Path) -> None:
    """Eight measures, a panel each: a point every query head, over the layers, and the mean of each layer as a line."""
    page = PAGES[0]
    panels = (
        ("distance_ratio", "distance of queries from the keys\nover that of other keys", COUNT, None),
        ("far_mass", "attention\nbeyond sink and window", SHARE, 1.0),
        (f"top_share@{NEEDED}", f"of that, on the\n{NEEDED} best rows", SHARE, 1.0),
        ("overlap@1", "of these rows, needed\nby the token before too", SHARE, 1.0),
        (f"slack@{page}", "Quest's bound less the page's largest\nlogit, in standard deviations", COUNT, None),
        (f"rank@{page}", "rank correlation of the two", COUNT, 1.0),
        (f"hits@{page}", f"of the {BEST} best pages,\nfound by the bound", SHARE, 1.0),
        (
            f"bound_share@{page}",
            f"attention beyond sink and window, on\n{NEEDED // page} pages of the bound",
            SHARE,
            1.0,
        ),
    )
    layers = found.layers
    figure = Figure(figsize=(max(11.0, 1.6 + 4 * 0.09 * len(layers)), 5.6), layout="constrained")
    axes: Any = figure.subplots(2, 4, sharex=True)
    for axis, (measure, title, unit, most) in zip(axes.flat, panels, strict=True):
        for x, layer in enumerate(layers):
            heads = found.heads[layer][measure].tolist()
            axis.plot([x] * len(heads), heads, "o", color=COLOURS[0], markersize=3.5, alpha=0.5, markeredgewidth=0)
        axis.plot([found.mean(measure, layer) for layer in layers], color=COLOURS[1], linewidth=1.4)
        least = min(float(one[measure].nan_to_num().min()) for one in found.heads.values())
        axis.set_ylim(bottom=min(-0.03 * (most or 0.0), least), top=None if most is None else 1.03 * most)
        axis.yaxis.set_major_formatter(unit)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        step = -(-len(layers) // 10)
        axis.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    for axis in axes[1]:
        axis.set_xlabel("layer", fontsize=9)
    figure.suptitle(f"{_inspected(found)}, pages of {page}; a point a query head, the line their mean", fontsize=10)
    save(figure, path)


def needed_rows(found: Inspection, path: Path) -> None:
    """The share of the attention beyond sink and window on the best rows, against their number: a panel a layer, a line
    a query head, named where few are."""
    figure, axes = _by_layer(found)
    for axis, heads in zip(axes, found.heads.values(), strict=False):
        shares = torch.stack([heads[f"top_share@{k}"] for k in COUNTS], 1).tolist()  # [H*G][k]
        order = sorted(range(len(shares)), key=lambda head: shares[head][0])
        named = set(order) if len(order) <= HEADS else {order[0], order[-1]}
        for head, line in enumerate(shares):
            look = style(head, str(head) if head in named else "_")
            axis.plot(COUNTS, line, **{**look, "markersize": 3.5, "linewidth": 1.1})
        axis.set_xscale("log", base=4)
        axis.set_xticks(COUNTS)
        axis.xaxis.set_major_formatter(COUNT)
        axis.minorticks_off()
    figure.supxlabel("best rows", fontsize=9)
    which = (
        "numbered" if all(len(one["far_mass"]) <= HEADS for one in found.heads.values()) else "least and most numbered"
    )
    figure.suptitle(
        f"{_inspected(found)}: share of the attention beyond sink and window on the best rows; a line a query head, "
        f"{which}",
        fontsize=10,
    )
    name_ends(figure, axes[: len(found.layers)])
    save(figure, path)


def needed_pages(found: Inspection, path: Path) -> None:
    """What as many rows hold of the attention beyond sink and window, chosen singly, as pages by their largest logits,
    and as pages by Quest's bounds: a panel a layer, three marks a query head."""
    page = PAGES[0]
    series = (
        (f"top_share@{NEEDED}", f"best {NEEDED} rows"),
        (f"best_share@{page}", f"best {NEEDED // page} pages"),
        (f"bound_share@{page}", f"{NEEDED // page} pages by bound"),
    )
    figure, axes = _by_layer(found)
    for axis, heads in zip(axes, found.heads.values(), strict=False):
        held = [heads[measure].tolist() for measure, _ in series]
        axis.vlines(range(len(held[0])), held[-1], held[0], color="grey", linewidth=0.8, alpha=0.6)
        for k, (shares, (_, label)) in enumerate(zip(held, series, strict=True)):
            axis.plot(shares, **{**style(k, label), "linestyle": "none", "markersize": 4})
        step = -(-len(held[0]) // HEADS)
        axis.set_xticks(range(0, len(held[0]), step))
        axis.set_xlim(-0.5, len(held[0]) - 0.5)
    figure.supxlabel("query head", fontsize=9)
    figure.suptitle(
        f"{_inspected(found)}: share of the attention beyond sink and window in {NEEDED} rows, pages of {page}",
        fontsize=10,
    )
    name_ends(figure, [axes[min(COLUMNS, len(found.layers)) - 1]])
    save(figure, path)


def _inspected(found: Inspection) -> str:
    return shown(f"{found.trace}, last {found.settings['last']} of {found.settings['tokens']} tokens")


def _by_layer(found: Inspection) -> tuple[Figure, Any]:
    """A figure and a flat array of panels of shares, a layer each."""
    columns = min(COLUMNS, len(found.layers))
    rows = -(-len(found.layers) // columns)
    figure = Figure(figsize=(max(7.5, 0.5 + 2.5 * columns), 0.9 + 1.9 * rows), layout="constrained")
    axes: Any = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for axis, layer in zip(axes, found.layers, strict=False):
        axis.set_title(f"layer {layer}: {found.mean('far_mass', layer):.0%} lies there", fontsize=8)
        axis.set_ylim(0, 1.03)
        axis.yaxis.set_major_formatter(SHARE)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in axes[len(found.layers) :]:
        axis.set_axis_off()
    return figure, axes


def shown(text: str) -> str:
    """Text of a file or an option as it is: no control characters, and no formula where it holds dollar signs."""
    return plain(text).replace("$", r"\$")


def panel_grid(rows: int, columns: int, size: tuple[float, float], labels: Sequence[str], **shared: Any) -> Any:
    """A figure and its panels `[rows,columns]`, of `size` inches at least, with room for the names of lines."""
    beside, height = room(labels)
    wide, high = max(6.5, 0.6 + columns * (size[0] + beside)), 0.7 + rows * max(size[1], 0.5 + height)
    figure = Figure(figsize=(wide, high), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def logarithmic(axis: Any, unit: FuncFormatter) -> None:
    """A logarithmic x-axis with few numbers."""
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(unit)
    axis.xaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomic(path, buffer.getvalue())
