"""The tables that `eval` prints of prompts read whole: scores and speed side by side, and differences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from sparseattn.evaluation.intervals import paired
from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.eval_records import (
    Record,
    Row,
    by,
    by_column,
    count_prompts,
    in_words,
    mean_of,
    rows_of,
    select,
)
from sparseattn.reporting.table import Column, Table

ALL = "all"  # depths together
POINTS = Format(1, 100, signed=True)
TOKENS = Column("tokens", lambda length: f"{length:,}", missing="")


def tables(records: Sequence[Record]) -> list[Table]:
    """Return scores, and how long answers took: a row a task and length, columns for each method and budget."""
    return [_scores(records), _speed(records)] if records else []


def verdicts(records: Sequence[Record]) -> list[str]:
    """Return a closing line: what the first one answers, and how much more or less each other one, over all prompts."""
    if not records:
        return []
    first, *others = rows_of(records)
    levels = [f"{task} {mean_of(of_task, 'score'):.0%}" for task, of_task in by(select(records, first), "task").items()]
    sentences = [f"{in_words(first)} has {', '.join(levels)}."]
    for other in others:
        prompts = len(_pairs(records, other, first))
        sentences.append(
            f"{in_words(other)}: {difference(records, other, first)} points from that over {prompts} prompts."
        )
    return [" ".join(sentences)]


def difference(records: Sequence[Record], row: Row, first: Row) -> str:
    """Return the mean score of `row` less that of `first` in points, and the 95 % interval, paired over prompts."""
    pairs = _pairs(records, row, first)
    if not pairs:
        return "-"
    scores, others = zip(*pairs, strict=True)
    low, high = paired(scores, others)
    return f"{POINTS((sum(scores) - sum(others)) / len(pairs))} ({POINTS(low)} to {POINTS(high)})"


def _pairs(records: Sequence[Record], row: Row, first: Row) -> list[tuple[float, float]]:
    """Return the scores of both for each prompt that both answered."""
    of_row, of_first = (
        {(record["task"], record["prompt"]): record["score"] for record in select(records, which)}
        for which in (row, first)
    )
    return [(of_row[prompt], of_first[prompt]) for prompt in of_first if prompt in of_row]


def _scores(records: Sequence[Record]) -> Table:
    first, *others = rows_of(records)
    compared = f"; less or more than {in_words(first)} in points, in brackets 95 % intervals, paired over prompts"
    scores = [Column.of("score", in_words(first))]
    for row in others:
        scores += [Column.of("score", in_words(row)), Column("difference")]
    out = Table(
        f"{records[0]['settings']['model']}, prompts read whole: score in %{compared * bool(others)}",
        [Column.text("task"), TOKENS, Column("depth"), Column.of("prompts"), *scores],
    )
    for (task, length), column in by_column(records).items():
        depths = {record.get("depth"): None for record in column}
        groups = {ALL: column}
        if len(depths) > 1:
            groups |= {f"{depth:g}": [record for record in column if record.get("depth") == depth] for depth in depths}
        for depth, group in groups.items():
            values: list[float | str] = [mean_of(select(group, first), "score")]
            for row in others:
                values += [mean_of(select(group, row), "score"), difference(group, row, first)]
            where = ("", None) if depth != ALL else (task, length)
            out.add(*where, depth if len(depths) > 1 else "", count_prompts(group), *values)
    return out


def _speed(records: Sequence[Record]) -> Table:
    rows = rows_of(records)
    at_once = sorted({record["concurrency"] for record in records if "concurrency" in record})
    load = f", {' or '.join(map(str, at_once))} requests at once" if at_once else ""
    times = [
        column
        for row in rows
        for column in (
            Column.of("first_token_seconds", in_words(row)),
            Column.of("token_milliseconds"),
            Column("rows read %", Format(1, 100)),
        )
    ]
    out = Table(
        f"Seconds to the first token, and behind it milliseconds a token: medians{load}",
        [Column.text("task"), TOKENS, *times],
    )
    for (task, length), column in by_column(records).items():
        values = []
        for row in rows:
            of_row = select(column, row)
            values += [_median(map(first_seconds, of_row)), _median(map(token_milliseconds, of_row)), rows_read(of_row)]
        out.add(task, length, *values)
    return out


def rows_read(records: Sequence[Record]) -> float | None:
    """Return the share of rows that sparse steps read, by the counters when the last of these was answered; None where
    the server does not count."""
    counted = [record["activity"] for record in records if record.get("activity") is not None]
    stored = max((ran["rows_held"] for ran in counted), default=0)
    if not counted:
        return None
    return max(ran["rows_read"] for ran in counted) / stored if stored else 1.0


def first_seconds(record: Record) -> float | None:
    """Return the seconds until the first token; None where none came, or nobody took the time."""
    seconds = record.get("first_token_seconds")
    return None if seconds is None else float(seconds)


def token_milliseconds(record: Record) -> float | None:
    """Return the milliseconds from token to token behind the first; None where there are not two."""
    first, tokens = first_seconds(record), record.get("new_tokens") or 0
    return None if first is None or tokens < 2 else 1000 * (record["seconds"] - first) / (tokens - 1)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
