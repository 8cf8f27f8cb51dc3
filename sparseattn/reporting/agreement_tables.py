"""The tables of agreement with full attention that `eval` prints, with intervals over windows, and its findings."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sparseattn.evaluation.intervals import student
from sparseattn.evaluation.measure_table import measure
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting.eval_records import (
    Record,
    Row,
    by,
    count_prompts,
    in_words,
    known_mean,
    mean_of,
    rows_of,
    select,
)
from sparseattn.reporting.table import Column, Table

NEAR = 0.02  # nats a token of divergence from full attention: near enough
MOST_NATS = 700  # beyond them a perplexity is more than a float holds
WITH_INTERVAL = ("kl", "same_top", "nll_difference")
# Measures whose interval would reach beyond what there can be -> the least and the largest value.
ENDS = {"kl": (0.0, math.inf), "same_top": (0.0, 1.0), "bytes_share": (0.0, 1.0)}


def panels(records: Sequence[Record]) -> dict[tuple[str, str, int], list[Record]]:
    """Return records by text, its kind and the windows' length."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["text"], record["kind"], record["length"]), []).append(record)
    return groups


def title(place: tuple[str, str, int], records: Sequence[Record]) -> str:
    """Return what was measured on one text at one length."""
    text, kind, length = place
    count = count_prompts(records)
    windows = f"{count} windows" if count > 1 else "1 window, so no interval"
    return f"{text} ({kind}), {length:,} tokens, {windows}"


def bytes_share(records: Sequence[Record]) -> float:
    """Return bytes read over bytes stored; NaN where one is not known."""
    share = known_mean(records, "bytes_share")
    return math.nan if share is None else share


def perplexity(records: Sequence[Record]) -> float:
    """Return the perplexity over all tokens of the records."""
    tokens = sum(record["scored_tokens"] for record in records)
    nats = sum(record["nll"] * record["scored_tokens"] for record in records) / tokens
    return math.exp(nats) if nats < MOST_NATS else math.inf


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table for each text and length: a row a method, set of layers and budget."""
    return [_table(place, of_place) for place, of_place in panels(records).items()]


def _table(place: tuple[str, str, int], records: Sequence[Record]) -> Table:
    settings = records[0]["settings"]
    out = Table(
        f"{settings['model']}, agreement with full attention: {title(place, records)}, the last "
        f"{records[0]['scored_tokens']} tokens of each; sink {settings['sink']}, window {settings['window']}, "
        f"{settings['dense_layers']} dense layers. KL and NLL are in nats per token, with 95 % intervals over windows "
        "in brackets; rows (tokens) per query head and bytes are those that a sparse layer reads",
        [
            Column.text("method"),
            Column("budget"),
            Column.of("rows"),
            Column.of("bytes_share", missing="?"),
            *(Column(measure(key).head) for key in WITH_INTERVAL),
            Column.of("perplexity"),
        ],
    )
    for row in rows_of(records):
        of_row = select(records, row)
        cells = [_cell(of_row, key) for key in WITH_INTERVAL]
        out.add(*row, mean_of(of_row, "rows"), bytes_share(of_row), *cells, perplexity(of_row))
    return out


def _cell(records: Sequence[Record], key: str) -> str:
    values = [record[key] for record in records]
    compared_with = records[0]["method"] == FULL
    return with_interval(key, sum(values) / len(values), None if compared_with else student(values))


def with_interval(key: str, mean: float, interval: Sequence[float] | None) -> str:
    """Return the mean of a measure and in brackets its interval, within the values that there can be."""
    show, (least, most) = measure(key), ENDS.get(key, (-math.inf, math.inf))
    if interval is None:
        return show(mean)
    return f"{show(mean)} ({show(max(interval[0], least))} to {show(min(interval[1], most))})"


def verdicts(records: Sequence[Record]) -> list[str]:
    """Return a finding for each length and set of layers: what stays near full attention for the fewest rows and
    bytes."""
    findings = []
    for length, of_length in by(records, "length").items():
        texts = list(by(of_length, "text"))
        windows = count_prompts(of_length)
        where = f"{', '.join(texts)}; {windows} window{'s' * (windows > 1)}"
        sparse = [{"layers": None, **record} for record in of_length if record["method"] != FULL]
        for layers, of_layers in by(sparse, "layers").items():
            sets = "" if layers is None else f", sparse in layers {layers}"
            unnamed = [{**record, "layers": None} for record in of_layers]  # the sentence names them once
            finding = _finding(unnamed, {_window(record) for record in of_length}, len(texts))
            findings.append(f"agreement at {length:,} tokens{sets} ({where}): {finding}")
    return findings


def _window(record: Record) -> tuple[str, str | None]:
    return record["text"], record.get("prompt")


def _finding(records: Sequence[Record], windows: Collection[tuple[str, str | None]], texts: int) -> str:
    every_row = {row: select(records, row) for row in rows_of(records)}
    grid = {row: of_row for row, of_row in every_row.items() if {_window(record) for record in of_row} == windows}
    if not grid:
        return "no method was measured on every window."
    worst = {
        row: max(mean_of(of_text, "kl") for of_text in by(of_row, "text").values()) for row, of_row in grid.items()
    }
    rows = {row: mean_of(of_row, "rows") for row, of_row in grid.items()}
    shares = {row: bytes_share(of_row) for row, of_row in grid.items()}
    within = [row for row in grid if worst[row] <= NEAR]
    least = min(within or grid, key=(rows if within else worst).__getitem__)
    every = " on every text" if texts > 1 else ""
    if within:
        finding = f"fewest tokens read within {NEAR} nats per token of full attention{every}: "
    else:
        finding = f"no method stays within {NEAR} nats per token of full attention{every}. Closest: "
    finding += _facts(least, grid, worst, rows, texts)
    known = [row for row in within if not math.isnan(shares[row])]
    if known:
        cheapest = min(known, key=shares.__getitem__)
        which = "the same" if cheapest == least else in_words(cheapest)
        finding += f" Fewest bytes: {which}, {shares[cheapest]:.0%} of the cache of a sparse layer."
    farthest = max(grid, key=worst.__getitem__)
    if farthest != least:
        finding += f" Farthest: {_facts(farthest, grid, worst, rows, texts)}"
    some = len(every_row) - len(grid)
    return finding + (f" {some} more of the tables' rows are not of all windows." if some else "")


def _facts(
    row: Row, grid: Mapping[Row, Sequence[Record]], worst: Mapping[Row, float], rows: Mapping[Row, float], texts: int
) -> str:
    most = " on the worst text" if texts > 1 else ""
    return (
        f"{in_words(row)}, {rows[row]:,.0f} tokens, {worst[row]:.3f} nats{most}, top-1 agreement "
        f"{mean_of(grid[row], 'same_top'):.0%}."
    )
