"""What `bench` shows of methods at equal rows and at equal bytes: one table of all, or by layer and head."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from sparseattn.core.budget import Budget, budget_label
from sparseattn.evaluation.by_head import MISSED, Comparison, NothingToCompare, Reading, at_bytes, at_rows
from sparseattn.evaluation.measure_table import FRACTION, measure
from sparseattn.evaluation.result import Evaluation
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import plain


def compared(
    results: Sequence[Evaluation], rows: Budget, share: float, lacking: Mapping[str, str]
) -> tuple[list[Comparison], list[str]]:
    """Return one trace's methods at equal rows and at equal bytes, and sentences of why there is no such comparison.

    `lacking`: label -> why a method could not be measured on this trace at all.
    """
    made, missing = [], []
    for compare in (functools.partial(at_rows, results, rows), functools.partial(at_bytes, results, share)):
        try:
            comparison = compare()
        except NothingToCompare as error:
            missing.append(plain(f"{results[0].trace}: {error}."))
        else:
            made.append(replace(comparison, left_out={**lacking, **comparison.left_out}))
    return made, missing


def condition(comparison: Comparison) -> str:
    """Return what is equal, such as "324 tokens attended (budget 256)" or "10% of the cache's bytes"."""
    if comparison.equal == "bytes":
        return f"{budget_label(comparison.at)} of the cache's bytes"
    budget = f"budget {budget_label(comparison.at)}"
    return budget if comparison.attended is None else f"{comparison.attended:.0f} tokens attended ({budget})"


def overview(comparison: Comparison) -> Table:
    """Return a table of every method, that with the least output error first."""
    keys = ("attended", "bytes_share", "scanned_share", "recall@10", "recovered", "relative_error")
    out = Table(
        f"{_where(comparison)}: all methods, smallest error first",
        [
            Column.text("selector"),
            Column("budget", wrap=False),
            *(Column.of(key, wrap=False) for key in keys),
        ],
    )
    for label, reading in sorted(comparison.readings.items(), key=lambda item: item[1].mean("relative_error")):
        out.add(label, _budgets(reading), *map(reading.mean, keys))
    return out


def tables(comparison: Comparison) -> list[Table]:
    """Return recovered share and output error, a row a layer and a column a method, and how alike their heads are."""
    heads = (
        f"how many of {comparison.count()} heads a method misses (recovers less than {MISSED:g}), and the rank "
        f"correlation (Spearman) of what two methods recover by head"
    )
    return [
        _by_layer(
            comparison,
            f"{_where(comparison)}: share of the attention on indexed tokens that is recovered, by layer",
            "recovered",
        ),
        _by_layer(comparison, f"{_where(comparison)}: output error %, by layer", "relative_error"),
        _heads(comparison, f"{_where(comparison)}: {heads}"),
    ]


def _where(comparison: Comparison) -> str:
    return f"{_trace(comparison)}, {condition(comparison)}"


def _trace(comparison: Comparison) -> str:
    return plain(next(iter(comparison.readings.values())).low.trace)


def _by_layer(comparison: Comparison, title: str, key: str) -> Table:
    out = Table(
        title,
        [Column.text("layer", wrap=False), *(Column(label) for label in comparison.readings)],
    )
    readings = comparison.readings.values()
    values = [reading.layers(key).tolist() for reading in readings]
    for i, layer in enumerate(comparison.layers):
        out.add(layer, *(measure(key)(column[i]) for column in values))
    out.rule()
    out.add("mean", *(measure(key)(reading.mean(key)) for reading in readings))
    for cost in map(measure, ("bytes_share", "attended")):
        out.add(cost.head, *(cost(reading.mean(cost.key)) for reading in readings))
    out.add("budget", *map(_budgets, readings))
    return out


def _budgets(reading: Reading) -> str:
    return "+".join(map(budget_label, reading.budgets))


def _heads(comparison: Comparison, title: str) -> Table:
    alike = [Column(label, FRACTION) for label in comparison.readings]
    out = Table(title, [Column.text("selector"), Column("missed"), *alike])
    missed, correlation = comparison.missed(), comparison.correlation().tolist()
    for i, label in enumerate(comparison.readings):
        out.add(label, int(missed[i, i]), *correlation[i])
    return out


def left_out(comparison: Comparison, but: Mapping[str, str]) -> list[str]:
    """Return a sentence for each method that is not compared under this condition, but for those named in `but`."""
    return [
        plain(f"{_where(comparison)}: {label} {why}.") for label, why in comparison.left_out.items() if label not in but
    ]


def sentences(comparison: Comparison) -> list[str]:
    """Say which heads fail: missed by a rival and by others, who wins where, and how alike the orders of heads are.

    Rivals do not score every key. The one whose heads are counted is the best of those that miss any.
    """
    facts = [_missed(comparison), _won(comparison), _alike(comparison)]
    return [plain(f"{_where(comparison)}: {fact}") for fact in facts if fact is not None]


def _missed(comparison: Comparison) -> str | None:
    labels, rivals, both = list(comparison.readings), comparison.rivals, comparison.missed()
    if not rivals:
        return None
    # The best that misses any: one that finds nearly all by reading half of the cache says nothing about heads.
    missing = [label for label in rivals if both[labels.index(label), labels.index(label)]] or rivals
    best = max(missing, key=lambda label: comparison.readings[label].mean("recovered"))
    i = labels.index(best)
    missed = int(both[i, i])
    others = [f"{label} {int(both[i, j])}" for j, label in enumerate(labels) if j != i]
    rest = f". Of these heads, other methods miss: {', '.join(others)}" if missed and others else ""
    return f"{best} recovers less than {MISSED:.0%} in {missed} of {comparison.count()} heads{rest}."


def _won(comparison: Comparison) -> str | None:
    if len(comparison.rivals) < 2:
        return None
    layers = _layers_of(comparison.winners())
    parts = []
    for label, count in sorted(comparison.wins().items(), key=lambda item: -item[1]):
        where = f" and in layers {', '.join(map(str, layers[label]))}" if label in layers else ""
        parts += [f"{label} in {count}{where}"] if count or where else []
    return f"Heads in which a method recovers most, of those that do not score every key: {'; '.join(parts)}."


def _alike(comparison: Comparison) -> str | None:
    ranks = comparison.correlation().tolist()
    pairs = [
        (ranks[i][j], f"{first} and {second}")
        for (i, first), (j, second) in combinations(enumerate(comparison.readings), 2)
        if not math.isnan(ranks[i][j])
    ]
    if not pairs:
        return None
    low, high = (f"{value:.2f} ({names})" for value, names in (min(pairs), max(pairs)))
    span = low if len(pairs) == 1 else f"{low} to {high}"
    return f"The rank correlation between methods of what they recover by head is {span}."


def _layers_of(winners: Mapping[int, str]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for layer, label in winners.items():
        out.setdefault(label, []).append(layer)
    return out
