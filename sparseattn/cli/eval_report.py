"""What `eval` shows people: tables of scores, closing lines, and what its figures draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparseattn.tasks.run import FORCED, FULL

Record: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "tuple[str, str | None]"  # method and budget

WIDE = 150  # columns that the whole table needs
MOST_NATS = 700  # beyond them a perplexity is more than a float holds
NEAR = 0.02  # of full attention's score, or in nats of its log-likelihood: near enough


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Methods and budgets in the order in which they were measured."""
    return list(dict.fromkeys((one["method"], one["budget"]) for one in records))


def select(records: Sequence[Record], row: Row) -> list[Record]:
    """Those of one method and budget."""
    return [one for one in records if (one["method"], one["budget"]) == row]


def by_column(records: Sequence[Record]) -> dict[tuple[str, int | None], list[Record]]:
    """Records apart by task and length, in the order of their first; prompts of the user's have no length."""
    groups: dict[tuple[str, int | None], list[Record]] = {}
    for one in records:
        groups.setdefault((one["task"], one.get("length")), []).append(one)
    return groups


def value(records: Iterable[Record]) -> float:
    """Mean score, or perplexity over all tokens; NaN of nothing."""
    held = list(records)
    if not held:
        return math.nan
    if "nll" in held[0]:
        tokens = sum(one["scored_tokens"] for one in held)
        nats = sum(one["nll"] * one["scored_tokens"] for one in held) / tokens
        return math.exp(nats) if nats < MOST_NATS else math.inf
    return mean(one["score"] for one in held)


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
    forced = protocol == FORCED
    beside = {column: ruler_column(mine) for column, mine in columns.items()}
    what = "perplexity" if forced else "score in %"
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
            cells.append(_cell(value(mine), 3) if forced else _cell(100 * value(mine)))
            if ruler:
                cells.append(_cell(100 * mean(one["ruler"] for one in mine if one.get("ruler") is not None)))
        method, budget = row
        read = mean(one["rows"] for one in select(records, row))
        out.add_row(method, budget or "-", f"{read:,.0f}", *cells)
    return out


def _cell(number: float, digits: int = 0) -> str:
    return "-" if math.isnan(number) else f"{number:.{digits}f}"


def verdicts(records: Sequence[Record]) -> list[str]:
    """A closing line for each protocol: the fewest rows at which every task stays near full attention."""
    return [_verdict(protocol, mine) for protocol, mine in by(records, "protocol").items()]


def _verdict(protocol: str, records: Sequence[Record]) -> str:
    forced = protocol == FORCED
    grid = {row: by(select(records, row), "task") for row in rows_of(records)}
    full = {task: value(mine) for task, mine in grid.pop((FULL, None)).items()}
    levels = ", ".join(f"{task} {level:.3f}" if forced else f"{task} {level:.0%}" for task, level in full.items())
    lost = {row: max(_loss(value(mine[task]), full[task], forced) for task in full) for row, mine in grid.items()}
    rows = {row: mean(one["rows"] for ours in mine.values() for one in ours) for row, mine in grid.items()}
    near = [row for row in lost if lost[row] <= NEAR]
    best = min(near, key=rows.__getitem__) if near else min(lost, key=lost.__getitem__)
    name = best[0] if best[1] is None else f"{best[0]} at budget {best[1]}"
    loss = f"{max(lost[best], 0.0):.3f} nats" if forced else f"{100 * max(lost[best], 0.0):.1f} points"
    facts = f"{name}: {rows[best]:,.0f} rows, {loss} lost on the task that loses most."
    bound = f"{NEAR} nats" if forced else f"{100 * NEAR:.0f} points"
    if near:
        lead = f"Fewest rows within {bound} of that on every task:"
    else:
        lead = f"Nothing measured stays within {bound} of that on every task; nearest:"
    return f"{protocol}: full attention has {levels}. {lead} {facts}"


def _loss(got: float, full: float, forced: bool) -> float:
    """Points of the score, or nats a token."""
    return math.log(got) - math.log(full) if forced else full - got


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
