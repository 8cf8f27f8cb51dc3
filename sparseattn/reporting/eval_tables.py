"""The tables of scores that `eval` prints, and its closing lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sparseattn.evaluation.metrics import registry as metrics
from sparseattn.reporting.eval_records import (
    FULL_ROW,
    Record,
    Row,
    by,
    by_column,
    count_prompts,
    in_words,
    mean,
    mean_of,
    rows_of,
    select,
)
from sparseattn.reporting.table import Column, Table

NEAR = 0.02  # of full attention's score: near enough
ANSWERED = 0.8  # by full attention: below it a task says nothing of other methods
GRADED = frozenset({"f1", *metrics.GRADED})  # scorings that right answers do not bring near 1: those compare words


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table for each protocol: a row a method and budget, a column a task and length."""
    return [_table(protocol, of_protocol) for protocol, of_protocol in by(records, "protocol").items()]


def _table(protocol: str, records: Sequence[Record]) -> Table:
    settings, columns = records[0]["settings"], by_column(records)
    with_ruler = {column: _differs_from_ruler(of_column) for column, of_column in columns.items()}
    what = "score in %"
    if any(with_ruler.values()):
        what += ", and beside it RULER's string match, which does not punish wrong values"
    heads = [Column.text("method"), Column("budget"), Column.of("rows"), Column("sparse steps", "{:,.0f}".format)]
    for (task, length), ruler in with_ruler.items():
        heads.append(Column.of("score", task if length is None else f"{task} {length}"))
        if ruler:
            heads.append(Column.of("ruler", "RULER"))
    out = Table(
        f"{settings['model']}, protocol {protocol}: {what}, {count_prompts(records)} prompts; sink "
        f"{settings['sink']}, window {settings['window']}, {settings['dense_layers']} dense layers; rows (tokens) are "
        "those that a query head of a sparse layer reads",
        heads,
    )
    for row in rows_of(records):
        scores = []
        for column, ruler in with_ruler.items():
            of_row = select(columns[column], row)
            scores.append(mean_of(of_row, "score"))
            if ruler:
                scores.append(mean(record["ruler"] for record in of_row if record.get("ruler") is not None))
        of_method = select(records, row)
        out.add(*row, mean_of(of_method, "rows"), sparse_steps(of_method), *scores)
    return out


def sparse_steps(records: Sequence[Record]) -> float | None:
    """Return the tokens of a prompt and its answer that went through the sparse path, times layers, on average; None of
    records of before these were counted."""
    counted = [record["activity"]["sparse_steps"] for record in records if record.get("activity") is not None]
    return mean(counted) if counted else None


def _differs_from_ruler(records: Sequence[Record]) -> bool:
    """Return whether RULER's figure is shown beside the score: several values are asked for, or the two differ."""
    return any(
        record.get("ruler") is not None and (len(record.get("answers", ())) > 1 or record["ruler"] != record["score"])
        for record in records
    )


def marked(records: Sequence[Record], first: Row = FULL_ROW) -> list[dict[str, Any]]:
    """Return the records of one task and length for other programs: with `full_answers`, the mean score of full
    attention, or of what stands `first` in its place, and `uninformative`, whether that is so low that nothing is
    learned from the others (see `cautions`).

    Records without a score stay as they are.
    """
    marks = []
    for record in records:
        of_protocol = [other for other in records if other["protocol"] == record["protocol"]]
        full = mean_of(select(of_protocol, first), "score") if "score" in record else math.nan
        extra = {} if math.isnan(full) else {"full_answers": full, "uninformative": _too_few(record, full)}
        marks.append({**record, **extra})
    return marks


def _too_few(record: Record, full: float) -> bool:
    return full < ANSWERED and record.get("scoring") not in GRADED


def cautions(records: Sequence[Record], first: Row = FULL_ROW) -> list[str]:
    """Return a sentence for each protocol, task and length of which full attention, or what stands `first` in its
    place, answers too few prompts."""
    who, others = ("full attention", "methods") if first == FULL_ROW else (in_words(first), "others")
    sentences = []
    for protocol, of_protocol in by(records, "protocol").items():
        for (task, length), column in by_column(of_protocol).items():
            full = select(column, first)
            if full and _too_few(full[0], mean_of(full, "score")):
                where = task if length is None else f"{task} at {length:,} tokens"
                sentences.append(
                    f"{who} answers {mean_of(full, 'score'):.0%} of {where} (protocol {protocol}, {len(full)} "
                    f"prompts), fewer than {ANSWERED:.0%}: nothing is learned there of the {others}"
                )
    return sentences


def verdicts(records: Sequence[Record]) -> list[str]:
    """Return a closing line for each protocol: the fewest rows at which every task stays near full attention."""
    return [_verdict(protocol, of_protocol) for protocol, of_protocol in by(records, "protocol").items()]


def _verdict(protocol: str, records: Sequence[Record]) -> str:
    grid = {row: select(records, row) for row in rows_of(records)}
    of_full = grid.pop(FULL_ROW, [])
    if not of_full:
        return f"{protocol}: full attention was not measured, so nothing can be compared with it."
    asked = {_prompt(record) for record in of_full}
    full = {task: mean_of(of_task, "score") for task, of_task in by(of_full, "task").items()}
    levels = ", ".join(f"{task} {level:.0%}" for task, level in full.items())
    same = {row: [record for record in of_row if _prompt(record) in asked] for row, of_row in grid.items()}
    whole = {row: of_row for row, of_row in same.items() if {_prompt(record) for record in of_row} == asked}
    if not whole:
        return f"{protocol}: full attention has {levels}. No other method was measured on all of these prompts."
    tasks = {row: by(of_row, "task") for row, of_row in whole.items()}
    lost = {row: max(full[task] - mean_of(tasks[row][task], "score") for task in full) for row in whole}
    rows = {row: mean_of(of_row, "rows") for row, of_row in whole.items()}
    within = [row for row in lost if lost[row] <= NEAR]
    best = min(within, key=rows.__getitem__) if within else min(lost, key=lost.__getitem__)
    loss = f"{100 * max(lost[best], 0.0):.1f} points"
    facts = f"{in_words(best)}: {rows[best]:,.0f} tokens, {loss} lost on the worst task."
    bound = f"{100 * NEAR:.0f} points"
    if within:
        lead = f"Fewest tokens read within {bound} of that on every task:"
    else:
        lead = f"No method stays within {bound} of that on every task. Closest:"
    some = len(grid) - len(whole)
    apart = f" {some} more of the table's rows are not of all of these prompts." if some else ""
    return f"{protocol}: full attention has {levels}. {lead} {facts}{apart}"


def _prompt(record: Record) -> tuple[Any, ...]:
    return record["task"], record.get("length"), record.get("prompt")
