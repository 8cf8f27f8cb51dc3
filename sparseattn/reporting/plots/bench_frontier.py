"""The picture of `bench`: quality against cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseattn.evaluation.measure_table import measures
from sparseattn.evaluation.result import Evaluation
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots.panels import heading, logarithmic, panel_grid, save, shown, unit
from sparseattn.reporting.replay_tables import TOLERANCE


def frontier(results: Sequence[Evaluation], path: Path) -> None:
    """Draw quality against bytes read and against rows, for every selector of one trace, one point per budget."""
    methods = list(dict.fromkeys(result.label for result in results))
    figure, axes = panel_grid(2, 2, (2.7, 2.7), methods, sharex="col", sharey="row")
    costs, qualities = measures(("bytes_share", "attended")), measures(("mass", "relative_error"))
    for line, quality in zip(axes, qualities, strict=True):
        for axis, cost in zip(line, costs, strict=True):
            for k, method in enumerate(methods):
                of_method = [result for result in results if result.label == method]
                points = sorted((result.mean(cost.key), result.mean(quality.key)) for result in of_method)
                axis.plot(*zip(*points, strict=True), **style(k, method))
            logarithmic(axis, unit(cost))
            axis.grid(alpha=0.3)
            if quality.key == "relative_error":
                axis.axhline(TOLERANCE, color="grey", linestyle="--", linewidth=1)
                axis.set_yscale("log")  # behind the line, as matplotlib warns of a scale that spans one value
                axis.yaxis.set_major_formatter(unit(quality))
                axis.set_xlabel(cost.label)
        line[0].set_ylabel(quality.label)
    first = results[0]
    heading(
        figure,
        f"{shown(first.trace)}: {first.settings['tokens']} tokens, last {first.settings['last']} decoded, sink "
        f"{first.settings['sink']}, window {first.settings['window']}; one point per budget, mean over layers "
        f"and heads",
    )
    name_ends(figure, axes.flat)
    save(figure, path)
