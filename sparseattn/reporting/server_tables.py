"""What `eval` shows people of prompts that were handed over whole: scores and speed side by side, and differences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparseattn.evaluation.intervals import paired
from sparseattn.reporting.eval_tables import Record, Row, at, by, by_column, rows_of, select, value

ALL = "all"  # depths together


def tables(records: Sequence[Record]) -> list[Table]:
    """Scores, and how long answers took: a row a task and length, a column each of what was asked."""
    return [_scores(records), _speed(records)] if records else []


def verdicts(records: Sequence[Record]) -> list[str]:
    """A closing line: what the first one answers, and how much more or less each other one, over all prompts."""
    if not records:
        return []
    first, *others = rows_of(records)
    levels = [f"{task} {value(mine):.0%}" for task, mine in by(select(records, first), "task").items()]
    said = [f"{at(first)} has {', '.join(levels)}."]
    for other in others:
        prompts = len(_pairs(records, other, first))
        said.append(f"{at(other)}: {difference(records, other, first)} points from that over {prompts} prompts.")
    return [" ".join(said)]


def difference(records: Sequence[Record], row: Row, first: Row) -> str:
    """Mean score of `row` less that of `first` in points, and the 95 % interval, paired over prompts."""
    pairs = _pairs(records, row, first)
    if not pairs:
        return "-"
    ours, theirs = zip(*pairs, strict=True)
    low, high = paired(ours, theirs)
    return f"{100 * (sum(ours) - sum(theirs)) / len(pairs):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _pairs(records: Sequence[Record], row: Row, first: Row) -> list[tuple[float, float]]:
    """Scores of both for each prompt that both answered."""
    theirs = {(one["task"], one["prompt"]): one["score"] for one in select(records, first)}
    mine = {(one["task"], one["prompt"]): one["score"] for one in select(records, row)}
    return [(mine[prompt], theirs[prompt]) for prompt in theirs if prompt in mine]


def _scores(records: Sequence[Record]) -> Table:
    first, *others = rows_of(records)
    out = _table(
        f"{records[0]['settings']['model']}, prompts read whole: score in %"
        + (f"; less or more than {at(first)} in points, in brackets 95 % intervals, paired over prompts" * bool(others))
    )
    for name in ("task", "tokens", "depth", "prompts"):
        out.add_column(name, justify="left" if name == "task" else "right")
    for row in (first, *others):
        out.add_column(at(row), justify="right")
        if row != first:
            out.add_column("difference", justify="right")
    for (task, length), column in by_column(records).items():
        depths = {one.get("depth"): None for one in column}
        groups = {ALL: column}
        if len(depths) > 1:
            groups |= {f"{depth:g}": [one for one in column if one.get("depth") == depth] for depth in depths}
        for depth, mine in groups.items():
            cells = [f"{100 * value(select(mine, first)):.0f}"]
            for row in others:
                cells += [f"{100 * value(select(mine, row)):.0f}", difference(mine, row, first)]
            prompts = len({one["prompt"] for one in mine})
            where = "" if depth != ALL else task
            out.add_row(where, _tokens(length) if where else "", depth if len(depths) > 1 else "", f"{prompts}", *cells)
    return out


def _speed(records: Sequence[Record]) -> Table:
    rows = rows_of(records)
    at_once = sorted({one["concurrency"] for one in records if "concurrency" in one})
    load = f", {' or '.join(map(str, at_once))} requests at once" if at_once else ""
    out = _table(f"Seconds to the first token, and behind it milliseconds a token: medians{load}")
    for name in ("task", "tokens"):
        out.add_column(name, justify="left" if name == "task" else "right")
    for row in rows:
        out.add_column(at(row), justify="right")
        out.add_column("ms", justify="right")
    for (task, length), column in by_column(records).items():
        cells = []
        for row in rows:
            mine = select(column, row)
            cells += [_median(map(first_seconds, mine), 2), _median(map(token_milliseconds, mine), 1)]
        out.add_row(task, _tokens(length), *cells)
    return out


def first_seconds(one: Record) -> float | None:
    """Until the first token; None where none came, or nobody took the time."""
    seconds = one.get("first_token_seconds")
    return None if seconds is None else float(seconds)


def token_milliseconds(one: Record) -> float | None:
    """From token to token behind the first; None where there are not two."""
    first, tokens = first_seconds(one), one.get("new_tokens") or 0
    return None if first is None or tokens < 2 else 1000 * (one["seconds"] - first) / (tokens - 1)


def _median(values: Iterable[float | None], digits: int) -> str:
    held = [one for one in values if one is not None]
    return f"{statistics.median(held):.{digits}f}" if held else "-"


def _tokens(length: int | None) -> str:
    return "" if length is None else f"{length:,}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
