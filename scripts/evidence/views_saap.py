"""Views of what SmolLM2's SAAP artefact finds: `python -m scripts.smollm2.judge` makes the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.markdown import percent, table, ticked

Record: TypeAlias = "Mapping[str, Any]"

FAR = 0.3  # share of a query head's attention on indexed rows from which on it counts as looking far
NEEDLES = ("needles",)
SHOWN = ("exact", "exact, one choice a group", "true order of the buckets", "saap", "moments", "kmeans", "quest")
ORDER = ("kmeans", "kmeans, no RoPE", "saap, no RoPE")  # the paper's, rising: the first is of roped keys


def recovered(record: Record, prompts: Sequence[str], method: str, budget: int, layer: int | None = None) -> float:
    """The mean of what a method recovered over the query heads that look far, of one layer or of all; NaN if none.

    Args:
        budget: 0 the lower, 1 the higher.
    """
    found = []
    for prompt in prompts:
        one = record["prompts"][prompt]
        for i, index in enumerate(record["layers"]):
            if layer in (None, index):
                pairs = zip(one["methods"][method][budget]["recovered"][i], one["indexed_mass"][i], strict=True)
                found += [value for value, mass in pairs if mass >= FAR]
    return sum(found) / len(found) if found else float("nan")


def far_heads(record: Record, prompts: Sequence[str], layer: int) -> tuple[int, int]:
    """How many query heads of a layer look far, of how many, over some prompts."""
    i = record["layers"].index(layer)
    mass = [value for prompt in prompts for value in record["prompts"][prompt]["indexed_mass"][i]]
    return sum(value >= FAR for value in mass), len(mass)


def ordered(record: Record, layer: int, budget: int) -> tuple[int, int]:
    """KV heads of all prompts with a query head that looks far: in how many `ORDER` rises, and how many there are."""
    i, yes, total = record["layers"].index(layer), 0, 0
    for one in record["prompts"].values():
        mass, group = one["indexed_mass"][i], len(one["indexed_mass"][i]) // record["heads"]
        for first in range(0, len(mass), group):
            far = [head for head in range(first, first + group) if mass[head] >= FAR]
            found = [sum(one["methods"][method][budget]["recovered"][i][head] for head in far) for method in ORDER]
            total += bool(far)
            yes += found[0] < found[1] < found[2]
    return yes, total


def by_prompt(record: Record) -> str:
    """Every method on every prompt, over all layers' heads that look far."""
    prompts = record["prompts"]
    methods = next(iter(prompts.values()))["methods"]
    lines = []
    for method, budgets in methods.items():
        shares = [one["methods"][method][0]["bytes_share"] for one in prompts.values()]
        cells = [_cell(record, (name,), method) for name in prompts]
        lines.append([_named(method), *cells, percent(sum(shares) / len(shares))])
        low, high = (one["rows"] for one in budgets)
    return table([f"{low} and {high} rows", *map(ticked, prompts), f"bytes, {low} rows"], lines)


def texts(record: Record) -> str:
    """By layer, texts and source code together."""
    return _by_layer(record, [name for name in record["prompts"] if name not in NEEDLES])


def needles(record: Record) -> str:
    """By layer, on pass key and records."""
    return _by_layer(record, NEEDLES)


def order(record: Record) -> str:
    """By layer, k-means of roped and of de-roped keys and SAAP of these: over all prompts, and in how many KV heads."""
    lines = []
    for layer in record["layers"]:
        held = [ordered(record, layer, budget) for budget in (0, 1)]
        cells = [_cell(record, list(record["prompts"]), method, layer) for method in ORDER]
        lines.append([str(layer), *cells, ", ".join(f"{yes} of {of}" for yes, of in held)])
    return table(["layer", *map(_named, ORDER), "KV heads in this order"], lines)


def _by_layer(record: Record, prompts: Sequence[str]) -> str:
    lines = []
    for layer in record["layers"]:
        far, of = far_heads(record, prompts, layer)
        lines.append([str(layer), f"{far} of {of}", *(_cell(record, prompts, one, layer) for one in SHOWN)])
    return table(["layer", "heads that look far", *map(_named, SHOWN)], lines)


def _cell(record: Record, prompts: Sequence[str], method: str, layer: int | None = None) -> str:
    """Both budgets."""
    both = [recovered(record, prompts, method, budget, layer) for budget in (0, 1)]
    return ", ".join("-" if value != value else f"{value:.2f}" for value in both)


def _named(method: str) -> str:
    name, comma, rest = method.partition(",")
    return method if " " in name else ticked(name) + comma + rest
