"""The picture of `eval` where prompts were handed over whole: scores and times against length."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.evaluation import intervals
from sparseattn.reporting import eval_tables
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots import COUNT, SHARE, panel_grid, save, shown
from sparseattn.reporting.server_tables import first_seconds


def accuracy(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The score above, the median time to the first token below: a column of panels a task, a line each of what was
    asked, a point a length. Bars are intervals where prompts are few."""
    tasks, rows = eval_tables.by(records, "task"), eval_tables.rows_of(records)
    labels = [eval_tables.at(row) for row in rows]
    figure, axes = panel_grid(2, len(tasks), (3.2, 2.4), labels, sharex="col")
    barred = False
    for (above, below), (task, mine) in zip(axes.T, tasks.items(), strict=True):
        lengths = sorted({one.get("length") or 0 for one in mine})
        for k, row in enumerate(rows):
            look = style(k, labels[k])
            points = [[one for one in eval_tables.select(mine, row) if (one.get("length") or 0) == n] for n in lengths]
            beside = 0.05 * (k - (len(rows) - 1) / 2)  # so that bars are seen
            held = [(x + beside, ours) for x, ours in enumerate(points) if ours]
            above.plot([x for x, _ in held], [eval_tables.value(ours) for _, ours in held], **look)
            for x, ours in held:
                if len(ours) < intervals.FEW:
                    barred = True
                    above.vlines(x, *intervals.wilson([one["score"] for one in ours]), color=look["color"], linewidth=1)
            taken = [(x, [s for s in map(first_seconds, ours) if s is not None]) for x, ours in held]
            taken = [(x, seconds) for x, seconds in taken if seconds]
            below.plot([x for x, _ in taken], [statistics.median(seconds) for _, seconds in taken], **look)
        above.set_title(shown(task), fontsize=10)
        above.set_ylim(-0.03, 1.03)
        above.yaxis.set_major_formatter(SHARE)
        below.set_ylim(bottom=0)
        below.yaxis.set_major_formatter(COUNT)
        below.set_xticks(range(len(lengths)), [f"{n:,}" if n else "own" for n in lengths])
        below.set_xlim(-0.5, len(lengths) - 0.5)
        below.set_xlabel("tokens of a prompt")
        for axis in (above, below):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("score")
    axes[1, 0].set_ylabel("s to the first token, median")
    bars = "\nbars: intervals of 95%, as prompts are few" if barred else ""
    figure.suptitle(shown(f"{records[0]['settings']['model']}, prompts read whole") + bars, fontsize=10)
    name_ends(figure, axes.flat)
    save(figure, path)
