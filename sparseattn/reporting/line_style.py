"""How lines look in pictures: ten colours, markers and dashes, and each line's name at its end instead of a legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Okabe-Ito's and three dark ones more. Of any two, CIELAB's distance is 16 or more, also as seen without red, green or
# blue cones (Machado 2009); markers and dashes repeat the distinction for grey print.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#000000", "#882255", "#663300", "#332288"),
)
# Those on a dark page: of any two, CIELAB's distance is 46 or more, and 22 or more as seen without one kind of cones.
DARK = (
    *("#C0B3FF", "#F68D6D", "#35F8AC", "#BA37B5", "#E6D028"),
    *("#36AFB6", "#FFFFFF", "#E82F74", "#28830C", "#076DF2"),
)
MARKERS = "osD^vPX*<>"
DASHES = ("-", "--")  # solid for the first five lines, dashed for the next five
SIZE = 8  # points of a name
LINE = 1.25 * SIZE / 72  # inches that a line of a name takes
WIDTH = 0.62 * SIZE / 72  # inches of a letter, in the mean
LONG = 16  # letters of a name in one line
BESIDE = 0.25  # inches between the panel and a name, where the leading line runs


def style(number: int, label: str) -> dict[str, Any]:
    """Return how line `number` (from 0) of a picture looks, for matplotlib's `plot`; a look recurs after a hundred."""
    return {
        "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // 5 % 2],
        "label": label,
        "markersize": 5,
        "linewidth": 1.4,
    }


def broken(label: str) -> str:
    """Return a name in two lines if its arguments make it long: `twostage:`, and below `pages=quest,times=4`."""
    name, mark, arguments = label.partition(":")
    return f"{name}:\n{arguments}" if mark and len(label) > LONG else label


def room(labels: Iterable[str]) -> tuple[float, float]:
    """Return the inches that the names of one panel take: width beside it, and the height it needs for all of them."""
    lines = [broken(label).split("\n") for label in labels]
    widest = max((len(line) for lines_of in lines for line in lines_of), default=0)
    return BESIDE + WIDTH * widest, LINE * sum(len(lines_of) for lines_of in lines)


def name_ends(figure: Any, panels: Iterable[Any]) -> None:
    """Write the name of every line right of its panel, at the height of the line's last point or as near as names do
    not overlap; a thin line leads to it from there. Call it last: it goes by the limits of the axes.

    Lines without a label of their own (matplotlib's begin with "_") or without a point in the panel get no name.
    """
    figure.draw_without_rendering()  # from now on panels have their sizes
    for axis in panels:
        ends = []
        for line in axis.lines:
            points = line.get_transform().transform(line.get_xydata())
            seen = [tuple(point) for point in points if axis.bbox.padded(1).contains(*point)]  # NaN is nowhere
            if seen and not str(line.get_label()).startswith("_"):
                ends.append((max(seen), line))
        inches = axis.get_window_extent().height / figure.dpi
        ends.sort(key=lambda end: (end[0][1], end[0][0]))
        names = [broken(str(line.get_label())) for _, line in ends]
        heights = [LINE * (1 + name.count("\n")) / inches for name in names]
        wanted = [axis.transAxes.inverted().transform(point)[1] for point, _ in ends]
        for (point, line), name, y in zip(ends, names, apart(wanted, heights), strict=True):
            axis.annotate(
                name,
                xy=axis.transAxes.inverted().transform(point),
                xycoords="axes fraction",
                xytext=(1 + BESIDE / (axis.get_window_extent().width / figure.dpi), y),
                textcoords="axes fraction",
                color=line.get_color(),
                parse_math=False,  # a name is what it is, with dollar signs too
                fontsize=SIZE,
                linespacing=1.0,
                va="center",
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "linestyle": ":",
                    "linewidth": 0.8,
                    "color": line.get_color(),
                    "relpos": (0, 0.5),
                    "shrinkA": 1,
                    "shrinkB": 4,
                },
            )


def apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return where names go that want to stand at `wanted` (rising).

    They move as little as it takes, in the sum of squares, for none of these heights to overlap, and stay within 0 and
    1 if all have room there.
    """
    offsets, at = [], 0.0
    for i, height in enumerate(heights):
        at += (heights[i - 1] + height) / 2 if i else height / 2
        offsets.append(at)
    groups: list[tuple[float, int]] = []  # sum and number of those that touch, stacked on a common foot
    for place, offset in zip(wanted, offsets, strict=True):
        groups.append((place - offset, 1))
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = (groups[-1][0] + total, groups[-1][1] + count)
    spare = 1 - sum(heights)
    low, high = (0.0, spare) if spare > 0 else (spare / 2, spare / 2)
    feet = [min(max(total / count, low), high) for total, count in groups for _ in range(count)]
    return [foot + offset for foot, offset in zip(feet, offsets, strict=True)]
