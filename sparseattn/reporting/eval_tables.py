"""What `eval` shows people: tables of scores, closing lines, and what its figures draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparseattn.evaluation.tasks.compared import FULL

Record: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "tuple[str, str | None]"  # method, with its layers if not all, and budget

WIDE = 150  # columns that the whole table needs
FULL_ROW: Row = (FULL, None)
NEAR = 0.02  # of full attention's score: near enough
ANSWERED = 0.8  # by full attention: below it a task says nothing of other methods
GRADED = ("f1",)  # scorings that right answers do not bring near 1: those compare words


def named(record: Record) -> str:
    """The method, and where it is not all of them, the layers in which it chooses."""
    return f"{record['method']}, layers {record['layers']}" if record.get("layers") else str(record["method"])


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Methods and budgets in the order in which they were measured."""
    return list(dict.fromkeys((named(one), one["budget"]) for one in records))


def select(records: Sequence[Record], row: Row) -> list[Record]:
    """Those of one method and budget."""
    return [one for one in records if (named(one), one["budget"]) == row]


def by_column(records: Sequence[Record]) -> dict[tuple[str, int | None], list[Record]]:
    """Records apart by task and length, in the order of their first; prompts of the user's have no length."""
    groups: dict[tuple[str, int | None], list[Record]] = {}
    for one in records:
        groups.setdefault((one["task"], one.get("length")), []).append(one)
    return groups


def value(records: Iterable[Record]) -> float:
    """Mean score; NaN of nothing."""
    return mean(one["score"] for one in records)


def mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held) if held else math.nan


def ruler_column(records: Sequence[Record]) -> bool:
    """Whether RULER's figure is shown beside the score: several values were asked for, or the two differ."""
    return any(
        one.get("ruler") is not None and (len(one.get("answers", ())) > 1 or one["ruler"] != one["score"])
        for one in records
    )


def tables(records: Sequence[Record]) -> list[Table]:
    """One for each protocol: a row a method and budget, a column a task and length."""
    return [_table(protocol, mine) for protocol, mine in by(records, "protocol").items()]


def by(records: Sequence[Record], name: str) -> dict[Any, list[Record]]:
    """Records apart by a field, in the order of its first occurrence."""
    groups: dict[Any, list[Record]] = {}
    for one in records:
        groups.setdefault(one[name], []).append(one)
    return groups


