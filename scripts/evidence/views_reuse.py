"""Views of choices that are read again: over steps (FreeKV) and over layers (Kascade)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked
from scripts.evidence.views_traces import Measured, setting, spec

Record: TypeAlias = "Mapping[str, Any]"

USUAL = {"FreeKV": "Quest", "Kascade": "Exact(group='softmax')"}  # the inner method where a label names none
ENOUGH = 0.95  # of what the inner method recovers
PLACES = ("artefact",)  # arguments that say where a file was, which is no part of a name


def _called(label: str) -> tuple[str, dict[str, ast.expr]]:
    """The class and the arguments of a label."""
    one = ast.parse(label, mode="eval").body
    if not isinstance(one, ast.Call):
        return label, {}
    return ast.unparse(one.func), {str(part.arg): part.value for part in one.keywords}


def _inner(label: str) -> str:
    """The label of the method whose choices are read again."""
    name, given = _called(label)
    return ast.unparse(given["inner"]) if "inner" in given else USUAL[name]


def _name(label: str) -> str:
    """As one types it, without where a file was."""
    name, given = _called(label)
    said = ", ".join(f"{key}={ast.unparse(value)}" for key, value in given.items() if key not in PLACES)
    return ticked(spec(f"{name}({said})" if said else name))


def _wrapped(found: Measured, name: str) -> list[str]:
    return [label for label in found.labels() if _called(label)[0] == name]


def _made(found: Measured, label: str, budget: int) -> float:
    """The share of choices that were made anew: of what was scanned, since a choice read again scans nothing."""
    return float(found.must(label, budget)["mean.scanned"] / found.must(_inner(label), budget)["mean.scanned"])


def _table(found: Measured, name: str, head: str) -> str:
    """The methods that choose, then those that read choices again, by budget."""
    wrapped = _wrapped(found, name)
    labels = [*dict.fromkeys(map(_inner, wrapped)), *wrapped]
    lines = []
    for budget in dict.fromkeys(one["budget"] for one in found.rows):
        for label in labels:
            at = found.must(label, budget)
            share = _made(found, label, budget) if label in wrapped else 1.0
            shares = [percent(share), percent(at["mean.bytes_share"], 1)]
            rest = [f"{at[f'mean.{one}']:.3f}" for one in ("mass", "recovered")]
            lines.append([f"{_name(label)}, {budget:,}", *shares, *rest, percent(at["mean.relative_error"], 1)])
    columns = ["selector, budget", head, "bytes read", "mass", "recovered", "error"]
    return table(columns, lines)


def steps(record: Record) -> str:
    """What is saved by keeping choices over steps, and what is lost."""
    found = Measured(record)
    one = found.rows[0]
    words = f"`{one['trace.model']}`, the text {one['trace']}: {setting(one)}."
    return parts(text(words), _table(found, "FreeKV", "choices made"))


def depth(record: Record) -> str:
    """The same over layers."""
    return _table(Measured(record), "Kascade", "layers that choose")


def findings(record: Record) -> str:
    """How far one may go."""
    found = Measured(record)
    return bullets(*_findings(found, "FreeKV", "choices"), *_findings(found, "Kascade", "layers' choices"))


def _findings(found: Measured, name: str, what: str) -> list[str]:
    """For each inner method and budget, who makes the fewest choices of those that recover enough."""
    items = []
    wrapped = _wrapped(found, name)
    for inner in dict.fromkeys(map(_inner, wrapped)):
        for budget in dict.fromkeys(one["budget"] for one in found.rows):
            whole = found.must(inner, budget)
            mine = [label for label in wrapped if _inner(label) == inner]
            enough = [
                label
                for label in mine
                if found.must(label, budget)["mean.recovered"] >= ENOUGH * whole["mean.recovered"]
            ]
            if not enough:
                items.append(
                    f"{ticked(spec(inner))} at {budget:,} rows: none of {len(mine)} settings of `{name.lower()}` "
                    f"recovers {percent(ENOUGH)} of what it recovers ({whole['mean.recovered']:.3f})."
                )
                continue
            best = min(enough, key=lambda label: _made(found, label, budget))
            at = found.must(best, budget)
            items.append(
                f"{ticked(spec(inner))} at {budget:,} rows: {_name(best)} makes {percent(_made(found, best, budget))} "
                f"of the {what}, reads {percent(at['mean.bytes_share'], 1)} of the cache's bytes instead of "
                f"{percent(whole['mean.bytes_share'], 1)}, and recovers {at['mean.recovered']:.3f} instead of "
                f"{whole['mean.recovered']:.3f}."
            )
    return items
