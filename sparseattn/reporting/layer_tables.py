"""What `bench` shows of methods at equal rows and at equal bytes: one table of all, or by layer and head."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from sparseattn.core.budget import Budget, Mass, budget_label, parse_budget
from sparseattn.evaluation.by_head import MISSED, Comparison, NothingToCompare, Reading, at_bytes, at_rows
from sparseattn.evaluation.measures import FRACTION, measure
from sparseattn.evaluation.replay import Evaluation
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import plain

ROWS = 256  # the budget whose rows to compare at, where it was measured and none is named
BYTES = 0.10  # of the cache: what Quest with pages of 16 reads for 256 of 8,192 rows


def chosen_rows(asked: str | None, budgets: Sequence[Budget]) -> Budget:
    """The budget whose rows to compare at: the one asked for, else `ROWS`, else the middle one of those measured.

    Raises:
        ValueError: one asked for that is not measured.
    """
    rows = [budget for budget in budgets if not isinstance(budget, Mass)]  # a mass takes other rows at every head
    if asked is None:
        return ROWS if ROWS in rows else (rows or budgets)[len(rows or budgets) // 2]
    budget = parse_budget(asked)
    if budget not in rows:
        listed = ", ".join(map(budget_label, rows)) or "none of which is rows"
        raise ValueError(f"--rows is one of the budgets of --budget, {listed}, got {asked}")
    return budget


def chosen_bytes(asked: str | None) -> float:
    """The share of the cache's bytes to compare at, `BYTES` if none is asked for; ValueError for what is no share."""
    try:
        share = BYTES if asked is None else parse_budget(asked)
    except ValueError:
        share = None
    if not isinstance(share, float):
        raise ValueError(f"--bytes is a share of the cache's bytes, such as 10%, got {asked}")
    return share


def compared(
    results: Sequence[Evaluation], rows: Budget, share: float, lacking: Mapping[str, str]
) -> tuple[list[Comparison], list[str]]:
    """One trace's methods at equal rows and at equal bytes, where there are any; and why not, where there are none.

    `lacking`: label -> why a method could not be measured on this trace at all.
    """
    made, said = [], []
    for compare in (functools.partial(at_rows, results, rows), functools.partial(at_bytes, results, share)):
        try:
            one = compare()
        except NothingToCompare as error:
            said.append(plain(f"{results[0].trace}: {error}."))
        else:
            made.append(replace(one, left_out={**lacking, **one.left_out}))
    return made, said


def condition(one: Comparison) -> str:
    """Such as "324 rows attended, those of budget 256" or "10% of the cache's bytes"."""
    if one.equal == "bytes":
        return f"{budget_label(one.at)} of the cache's bytes"
    rows = "" if one.attended is None else f"{one.attended:.0f} rows attended, those of "
    return f"{rows}budget {budget_label(one.at)}"


def overview(one: Comparison) -> Table:
    """Return a table of every method, that with the least output error first."""
    keys = ("attended", "bytes_share", "scanned_share", "recall@10", "recovered", "relative_error")
    out = Table(
        f"{_where(one)}: every method, that with the least error first",
        [
            Column.text("selector"),
            Column("budget", wrap=False),
            *(Column.of(key, wrap=False) for key in keys),
        ],
    )
    for label, reading in sorted(one.readings.items(), key=lambda item: item[1].mean("relative_error")):
        out.add(label, _budgets(reading), *map(reading.mean, keys))
    return out


def tables(one: Comparison) -> list[Table]:
    """Return recovered share and output error, a row a layer and a column a method, and how alike their heads are."""
    heads = (
        f"of {one.count()} heads those missed (less than {MISSED:g} recovered), and the rank correlation (Spearman) of "
        f"heads by what is recovered"
    )
    return [
        _by_layer(one, f"{_where(one)}: share recovered of the weight on indexed rows, by layer", "recovered"),
        _by_layer(one, f"{_where(one)}: output error %, by layer", "relative_error"),
        _heads(one, f"{_where(one)}: {heads}"),
    ]


