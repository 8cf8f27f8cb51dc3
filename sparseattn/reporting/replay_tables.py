"""The tables of `bench`, its closing lines, and the names of its figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sparseattn.core.budget import Budget, Mass, budget_label, parse_budget
from sparseattn.evaluation.measure_table import measure
from sparseattn.evaluation.result import Evaluation
from sparseattn.evaluation.step_measures import COUNTED
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import plain
from sparseattn.selectors.baselines.random import Random
from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.registry import parsed

TOLERANCE = 0.01
STEPS = (0.01, 0.02, 0.05, 0.1)  # mean output errors to stay within, the first that anything reaches
MOST_READ = 0.5  # of the bytes of full attention, for a method to be worth a newcomer's while
WINDOW = Window().label()
CONTROLS = (WINDOW, Random().label())
IN_SHORT = "In short: "  # what `finding` begins with


# The measures of the table with --wide, in its order.
SHOWN = ("attended", "bytes_share", "relative_error", "recovered")  # without it: what 80 characters hold
BY_MASS = ("kept", "oracle_kept", "promised", "fulfilled")  # what there is where a budget is a mass
EVERY = (
    *("attended", "distinct_rows", *BY_MASS, "recall@1", "recall@10", "recall@100", "mass", "recovered"),
    *("lookup_hits", "relative_error", "scanned_share", "attended_share", "bytes_share"),
)
WITH_WORST = ("kept", "promised", "fulfilled", "mass", "recovered", "relative_error")  # whose worst head is shown too


def table(results: Sequence[Evaluation], per_head: bool, wide: bool) -> Table:
    """Return a table of one trace: a row a measurement, or a row a head; with `wide` every measure, else `SHOWN`."""
    first = results[0]
    settings = first.settings
    heads, each = "heads", "each query head"
    if "far" in settings:
        heads = f"the {len(settings['far_heads'])} heads with {settings['far']:g} or more of their weight there"
        each = f"each of {heads}"
    title = (
        f"{first.trace}: last {settings['last']} of {settings['tokens']} tokens, layers "
        f"{','.join(map(str, first.layers))}, sink {settings['sink']}, window {settings['window']}; weight on "
        f"indexed rows {first.mean('indexed_mass'):.2f}; " + (each if per_head else f"mean over {heads} (worst head)")
    )
    shown = _shown(results, wide)
    out = Table(
        title,
        [
            Column.text("selector"),
            *(Column(name, wrap=False) for name in ("budget", *(["layer", "head"] if per_head else []))),
            *(Column(measure(key).head, wrap=False) for key in shown),
        ],
    )
    for result in results:
        budget = budget_label(result.budget)
        if not per_head:
            out.add(result.label, budget, *(_cell(key, result.mean(key), result.worst(key)) for key in shown))
            continue
        for i, layer in enumerate(result.layers):
            for head in range(result.heads["mass"].shape[1]):
                if not math.isnan(float(result.heads["mass"][i, head])):  # else a head that does not look far
                    values = [float(result.heads[key][i, head]) for key in shown]
                    out.add(result.label, budget, layer, head, *map(_cell, shown, values))
    return out


def _shown(results: Sequence[Evaluation], wide: bool) -> Sequence[str]:
    by_mass = any(isinstance(parse_budget(result.budget), Mass) for result in results)
    if not wide:
        return (*SHOWN, "mass", *BY_MASS) if by_mass else SHOWN
    some = [key for key in EVERY if key not in COUNTED or any(result.mean(COUNTED[key]) > 0 for result in results)]
    return some if by_mass else [key for key in some if key not in BY_MASS]


def _cell(key: str, value: float, worst: float | None = None) -> str:
    """Return a value, and in brackets the worst head's where it is shown."""
    missing = "-" if key in COUNTED else "?"  # none was there; the selector does not say
    known = measure(key)
    beside = f" ({known(worst, missing)})" if worst is not None and key in WITH_WORST else ""
    return known(value, missing) + beside


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
    """Return method and budget -> what was measured of them, a trace each."""
    pairs: dict[tuple[str, str], list[Measured]] = {}
    for result in results:
        pairs.setdefault((result.label, budget_label(result.budget)), []).append(result)
    return pairs