def _table(protocol: str, records: Sequence[Record]) -> Table:
    settings, columns = records[0]["settings"], by_column(records)
    prompts = len({one["prompt"] for one in records})
    beside = {column: ruler_column(mine) for column, mine in columns.items()}
    what = "score in %"
    if any(beside.values()):
        what += ", beside it RULER's string match, to which values that were not asked for cost nothing"
    out = Table(
        title=(
            f"{settings['model']}, protocol {protocol}: {what}, {prompts} prompts; sink {settings['sink']}, window "
            f"{settings['window']}, {settings['dense_layers']} dense layers; rows read per query head of a sparse layer"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    out.add_column("method")
    for name in ("budget", "rows"):
        out.add_column(name, justify="right")
    for (task, length), ruler in beside.items():
        out.add_column(task if length is None else f"{task} {length}", justify="right")
        if ruler:
            out.add_column("RULER", justify="right")
    for row in rows_of(records):
        cells = []
        for column, ruler in beside.items():
            mine = select(columns[column], row)
            cells.append(_cell(100 * value(mine)))
            if ruler:
                cells.append(_cell(100 * mean(one["ruler"] for one in mine if one.get("ruler") is not None)))
        method, budget = row
        read = mean(one["rows"] for one in select(records, row))
        out.add_row(method, budget or "-", f"{read:,.0f}", *cells)
    return out


def _cell(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.0f}"


def marked(records: Sequence[Record], first: Row = FULL_ROW) -> list[dict[str, Any]]:
    """The records of one task and length, for other programs: with `full_answers`, the mean score of full attention, or
    of what stands `first` in its place, and `uninformative`, whether that is so low that nothing is learned from the
    others (see `cautions`).

    Records without a score stay as they are.
    """
    made = []
    for one in records:
        mine = [other for other in records if other["protocol"] == one["protocol"]]
        full = value(select(mine, first)) if "score" in one else math.nan
        extra = {} if math.isnan(full) else {"full_answers": full, "uninformative": _too_few(one, full)}
        made.append({**one, **extra})
    return made


def _too_few(one: Record, full: float) -> bool:
    return full < ANSWERED and one.get("scoring") not in GRADED


def cautions(records: Sequence[Record], first: Row = FULL_ROW) -> list[str]:
    """A sentence for each protocol, task and length of which full attention, or what stands `first` in its place,
    answers too few prompts."""
    who, others = ("full attention", "methods") if first == FULL_ROW else (at(first), "others")
    said = []
    for protocol, mine in by(records, "protocol").items():
        for (task, length), column in by_column(mine).items():
            full = select(column, first)
            if full and _too_few(full[0], value(full)):
                where = task if length is None else f"{task} at {length:,} tokens"
                said.append(
                    f"{who} answers {value(full):.0%} of {where} (protocol {protocol}, {len(full)} prompts), "
                    f"fewer than {ANSWERED:.0%}: nothing is learned there of the {others}"
                )
    return said


def verdicts(records: Sequence[Record]) -> list[str]:
    """A closing line for each protocol: the fewest rows at which every task stays near full attention."""
    return [_verdict(protocol, mine) for protocol, mine in by(records, "protocol").items()]


def _verdict(protocol: str, records: Sequence[Record]) -> str:
    grid = {row: by(select(records, row), "task") for row in rows_of(records)}
    full = {task: value(mine) for task, mine in grid.pop(FULL_ROW, {}).items()}
    if not full:
        return f"{protocol}: full attention was not asked, so that nothing tells how near to it others come."
    levels = ", ".join(f"{task} {level:.0%}" for task, level in full.items())
    grid = {row: mine for row, mine in grid.items() if full.keys() <= mine.keys()}
    if not grid:
        return f"{protocol}: full attention has {levels}. Nothing else was asked every task."
    lost = {row: max(full[task] - value(mine[task]) for task in full) for row, mine in grid.items()}
    rows = {row: mean(one["rows"] for ours in mine.values() for one in ours) for row, mine in grid.items()}
    near = [row for row in lost if lost[row] <= NEAR]
    best = min(near, key=rows.__getitem__) if near else min(lost, key=lost.__getitem__)
    loss = f"{100 * max(lost[best], 0.0):.1f} points"
    facts = f"{at(best)}: {rows[best]:,.0f} rows, {loss} lost on the task that loses most."
    bound = f"{100 * NEAR:.0f} points"
    if near:
        lead = f"Fewest rows within {bound} of that on every task:"
    else:
        lead = f"Nothing measured stays within {bound} of that on every task; nearest:"
    return f"{protocol}: full attention has {levels}. {lead} {facts}"


def at(row: Row) -> str:
    """A method and its budget in words."""
    return row[0] if row[1] is None else f"{row[0]} at budget {row[1]}"


def grids(records: Sequence[Record]) -> dict[str, list[Record]]:
    """What a heat map of length and depth can show, by the map's name: tasks with a needle, at more than one place."""
    found = {
        f"{task}-{protocol}": ours
        for protocol, mine in by(records, "protocol").items()
        for task, ours in by(mine, "task").items()
    }
    placed = {name: [one for one in mine if _place(one)] for name, mine in found.items()}
    return {name: mine for name, mine in placed.items() if len({_place(one) for one in mine}) > 1}


def _place(one: Record) -> tuple[int, float] | None:
    return None if one.get("depth") is None or one.get("length") is None else (one["length"], one["depth"])
