"""The picture of `bench --by-step`: a measure at every decoded token, as Quest's Figure 4 has recall@10.

https://arxiv.org/abs/2406.10774
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseattn.core.budget import budget_label
from sparseattn.evaluation.full_attention import RECALLS
from sparseattn.evaluation.measure_table import measure
from sparseattn.evaluation.result import Evaluation
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots.panels import heading, panel_grid, save, shown, unit

# Measures whose value full attention has.
WHOLE = {
    **dict.fromkeys((*(f"recall@{k}" for k in RECALLS), "mass", "recovered", "attended_share", "bytes_share"), 1.0),
    "relative_error": 0.0,
}
MARKED = 8  # points of a line that have a marker, to tell lines apart without hiding them
FULL = "full attention"


def by_step(results: Sequence[Evaluation], key: str, path: Path) -> None:
    """Draw a measure against the decoded token, mean over layers and heads: a panel a budget, a line a method.

    A method without a budget is in every panel. Full attention has a line where the measure has a value for it.
    """
    known = measure(key)
    budgets = list(dict.fromkeys(result.budget for result in results))
    labels = list(dict.fromkeys(result.label for result in results))
    alone = {label for label in labels if sum(result.label == label for result in results) == 1}
    figure, axes = panel_grid(len(budgets), 1, (5.0, 2.6), [*labels, FULL], sharex=True, sharey=True)
    for axis, budget in zip(axes[:, 0], budgets, strict=True):
        for result in results:
            if result.budget == budget or result.label in alone:
                line = result.by_step(key).nanmean(0).tolist()
                look = style(labels.index(result.label), result.label)
                tokens = [result.settings.get("every", 1) * (i + 1) for i in range(len(line))]
                axis.plot(tokens, line, markevery=-(-len(line) // MARKED), **look)
        if key in WHOLE:
            axis.axhline(WHOLE[key], color="grey", linestyle="--", linewidth=1, label=FULL)
        axis.set_title(f"budget {budget_label(budget)}", fontsize=10)
        axis.set_ylabel(known.label)
        if known.unit == "share":
            axis.yaxis.set_major_formatter(unit(known))
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("decoded token")
    trace, facts = results[0].trace, results[0].settings
    what = f"{known.label}, mean over layers and heads, at the last {facts['last']} of {facts['tokens']} tokens"
    heading(figure, shown(f"{trace}: {what}"))
    name_ends(figure, axes[:, 0])
    save(figure, path)