def _on_every_trace(results: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """Return `_pairs` without those that some trace lacks: a mean over other traces is not to be compared."""
    traces = {result.trace for result in results}
    return {pair: group for pair, group in _pairs(results).items() if {result.trace for result in group} == traces}


def verdict(results: Sequence[Measured]) -> str:
    """Return the closing line: the fewest bytes whose mean output error stays within 1 % on every trace."""
    scored = []
    whole = _on_every_trace(results)
    if not whole:
        return "No method was measured on every trace, so none can be called the cheapest."
    for (method, budget), group in whole.items():
        error = max(result.mean("relative_error") for result in group)
        worst = max(result.worst("relative_error") for result in group)
        read = sum(result.mean("bytes_share") for result in group) / len(group)
        if math.isnan(read):
            continue  # it does not say what it reads to choose, so it cannot be called cheap
        facts = f"error {error:.2%}, worst head {worst:.1%}, {read:.1%} of the cache's bytes read"
        scored.append((error, read, f"{method} at budget {budget}: {facts}."))
    if not scored:
        return "No selector reports what it reads, so none can be called the cheapest."
    within = [entry for entry in scored if entry[0] <= TOLERANCE and entry[1] < 1]
    if within:
        best = min(within, key=lambda entry: entry[1])[2]
        return f"Cheapest within {TOLERANCE:.0%} mean output error on every trace: {best}"
    return (
        f"No method stays within {TOLERANCE:.0%} mean output error on every trace and reads less than full attention. "
        f"Closest: {min(scored)[2]}"
    )


def finding(results: Sequence[Measured]) -> str | None:
    """Say in a sentence for newcomers how near the best method comes to full attention, and how near the bare window.

    The best reads the fewest bytes of those that stay, on every trace, within the first of `STEPS` that any reaches.
    It reads at most `MOST_READ` of what full attention does, and no other method beats it, on any trace, in error and
    in bytes. The sentence names no method if none stays within the last of `STEPS`. None if nothing reads so little.
    """
    pairs = _on_every_trace(results)
    read = {pair: sum(result.mean("bytes_share") for result in group) / len(group) for pair, group in pairs.items()}
    errors = {pair: [result.mean("relative_error") for result in group] for pair, group in pairs.items()}
    sparse = [pair for pair in pairs if read[pair] <= MOST_READ and pair[0] not in CONTROLS]
    if not sparse:
        return None
    beaten = {
        pair
        for pair in sparse
        if any(_beats(other, result) for result in pairs[pair] for group in pairs.values() for other in group)
    }
    most = {pair: max(errors[pair]) for pair in sparse if pair not in beaten and not any(map(math.isnan, errors[pair]))}
    step = next((step for step in STEPS if any(error <= step for error in most.values())), None)
    if step is None:
        return (
            f"{IN_SHORT}no method that reads at most {MOST_READ:.0%} of the cache's bytes keeps the output of "
            f"attention within {STEPS[-1]:.0%} of full attention's."
        )
    best = min((pair for pair in most if most[pair] <= step), key=read.__getitem__)
    traces = [plain(result.trace) for result in pairs[best]]
    sentence = (
        f"{IN_SHORT}{best[0]} at budget {best[1]} reads {read[best]:.0%} of the cache's bytes, and the output of "
        f"attention is off by {_off(errors[best])} (mean over heads; on {', '.join(traces)})"
    )
    bare = next((pair for pair in pairs if pair[0] == WINDOW), None)
    if bare is None:
        return f"{sentence}."
    off = _off(errors[bare])
    return f"{sentence}. Reading only the first and the most recent tokens ({read[bare]:.1%}) is off by {off}."


def own_methods(results: Sequence[Measured]) -> list[str]:
    """Say of each class of the user's own (`module:Class`) where it stands, at the budget with its least error."""
    every, whole = _pairs(results), _on_every_trace(results)
    labels = dict.fromkeys(label for label, _ in every if _is_own(label))
    measured = {label for label, _ in whole}
    return [_standing(label, whole if label in measured else every) for label in labels]


def _is_own(label: str) -> bool:
    try:
        name = parsed(label)[0]
    except ValueError:  # of a record that names no method of this version
        return False
    return ":" in name and not name.startswith("sparseattn:")


def _standing(label: str, pairs: Mapping[tuple[str, str], Sequence[Measured]]) -> str:
    """Say what a method costs and misses, and which other reads less and misses less on every trace."""

    def errors(pair: tuple[str, str]) -> list[float]:
        return [result.mean("relative_error") for result in pairs[pair]]

    def read(pair: tuple[str, str]) -> float:
        return sum(result.mean("bytes_share") for result in pairs[pair]) / len(pairs[pair])

    nearest = min((pair for pair in pairs if pair[0] == label), key=lambda pair: max(errors(pair)))
    fact = f"{label} at budget {nearest[1]} is off by {_off(errors(nearest))}"
    if math.isnan(read(nearest)):
        return f"{fact}; it has no scan, which says what it reads, so it is not compared by bytes."
    better = [
        pair
        for pair in pairs
        if pair[0] not in (label, *CONTROLS)
        and all(any(_beats(x, result) for x in pairs[pair]) for result in pairs[nearest])
    ]
    fact += f" and reads {read(nearest):.0%} of the cache's bytes"
    if not better:
        return f"{fact}; no other method here reads less and is closer."
    rival = min(better, key=read)
    return f"{fact}; {rival[0]} at budget {rival[1]} beats it in both ({_off(errors(rival))}, {read(rival):.0%})."


def _off(errors: Sequence[float]) -> str:
    """Return the least and the largest of errors, in percent."""
    percent = [100 * min(errors), 100 * max(errors)]
    low, high = (f"{error:.0f}" if error >= 10 else f"{error:.2g}" for error in percent)
    return f"{low}%" if low == high else f"{low} to {high}%"


def _beats(other: Measured, own_result: Measured) -> bool:
    """Whether `other` is at most as far off on the same trace and reads at most as much, and less of one of the two."""
    theirs, own = ([of.mean(key) for key in ("relative_error", "bytes_share")] for of in (other, own_result))
    return other.trace == own_result.trace and theirs != own and all(a <= b for a, b in zip(theirs, own, strict=True))


def figure_names(traces: Sequence[str], what: str = "frontier") -> list[str]:
    """Return `frontier-NAME.png` for the name of each trace, numbered where names repeat."""
    own = [f"{what}-{Path(trace).name}" for trace in traces]
    names: list[str] = []
    for base in own:
        numbered = (base if n == 1 else f"{base}-{n}" for n in itertools.count(1))
        names.append(next(name for name in numbered if name not in names and (name == base or name not in own)))
    return [f"{name}.png" for name in names]
