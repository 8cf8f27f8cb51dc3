"""Figures of several panels, their axes, and saving them; the one file that needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseattn.evaluation.measure_table import Measure
from sparseattn.reporting.line_style import room
from sparseattn.reporting.plots.themed_svg import PAPER, themed
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
THOUSANDS = FuncFormatter(lambda value, _: f"{value / 1024:.3g}k")  # of 1,024


def unit(measure: Measure) -> FuncFormatter:
    """Return how an axis of a measure writes its numbers."""
    return SHARE if measure.unit == "share" else COUNT


def shown(text: str) -> str:
    """Return text of a file or an option as it is: no control characters, and no formula where it has dollar signs."""
    return plain(text).replace("$", r"\$")


def panel_grid(rows: int, columns: int, size: tuple[float, float], labels: Sequence[str], **shared: Any) -> Any:
    """Return a figure and its panels `[rows,columns]`, of `size` inches at least, with room for the names of lines."""
    beside, height = room(labels)
    wide, high = max(6.5, 0.6 + columns * (size[0] + beside)), 0.7 + rows * max(size[1], 0.5 + height)
    figure = Figure(figsize=(wide, high), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def bare_grid(count: int, columns: int, size: tuple[float, float], **shared: Any) -> Any:
    """Return a figure of `size` inches and its panels `[rows,columns]`, of which `count` are used."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(-(-count // columns), columns, squeeze=False, **shared)
    hide(axes.flat[count:])
    return figure, axes


def hide(axes: Any) -> None:
    """Leave panels empty."""
    for axis in axes:
        axis.set_axis_off()


def logarithmic(axis: Any, unit: FuncFormatter) -> None:
    """Make the x-axis logarithmic, with few numbers."""
    axis.set_xscale("log")
    few_numbers(axis.xaxis, unit)


def few_numbers(side: Any, unit: FuncFormatter) -> None:
    """Label a logarithmic axis (a panel's `xaxis` or `yaxis`) at 1, 2 and 5."""
    side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    numbers(side, unit)


def numbers(side: Any, unit: FuncFormatter) -> None:
    """Label an axis (a panel's `xaxis` or `yaxis`) at its major ticks alone."""
    side.set_major_formatter(unit)
    side.set_minor_formatter(NullFormatter())


def shares_up(axis: Any) -> None:
    """Make the y-axis one of shares, from 0 to 100 %, with a little room."""
    axis.set_ylim(-0.03, 1.03)
    axis.yaxis.set_major_formatter(SHARE)


def interval(axis: Any, x: float, around: tuple[float, float], colour: str) -> None:
    """Draw an interval as a thin bar."""
    axis.vlines(x, *around, color=colour, linewidth=1, alpha=0.7)


def heading(figure: Figure, text: str) -> None:
    """Write what a figure shows above it; `text` is as `shown` makes it."""
    figure.suptitle(text, fontsize=10)


def colour_bar(figure: Figure, axes: Any, colours: str, label: str) -> Normalize:
    """Draw the scale of shares from 0 to 1 in a map of colours, and return what maps them to it."""
    scale = Normalize(0.0, 1.0)
    figure.colorbar(ScalarMappable(scale, colours), ax=axes, label=label, format=SHARE)
    return scale


def save(figure: Figure, path: Path) -> None:
    """Write a figure, there whole or not at all: a PNG, or where the path says so an SVG that follows the theme.

    An SVG of the same figure is the same to the byte, and its text is text.
    """
    buffer = io.BytesIO()
    if path.suffix == ".svg":
        figure.set_facecolor(PAPER[0])
        for axis in figure.axes:
            axis.set_facecolor("none")
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparseattn"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        write_atomic(path, themed(buffer.getvalue().decode()).encode())
    else:
        figure.savefig(buffer, format="png", dpi=130)
        write_atomic(path, buffer.getvalue())
