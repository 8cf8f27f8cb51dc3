"""The pictures of `eval`'s scores: against the budget, and by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseattn.evaluation import intervals
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting.eval_records import Record, by, mean_of, method_of, rows_of, select
from sparseattn.reporting.line_style import broken, name_ends, style
from sparseattn.reporting.plots.panels import (
    bare_grid,
    colour_bar,
    heading,
    hide,
    interval,
    panel_grid,
    save,
    shares_up,
    shown,
)
from sparseattn.reporting.terminal import plain

BARS = "\nbars: intervals of 95%, as prompts are few"


def accuracy(records: Sequence[Record], path: Path) -> None:
    """Draw scores against the budget, a panel a task and protocol; what has no budget is a level.

    Over few prompts every mean has a bar: the interval of 95 % (`intervals`).
    """
    panels = [
        (task, protocol, of_task)
        for protocol, of_protocol in by(records, "protocol").items()
        for task, of_task in by(of_protocol, "task").items()
    ]
    columns = min(3, len(by(records, "task")))
    methods = list(dict.fromkeys(map(method_of, records)))
    figure, axes = panel_grid(-(-len(panels) // columns), columns, (2.6, 2.4), methods)
    hide(axes.flat[len(panels) :])
    prompts = []
    for axis, (task, protocol, of_task) in zip(axes.flat, panels, strict=False):
        fewest = min(len(select(of_task, row)) for row in rows_of(of_task))
        prompts.append(fewest)
        _against_budgets(axis, of_task, methods, barred=fewest < intervals.FEW)
        axis.set_title(shown(f"{task}, {protocol}, {fewest} prompt{'s' * (fewest != 1)}"), fontsize=10)
    bars = BARS if min(prompts) < intervals.FEW else ""
    heading(figure, shown(f"{records[0]['settings']['model']}: mean over lengths, depths and samples") + bars)
    name_ends(figure, axes.flat[: len(panels)])
    save(figure, path)


def _against_budgets(axis: Any, records: Sequence[Record], methods: Sequence[str], barred: bool) -> None:
    """Draw the scores of one task and protocol, a line a method."""
    budgets = list(dict.fromkeys(record["budget"] for record in records if record["budget"] is not None))
    for k, method in enumerate(methods):
        beside = 0.05 * (k - (len(methods) - 1) / 2) if barred else 0.0  # so that bars are seen
        by_budget = {budget: select(records, (method, budget)) for budget in (*budgets, None)}
        by_budget = {budget: group for budget, group in by_budget.items() if group}
        if not by_budget:
            continue
        look = style(k, plain(method))
        scores = [mean_of(group, "score") for group in by_budget.values()]
        if list(by_budget) == [None]:
            dashes = "--" if method == FULL else ":"
            axis.axhline(scores[0], color=look["color"], linestyle=dashes, linewidth=1.4, label=look["label"])
            places = [-0.5 + 0.5 * beside]
        else:
            places = [budgets.index(budget) + beside for budget in by_budget]
            axis.plot(places, scores, **look)
        for place, group in zip(places, by_budget.values(), strict=True):
            if len(group) < intervals.FEW:
                interval(axis, place, intervals.wilson([record["score"] for record in group]), look["color"])
    axis.set_xticks(range(len(budgets)), list(map(shown, budgets)))
    axis.set_xlim(-0.75, max(len(budgets), 1) - 0.5)
    unit = ", rows" if all(budget.isdigit() for budget in budgets) else ""  # a share says its unit itself
    axis.set_xlabel(f"budget{unit} beyond sink and window")
    axis.grid(alpha=0.3)
    axis.set_ylabel("score")
    shares_up(axis)


def heat(records: Sequence[Record], path: Path) -> None:
    """Draw the score at each length and depth of one task and protocol: a panel a method and budget."""
    lengths = sorted({record["length"] for record in records})
    depths = sorted({record["depth"] for record in records})
    rows = rows_of(records)
    columns = min(4, len(rows))
    wide = max(6.0, 0.8 + columns * (1.0 + 0.45 * len(lengths)))
    figure, axes = bare_grid(
        len(rows), columns, (wide, 1.0 + -(-len(rows) // columns) * (0.9 + 0.3 * len(depths))), sharey=True
    )
    scale = colour_bar(figure, axes, "cividis", "score")
    for axis, row in zip(axes.flat, rows, strict=False):
        of_row = select(records, row)
        cells = [
            [
                mean_of((record for record in of_row if (record["length"], record["depth"]) == (n, depth)), "score")
                for n in lengths
            ]
            for depth in depths
        ]
        axis.imshow(cells, norm=scale, cmap="cividis", aspect="auto")
        name = shown(row[0] if row[1] is None else f"{row[0]}, {row[1]}")
        axis.set_title(broken(name), fontsize=8)  # a panel is narrow
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7, rotation=45)
        axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth", fontsize=8)
    first = records[0]
    what = f"{first['task']}, protocol {first['protocol']}, {first['settings']['model']}"
    heading(figure, shown(f"{what}: tokens against the needle's depth"))
    save(figure, path)