def _where(one: Comparison) -> str:
    return f"{_trace(one)}, {condition(one)}"


def _trace(one: Comparison) -> str:
    return plain(next(iter(one.readings.values())).low.trace)


def _by_layer(one: Comparison, title: str, key: str) -> Table:
    out = Table(
        title,
        [Column.text("layer", wrap=False), *(Column(label) for label in one.readings)],
    )
    readings = one.readings.values()
    values = [reading.layers(key).tolist() for reading in readings]
    for i, layer in enumerate(one.layers):
        out.add(layer, *(measure(key)(column[i]) for column in values))
    out.rule()
    out.add("mean", *(measure(key)(reading.mean(key)) for reading in readings))
    for cost in map(measure, ("bytes_share", "attended")):
        out.add(cost.head, *(cost(reading.mean(cost.key)) for reading in readings))
    out.add("budget", *map(_budgets, readings))
    return out


def _budgets(reading: Reading) -> str:
    return "+".join(map(budget_label, reading.budgets))


def _heads(one: Comparison, title: str) -> Table:
    alike = [Column(label, FRACTION) for label in one.readings]
    out = Table(title, [Column.text("selector"), Column("missed"), *alike])
    missed, correlation = one.missed(), one.correlation().tolist()
    for i, label in enumerate(one.readings):
        out.add(label, int(missed[i, i]), *correlation[i])
    return out


def left_out(one: Comparison, but: Mapping[str, str]) -> list[str]:
    """A sentence for each method that is not compared under this condition, but for those named in `but`."""
    return [plain(f"{_where(one)}: {label} {why}.") for label, why in one.left_out.items() if label not in but]


def sentences(one: Comparison) -> list[str]:
    """Which heads fail: missed by a rival and by others, who wins where, and how alike the orders of heads are.

    Rivals do not score every key. The one whose heads are counted is the best of those that miss any.
    """
    out = []
    labels, rivals, total = list(one.readings), one.rivals, one.count()
    both = one.missed()
    if rivals:
        # The best that misses any: one that finds nearly all by reading half of the cache says nothing about heads.
        missing = [label for label in rivals if both[labels.index(label), labels.index(label)]] or rivals
        best = max(missing, key=lambda label: one.readings[label].mean("recovered"))
        i = labels.index(best)
        gone = int(both[i, i])
        others = [f"{label} {int(both[i, j])}" for j, label in enumerate(labels) if j != i]
        rest = f"; of these miss too: {', '.join(others)}" if gone and others else ""
        out.append(f"{best} recovers less than {MISSED:.0%} at {gone} of {total} heads{rest}.")
    if len(rivals) > 1:
        layers = _layers_of(one.winners())
        parts = []
        for label, count in sorted(one.wins().items(), key=lambda item: -item[1]):
            where = f" and in layers {', '.join(map(str, layers[label]))}" if label in layers else ""
            parts += [f"{label} at {count}{where}"] if count or where else []
        out.append(f"Of the methods that do not score every key, heads where one recovers most: {'; '.join(parts)}.")
    ranks = one.correlation().tolist()
    pairs = [
        (ranks[i][j], f"{labels[i]} and {labels[j]}")
        for i, j in combinations(range(len(labels)), 2)
        if not math.isnan(ranks[i][j])
    ]
    if pairs:
        low, high = (f"{value:.2f} ({names})" for value, names in (min(pairs), max(pairs)))
        span = low if len(pairs) == 1 else f"{low} to {high}"
        out.append(f"Methods rank the heads by what they recover alike to a correlation of {span}.")
    return [plain(f"{_where(one)}: {sentence}") for sentence in out]


def _layers_of(winners: Mapping[int, str]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for layer, label in winners.items():
        out.setdefault(label, []).append(layer)
    return out
