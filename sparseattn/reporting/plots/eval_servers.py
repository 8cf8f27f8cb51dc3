"""The picture of `eval` where prompts were read whole: scores and times against length."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.evaluation import intervals
from sparseattn.evaluation.measure_table import measure
from sparseattn.reporting.eval_records import Record, by, in_words, mean_of, rows_of, select
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots.eval_scores import BARS
from sparseattn.reporting.plots.panels import COUNT, heading, interval, panel_grid, save, shares_up, shown
from sparseattn.reporting.server_tables import first_seconds


def servers(records: Sequence[Record], path: Path) -> None:
    """Draw the score above and the median time to the first token below: a column of panels a task, a line a method and
    budget, a point a length. Bars are intervals where prompts are few."""
    tasks, rows = by(records, "task"), rows_of(records)
    labels = list(map(in_words, rows))
    figure, axes = panel_grid(2, len(tasks), (3.2, 2.4), labels, sharex="col")
    fewest = intervals.FEW
    for (above, below), (task, of_task) in zip(axes.T, tasks.items(), strict=True):
        lengths = sorted({record.get("length") or 0 for record in of_task})
        for k, row in enumerate(rows):
            beside = 0.05 * (k - (len(rows) - 1) / 2)  # so that bars are seen
            groups = {x + beside: _of_length(select(of_task, row), length) for x, length in enumerate(lengths)}
            groups = {x: group for x, group in groups.items() if group}
            fewest = min([fewest, *map(len, groups.values())])
            _draw(above, below, groups, style(k, labels[k]))
        above.set_title(shown(task), fontsize=10)
        shares_up(above)
        below.set_ylim(bottom=0)
        below.yaxis.set_major_formatter(COUNT)
        below.set_xticks(range(len(lengths)), [f"{n:,}" if n else "own" for n in lengths])
        below.set_xlim(-0.5, len(lengths) - 0.5)
        below.set_xlabel("tokens of a prompt")
        for axis in (above, below):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(measure("score").label)
    axes[1, 0].set_ylabel(f"{measure('first_token_seconds').label}, median")
    bars = BARS if fewest < intervals.FEW else ""
    heading(figure, shown(f"{records[0]['settings']['model']}, prompts read whole") + bars)
    name_ends(figure, axes.flat)
    save(figure, path)


def _of_length(records: Sequence[Record], length: int) -> list[Record]:
    return [record for record in records if (record.get("length") or 0) == length]


def _draw(above: Any, below: Any, groups: Mapping[float, Sequence[Record]], look: dict[str, Any]) -> None:
    """Draw the line of one method and budget: place on the axis -> records of one length."""
    above.plot(list(groups), [mean_of(group, "score") for group in groups.values()], **look)
    for x, group in groups.items():
        if len(group) < intervals.FEW:
            interval(above, x, intervals.wilson([record["score"] for record in group]), look["color"])
    seconds = {x: [s for s in map(first_seconds, group) if s is not None] for x, group in groups.items()}
    timed = {x: statistics.median(values) for x, values in seconds.items() if values}
    below.plot(list(timed), list(timed.values()), **look)
