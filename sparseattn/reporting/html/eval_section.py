"""The section of `eval.jsonl`: what a model answers with each method, where it finds needles, how near it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.evaluation.tasks.agreement import AGREEMENT as TASK
from sparseattn.evaluation.tasks.compared import FORCED
from sparseattn.evaluation.tasks.records import WHOLE, check_record
from sparseattn.reporting import agreement_tables, eval_tables, server_tables
from sparseattn.reporting.eval_records import FULL_ROW, by_place, known_mean, method_of, rows_of, select
from sparseattn.reporting.html.folders import Record
from sparseattn.reporting.html.shared_fields import FACTS, ORIGIN, distinct, models_of
from sparseattn.reporting.html.views import Axis, Heat, Lines, Section, Subject, View, axis, column, cost, text
from sparseattn.reporting.table import Table
from sparseattn.utils.json_fields import FieldError, Maybe, Number, Object, Text

FILE = "eval.jsonl"

COST = tuple(map(cost, ("rows", "bytes_share")))
SCORE = (axis("score"),)
AGREEMENT = (axis("kl", log=True), axis("same_top"), axis("nll_difference"))


FIELDS = Object({"budget": Maybe(Text()), "settings": FACTS}, {"concurrency": Number(1, whole=True), **ORIGIN})


def check(record: Record, before: Sequence[Record]) -> None:
    """Raise FieldError where a line is no record of `eval`; `before` are those above it."""
    check_record(record)
    FIELDS.check(record)
    if (record["protocol"] == FORCED) != (record["task"] == TASK):
        raise FieldError(f"protocol is {FORCED} where task is {TASK} and nowhere else, got {record['protocol']!r:.60}")
    needed = "nll" if record["task"] == TASK else "score"
    if needed not in record:
        raise FieldError(f"{needed} is missing")


def section(records: Sequence[Record]) -> Section:
    """Return scores against rows, maps of depth and length, agreement against rows, and tables."""
    scored = [record for record in records if record["protocol"] not in (FORCED, WHOLE)]
    forced = [record for record in records if record["protocol"] == FORCED]
    whole = [record for record in records if record["protocol"] == WHOLE]
    first = rows_of(whole)[0] if whole else FULL_ROW
    findings = eval_tables.verdicts(scored) + agreement_tables.verdicts(forced) + server_tables.verdicts(whole)
    findings += eval_tables.cautions(scored) + eval_tables.cautions(whole, first)
    views: list[View] = []
    if forced:
        views += [_lines("Agreement with full attention", "text", forced, AGREEMENT), _table(forced, AGREEMENT)]
    if scored:
        views.append(_lines("Task scores", "task", scored, SCORE))
    maps = by_place([*scored, *whole])
    if maps:
        views.append(_needles(maps))
    if graded := [*scored, *whole]:
        views.append(_table(graded, SCORE))
    methods = dict.fromkeys(method_of(record) for record in records)
    facets = [record.get("text") if record["protocol"] == FORCED else record["task"] for record in records]
    about = Subject(models_of(records), distinct(records, "length"), list(dict.fromkeys(filter(None, facets))))
    return Section("answers", "Model output", findings, views, tuple(methods), about)


def _facet(record: Mapping[str, Any]) -> str:
    length = "" if record.get("length") is None else f", {record['length']:,} tokens"
    if record["protocol"] == FORCED:
        return f"{record['text']} ({record['kind']}){length}"
    return f"{record['task']}{length}, {record['protocol']}"


def _groups(records: Sequence[Record]) -> dict[tuple[str, str, str | None], list[Record]]:
    """Return records by what is one point: facet, method and budget."""
    groups: dict[tuple[str, str, str | None], list[Record]] = {}
    for record in records:
        groups.setdefault((_facet(record), method_of(record), record["budget"]), []).append(record)
    return groups


def _lines(title: str, facet: str, records: Sequence[Record], quality: Sequence[Axis]) -> Lines:
    points = [
        {
            "method": method,
            "facet": where,
            "at": f"{'no budget' if budget is None else f'budget {budget}'}, {len(group)} prompts",
            "values": {measure.key: known_mean(group, measure.key) for measure in (*COST, *quality)},
        }
        for (where, method, budget), group in _groups(records).items()
    ]
    note = "One point per budget: the mean over prompts. A logarithmic axis has no place for a value of 0."
    return Lines(title, facet, COST, quality, points, note)


def _needles(maps: Mapping[str, Sequence[Mapping[str, Any]]]) -> Heat:
    panels = []
    for group in maps.values():
        lengths, depths = ([*sorted({record[name] for record in group})] for name in ("length", "depth"))
        for row in rows_of(group):
            of_row = select(group, row)
            cells = [
                [
                    known_mean([record for record in of_row if (record["length"], record["depth"]) == (n, d)], "score")
                    for n in lengths
                ]
                for d in depths
            ]
            task = f"{group[0]['task']}, {group[0]['protocol']}"
            choice = {"task": task, "budget": "all" if row[1] is None else row[1]}
            panels.append(
                {"method": row[0], "choice": choice, "columns": lengths, "rows": depths, "values": {"score": cells}}
            )
    note = (
        "Rows are the needle's depth (0 is the beginning of the text), columns the length of the text. Methods without "
        "a budget are shown beside every budget."
    )
    return Heat("Where needles are found", "tokens", "depth", ("task", "budget"), SCORE, panels, False, note)


def _table(records: Sequence[Record], quality: Sequence[Axis]) -> Table:
    keys = ("rows", "bytes_share", *(measure.key for measure in quality))
    heads = {"same_top": "top-1", "nll_difference": "NLL increase"}
    columns = [
        *map(text, ("task", "method", "budget")),
        column("prompts"),
        *(column(key, heads.get(key)) for key in keys),
    ]
    rows: list[list[Any]] = [
        [where, method, budget, len(group), *(known_mean(group, key) for key in keys)]
        for (where, method, budget), group in _groups(records).items()
    ]
    title = "Every mean agreement" if quality is AGREEMENT else "Every mean score"
    return Table(title, columns, rows, row_head=1)
