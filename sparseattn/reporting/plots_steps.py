"""The picture of `bench --by-step`: a measure at every decoded token, as Quest's Figure 4 has recall@10.

https://arxiv.org/abs/2406.10774
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseattn.core.budget import budget_label
from sparseattn.evaluation.replay import RECALLS, Evaluation
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots import SHARE, panel_grid, save, shown

WHOLE = {  # of full attention
    **{f"recall@{k}": 1.0 for k in RECALLS},
    "mass": 1.0,
    "recovered": 1.0,
    "relative_error": 0.0,
    "attended_share": 1.0,
    "bytes_share": 1.0,
}
MARKED = 8  # points of a line that have a marker, to tell lines apart without hiding them
FULL = "full attention"


def by_step(results: Sequence[Evaluation], measure: str, path: Path) -> None:
    """A measure against the decoded token, mean over layers and heads: a panel a budget of one trace, a line a method.

    A method without a budget is in every panel. Full attention has a line where the measure has a value for it.
    """
    budgets = list(dict.fromkeys(one.budget for one in results))
    labels = list(dict.fromkeys(one.label for one in results))
    alone = {label for label in labels if sum(one.label == label for one in results) == 1}
    figure, axes = panel_grid(len(budgets), 1, (5.0, 2.6), [*labels, FULL], sharex=True, sharey=True)
    for axis, budget in zip(axes[:, 0], budgets, strict=True):
        for one in results:
            if one.budget == budget or one.label in alone:
                line = one.by_step(measure).nanmean(0).tolist()
                look = style(labels.index(one.label), one.label)
                axis.plot(range(1, len(line) + 1), line, markevery=-(-len(line) // MARKED), **look)
        if measure in WHOLE:
            axis.axhline(WHOLE[measure], color="grey", linestyle="--", linewidth=1, label=FULL)
        axis.set_title(f"budget {budget_label(budget)}", fontsize=10)
        axis.set_ylabel(shown(measure.replace("_", " ")))
        if measure in WHOLE:
            axis.yaxis.set_major_formatter(SHARE)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("decoded token")
    trace, facts = results[0].trace, results[0].settings
    what = f"{measure}, mean over layers and heads, at the last {facts['last']} of {facts['tokens']} tokens"
    figure.suptitle(shown(f"{trace}: {what.replace('_', ' ')}"), fontsize=10)
    name_ends(figure, axes[:, 0])
    save(figure, path)
