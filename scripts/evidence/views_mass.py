"""Views of budgets by mass: what methods promise and hold, top-p pruning, and vAttention's bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked
from scripts.evidence.views_traces import setting, spec
from sparseattn.core.budget import Mass, parse_budget

Record: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "Mapping[str, Any]"

ORACLE = "Exact"
NEAR = 0.01  # of a mass: what is held within it of what is promised is called as promised


def asked(one: Row) -> float:
    """The share of the attention that a measurement was asked for."""
    budget = parse_budget(one["budget"])
    if not isinstance(budget, Mass):
        raise LookupError(f"the record has a budget that is no mass: {one['budget']}")
    return budget.share


def _name(label: str) -> str:
    """A method as one types it, without the artefact that was fitted to it."""
    return spec(label).removeprefix("fitted:inner=").partition(",artefact=")[0].strip("[]")


def _table(found: Sequence[Row]) -> str:
    lines = [
        [
            f"{ticked(_name(one['label']))}, {asked(one):g}",
            f"{one['mean.promised']:.3f}",
            f"{one['mean.mass']:.3f} ({one['worst.mass']:.3f})",
            percent(one["mean.fulfilled"]),
            f"{one['mean.kept']:,.0f} ({one['worst.kept']:,.0f})",
            f"{one['mean.oracle_kept']:,.0f}",
            percent(one["mean.bytes_share"], 1),
            percent(one["mean.relative_error"], 1),
        ]
        for one in found
    ]
    head = [
        *("method, mass asked for", "promised", "held (worst head)", "steps that hold it", "rows (worst head)"),
        *("fewest rows", "bytes read", "error"),
    ]
    return table(head, lines)


def _setting(found: Sequence[Row]) -> str:
    one = found[0]
    return text(
        f"`{one['trace.model']}`, the text {one['trace']}: {setting(one)}. Rows are those chosen, beyond sink and "
        f"window; the fewest are those of the largest true weights, for each query head apart."
    )


def estimates(record: Record) -> str:
    """Mass promised and held, and rows kept, a row a method and mass."""
    found = rows(record)
    return parts(_setting(found), _table(found))


def findings(record: Record) -> str:
    """Who holds what is promised, and who takes the fewest rows to hold what is asked for."""
    found = rows(record)
    items = []
    for mass in sorted({asked(one) for one in found}):
        mine = [one for one in found if asked(one) == mass]
        true = [one for one in mine if one["mean.mass"] >= mass]
        held = [ticked(_name(one["label"])) for one in true]
        over = [one for one in true if one["label"] != ORACLE]
        words = f"Asked for {percent(mass)}: in the mean {_listed(held) or 'no method'} held it"
        if over:
            best = min(over, key=lambda one: one["mean.bytes_share"])
            words += (
                f"; of those, but for the oracle, {ticked(_name(best['label']))} read the fewest bytes, with "
                f"{best['mean.kept'] / max(best['mean.oracle_kept'], 1):.2f} times the fewest rows"
            )
        items.append(f"{words}.")
    short = max(found, key=lambda one: one["mean.promised"] - one["mean.mass"])
    items.append(
        f"The widest gap: {ticked(_name(short['label']))} promised {short['mean.promised']:.3f} and held "
        f"{short['mean.mass']:.3f}."
    )
    return bullets(*items)


def calibrated(record: Record) -> str:
    """The same of estimates that were fitted on another text, and how many promises they keep."""
    found = rows(record)
    kept = [one for one in found if abs(one["mean.promised"] - one["mean.mass"]) <= NEAR]
    words = text(
        f"In {len(kept)} of {len(found)} cases what is held is within {NEAR:g} of what is promised, in the mean over "
        f"heads and tokens."
    )
    return parts(_setting(found), words, _table(found))


def pruned(record: Record) -> str:
    """Top-p: rows, mass held, bytes and error, a row a form."""
    found = rows(record)
    lines = [
        [
            ticked(spec(one["label"])),
            f"{one['mean.kept']:,.0f} ({one['worst.kept']:,.0f})",
            f"{one['mean.mass']:.3f} ({one['worst.mass']:.3f})",
            f"{one['mean.recovered']:.3f}",
            percent(one["mean.bytes_share"], 1),
            percent(one["mean.relative_error"], 1),
        ]
        for one in found
    ]
    head = ["method", "rows (worst head)", "mass held (worst head)", "recovered", "bytes read", "error"]
    one = found[0]
    return parts(text(f"`{one['trace.model']}`, the text {one['trace']}: {setting(one)}."), table(head, lines))


# vAttention


def guarantee(record: Record) -> str:
    """How often the bound is missed, a row a setting."""
    lines = [
        [
            ticked(one["selector"]) + ("" if one["budget"] == "all" else f", {one['budget']} rows"),
            percent(one["delta"]),
            percent(one["missed"], 1),
            percent(one["missed_worst"], 1),
            percent(one["missed_output"], 1),
            percent(one["denominator_error"], 1),
            percent(one["relative_error"], 1),
            f"{one['kept']:,.0f}",
            percent(one["bytes_share"], 1),
        ]
        for one in record["results"]
    ]
    head = [
        *("setting", "delta", "denominator off by more than epsilon", "the worst head", "output off by more"),
        *("error of the denominator", "of the output", "rows", "bytes read"),
    ]
    words = text(
        f"`{record['model']}`, the text {record['trace']}: {record['tokens']:,} tokens, of which the last "
        f"{record['last']} were decoded, with sink {record['sink']} and window {record['window']}; "
        f"{record['steps']:,} steps of a head, in layers {', '.join(map(str, record['layers']))}."
    )
    return parts(words, table(head, lines))


def guarantee_findings(record: Record) -> str:
    """Whether the bound held as often as promised, where nothing voids it."""
    free = [one for one in record["results"] if one["budget"] == "all"]
    held, missed = ([one for one in free if (one["missed"] <= one["delta"]) == good] for good in (True, False))
    items = [f"The bound held as often as promised in {len(held)} of {len(free)} settings without a cap."]
    if missed:
        items.append(f"It was missed more often by {_listed(_shares(missed))}.")
    if capped := [one for one in record["results"] if one["budget"] != "all"]:
        items.append(f"Capped, so that it may be void, it was missed by {_listed(_shares(capped))}.")
    return bullets(*items)


def _shares(found: Iterable[Row]) -> list[str]:
    return [f"{ticked(one['selector'])} at {percent(one['missed'], 1)} of the steps" for one in found]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
