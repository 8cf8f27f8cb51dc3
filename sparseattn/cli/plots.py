"""The benchmark's pictures; the one file that needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from sparseattn.files import write_atomic
from sparseattn.metrics import Evaluation

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'sparseattn[plots]', or pass --no-figures") from error

# Okabe-Ito: told apart by colour-blind readers; markers repeat the distinction for grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
COUNT = FuncFormatter(lambda value, _: f"{value:g}")
SHARE = FuncFormatter(lambda value, _: f"{100 * value:g}%")


def frontier(results: Sequence[Evaluation], path: Path) -> None:
    """Quality against cost for every selector of one trace, a point a budget, as a PNG."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    methods = list(dict.fromkeys(one.selector for one in results))
    columns = (("bytes_share", "bytes read / bytes of the cache"), ("attended", "rows attended per query head"))
    rows = (("mass", "recovered attention mass"), ("relative_error", "relative output error"))
    for i, (quality, quality_label) in enumerate(rows):
        for j, (cost, cost_label) in enumerate(columns):
            axis = axes[i][j]
            for k, method in enumerate(methods):
                points = sorted((one.mean(cost), one.mean(quality)) for one in results if one.selector == method)
                axis.plot(
                    *zip(*points, strict=True),
                    marker=MARKERS[k % len(MARKERS)],
                    color=COLOURS[k % len(COLOURS)],
                    label=method,
                    markersize=5,
                    linewidth=1.4,
                )
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
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomic(path, buffer.getvalue())
