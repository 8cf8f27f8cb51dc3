"""What `bench` and `recall` show people: tables, closing lines, the names of figures and of lines in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparseattn.core.budget import Budget, Mass, budget_label, parse_budget
from sparseattn.evaluation.by_head import SCANS_ALL
from sparseattn.evaluation.recall_curve import Curve
from sparseattn.evaluation.replay import COUNTED, Evaluation
from sparseattn.reporting.terminal import plain
from sparseattn.selectors.baselines.random import Random
from sparseattn.selectors.baselines.window import Window

TOLERANCE = 0.01
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # mean output errors to stay within, the first that anything reaches
MOST_READ = 0.5  # of the bytes of full attention, for a method to be worth a newcomer's while
WINDOW = Window().label()
CONTROLS = (WINDOW, Random().label())
IN_SHORT = "In short: "  # what `finding` begins with
WIDE = 150  # characters that the table of all measures needs


def table(results: Sequence[Evaluation], per_head: bool, wide: bool) -> Table:
    """A row a measurement of one trace, or a row a head; with `wide` every measure, else those of `SHOWN`."""
    one = results[0]
    settings = one.settings
    heads = "heads"
    if "far" in settings:
        heads = f"the {len(settings['far_heads'])} heads with {settings['far']:g} or more of their weight there"
    out = Table(
        title=(
            f"{plain(one.trace)}: last {settings['last']} of {settings['tokens']} tokens, layers "
            f"{','.join(map(str, one.layers))}, sink {settings['sink']}, window {settings['window']}; weight on "
            f"indexed rows {one.mean('indexed_mass'):.2f}; mean over {heads} (worst head)"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = [c for c in COLUMNS if c[1] not in COUNTED or any(one.mean(COUNTED[c[1]]) > 0 for one in results)]
    by_mass = any(isinstance(parse_budget(one.budget), Mass) for one in results)
    shown = (*SHOWN, "mass", *BY_MASS) if by_mass else SHOWN
    if not wide:
        columns = [next(column for column in COLUMNS if column[0] == name) for name in shown]
    elif not by_mass:
        columns = [column for column in columns if column[0] not in BY_MASS]
    out.add_column("selector", overflow="fold")
    for name in ("budget", *(["layer", "head"] if per_head else []), *(column[0] for column in columns)):
        out.add_column(name, justify="right", no_wrap=True)
    for one in results:
        if not per_head:
            out.add_row(one.label, budget_label(one.budget), *(_cell(one, column, None) for column in columns))
            continue
        for i, layer in enumerate(one.layers):
            for head in range(one.heads["mass"].shape[1]):
                if math.isnan(float(one.heads["mass"][i, head])):
                    continue  # a head that does not look far
                cells = [_cell(one, column, (i, head)) for column in columns]
                out.add_row(one.label, budget_label(one.budget), str(layer), str(head), *cells)
    return out


# Title, measure, digits, factor, and whether the worst head stands beside the mean.
COLUMNS = (
    ("rows", "attended", 0, 1, False),
    ("distinct", "distinct_rows", 0, 1, False),
    ("kept", "kept", 0, 1, True),
    ("oracle", "oracle_kept", 0, 1, False),
    ("promised", "promised", 3, 1, True),
    ("fulfilled", "fulfilled", 2, 1, True),
    ("R@1", "recall@1", 2, 1, False),
    ("R@10", "recall@10", 2, 1, False),
    ("R@100", "recall@100", 2, 1, False),
    ("mass", "mass", 3, 1, True),
    ("recovered", "recovered", 2, 1, True),
    ("lookups", "lookup_hits", 2, 1, False),
    ("error %", "relative_error", 1, 100, True),
    ("scan %", "scanned_share", 1, 100, False),
    ("rows %", "attended_share", 1, 100, False),
    ("bytes %", "bytes_share", 1, 100, False),
)
SHOWN = (
    "rows",
    "bytes %",
    "error %",
    "recovered",
)  # without --wide: what is read, and what that gives, in 80 characters
BY_MASS = ("kept", "oracle", "promised", "fulfilled")  # what there is where a budget is a mass


def _cell(one: Evaluation, column: tuple[str, str, int, int, bool], at: tuple[int, int] | None) -> str:
    _, measure, digits, factor, worst = column

    def show(value: float) -> str:
        if math.isnan(value):
            return "-" if measure in COUNTED else "?"  # none was there; the selector does not say
        return f"{value * factor:.{digits}f}"

    if at is not None:
        return show(float(one.heads[measure][at]))
    return show(one.mean(measure)) + (f" ({show(one.worst(measure))})" if worst else "")


class Measured(Protocol):
    """What closing lines speak of: an `Evaluation`, or the record of one."""

    @property
    def trace(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def budget(self) -> Budget: ...
    def mean(self, measure: str) -> float: ...
    def worst(self, measure: str) -> float: ...


def _pairs(results: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """Method and budget -> what was measured of them, a trace each."""
    pairs: dict[tuple[str, str], list[Measured]] = {}
    for one in results:
        pairs.setdefault((one.label, budget_label(one.budget)), []).append(one)
    return pairs


def verdict(results: Sequence[Measured]) -> str:
    """The closing line: the fewest bytes whose mean output error stays within 1 % on every trace."""
    pairs = _pairs(results)
    scored = []
    for (method, budget), ones in pairs.items():
        error = max(one.mean("relative_error") for one in ones)
        worst = max(one.worst("relative_error") for one in ones)
        read = sum(one.mean("bytes_share") for one in ones) / len(ones)
        if math.isnan(read):
            continue  # it does not say what it reads to choose, so it cannot be called cheap
        oracle = " (it scores every key)" if min(one.mean("scanned_share") for one in ones) > SCANS_ALL else ""
        facts = f"error {error:.2%}, worst head {worst:.1%}, {read:.1%} of the cache's bytes read"
        scored.append((error, read, f"{method} at budget {budget}{oracle}: {facts}."))
    if not scored:
        return "No selector reports what it reads, so none can be called the cheapest."
    within = [entry for entry in scored if entry[0] <= TOLERANCE and entry[1] < 1]
    if within:
        best = min(within, key=lambda entry: entry[1])[2]
        return f"Cheapest within {TOLERANCE:.0%} mean output error on every trace: {best}"
    return (
        f"Nothing measured stays within {TOLERANCE:.0%} mean output error on every trace and reads less than full "
        f"attention does; nearest: {min(scored)[2]}"
    )


def finding(results: Sequence[Measured]) -> str | None:
    """In a sentence for newcomers: how near the best method comes to full attention, and how near the bare window.

    The best is the one that reads least of those that stay, on every trace, within the first of `STEPS` that any
    reaches, or the nearest where none does; controls, methods that score every key, and such as read more than half of
    what full attention does, do not count. None where there is none.
    """
    pairs = _pairs(results)
    errors = {pair: [one.mean("relative_error") for one in ones] for pair, ones in pairs.items()}
    read = {pair: sum(one.mean("bytes_share") for one in ones) / len(ones) for pair, ones in pairs.items()}
    sparse = [
        pair
        for pair, ones in pairs.items()
        if read[pair] <= MOST_READ
        and pair[0] not in CONTROLS
        and not any(map(math.isnan, errors[pair]))
        and min(one.mean("scanned_share") for one in ones) <= SCANS_ALL
    ]
    if not sparse:
        return None
    most = {pair: max(errors[pair]) for pair in sparse}
    step = next((step for step in STEPS if min(most.values()) <= step), min(most.values()))
    best = min((pair for pair in sparse if most[pair] <= step), key=read.__getitem__)
    traces = [plain(one.trace) for one in pairs[best]]

    def off(pair: tuple[str, str]) -> str:
        percent = [100 * min(errors[pair]), 100 * max(errors[pair])]
        low, high = (f"{error:.0f}" if error >= 10 else f"{error:.2g}" for error in percent)
        return f"{low}%" if low == high else f"{low} to {high}%"

    said = (
        f"{IN_SHORT}{best[0]} at budget {best[1]} reads {read[best]:.0%} of the cache's bytes, and the output of "
        f"attention is off by {off(best)} (mean over heads; on {', '.join(traces)})"
    )
    bare = next((pair for pair in pairs if pair[0] == WINDOW), None)
    if bare is None:
        return f"{said}."
    return f"{said}; reading only the first and last rows, {read[bare]:.1%}, it is off by {off(bare)}."


def figure_names(traces: Sequence[str], what: str = "frontier") -> list[str]:
    """`frontier-NAME.png` for the name of each trace, numbered where names repeat."""
    names: list[str] = []
    for trace in traces:
        base = f"{what}-{Path(trace).stem}"
        same = sum(name == f"{base}.png" or name.startswith(f"{base}-") for name in names)
        names.append(f"{base}-{same + 1}.png" if same else f"{base}.png")
    return names


@dataclass(frozen=True, eq=False)
class Column:
    """One source of queries in `recall`: label of a selector -> its curve, for its queries and for the control."""

    title: str
    asked: Mapping[str, Curve]
    control: Mapping[str, Curve]


LEVEL = 0.95  # the recall to reach
LEVELS = (0.90, LEVEL)
SHARES = (0.03, 0.10)


def recall_table(title: str, curves: Mapping[str, Curve]) -> Table:
    """A row a selector: what recall takes, and what a share of the keys gives."""
    one = next(iter(curves.values()))
    k, points = one.settings["k"], [point for curve in curves.values() for point in curve.points]
    heads = points[0].heads["recall"].numel()
    among = f", mean over {heads} heads (worst head)" if heads > 1 else ""
    out = Table(
        title=f"{title}: recall@{k}, {one.settings['queries']} queries{among}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    out.add_column("selector")
    for name in (
        *(f"scan % for {level:.2f}" for level in LEVELS),
        *(f"R at {share:.0%}" for share in SHARES),
        f"ms at {LEVEL}",
        "build s",
        "index B/key",
    ):
        out.add_column(name, justify="right")
    for label, curve in curves.items():
        seconds = curve.seconds_at(LEVEL)
        out.add_row(
            label,
            *(_reached(curve, level) for level in LEVELS),
            *(_found(curve, share, heads > 1) for share in SHARES),
            "-" if math.isnan(seconds) else f"{1000 * seconds:.3g}",
            f"{curve.build_seconds:.3g}",
            f"{curve.index_bytes:,.0f}",
        )
    return out


def _reached(curve: Curve, level: float) -> str:
    """The share scanned where `level` is reached, in percent: at most that of the least setting, or beyond the last."""
    share, points = curve.scanned_at(level), curve.points
    scanned = [point.mean("scanned_share") for point in points]
    if not math.isnan(share):
        return ("≤" if share == min(scanned) and curve.knob is not None else "") + _percent(share)
    return "never" if curve.knob is None else f">{_percent(scanned[-1])}"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "?"  # the selector does not say
    return f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.1f}"


def _found(curve: Curve, share: float, worst: bool) -> str:
    mean = curve.recall_at(share)
    if math.isnan(mean):
        return "-"  # no setting scans so little
    return f"{mean:.2f}" + (f" ({curve.recall_at(share, worst=True):.2f})" if worst else "")


def recall_verdict(column: Column) -> str:
    """What every selector scans to reach `LEVEL` for one source's queries."""
    parts = []
    for label, curve in column.asked.items():
        share, last = curve.scanned_at(LEVEL), curve.points[-1]
        if math.isnan(share):
            rest = f"{last.mean('recall'):.2f} at {_percent(last.mean('scanned_share'))}%"
            parts.append(f"{label} {'never' if curve.knob is None else 'more'} ({rest})")
        else:
            parts.append(f"{label} {_percent(share)}%")
    return f"{column.title}: of the keys, recall {LEVEL} takes {', '.join(parts)}."
