"""Views of what SmolLM2's SAAP artefact finds: `python -m scripts.smollm2.judge` makes the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, percent, table, ticked

Record: TypeAlias = "Mapping[str, Any]"

FAR = 0.3  # share of a query head's attention on indexed rows from which on it counts as looking far
NEEDLES = ("needles",)
WELL, BADLY = 0.8, 0.5  # shares of what an exact choice recovers
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


def rising(record: Record, methods: Sequence[str], budget: int, layer: int | None = None) -> tuple[int, int]:
    """KV heads of all prompts with a query head that looks far: in how many each method recovers more than the one
    before it, and how many there are; of one layer or of all."""
    yes = total = 0
    for one in record["prompts"].values():
        for i, index in enumerate(record["layers"]):
            mass, group = one["indexed_mass"][i], len(one["indexed_mass"][i]) // record["heads"]
            for first in range(0, len(mass), group):
                far = [head for head in range(first, first + group) if mass[head] >= FAR]
                if far and layer in (None, index):
                    recovered_by = (one["methods"][method][budget]["recovered"][i] for method in methods)
                    found = [sum(values[head] for head in far) for values in recovered_by]
                    total += 1
                    yes += all(low < high for low, high in pairwise(found))
    return yes, total


def findings(record: Record) -> str:
    """Where it works and where not, what limits it, and the paper's order."""
    reading = [name for name in record["prompts"] if name not in NEEDLES]
    low, high = (one["rows"] for one in record["prompts"][reading[0]]["methods"]["saap"])
    reached = {
        layer: recovered(record, reading, "saap", 0, layer)
        / recovered(record, reading, "exact, one choice a group", 0, layer)
        for layer in record["layers"]
    }
    best = [layer for layer, share in reached.items() if share >= WELL]
    least = [layer for layer, share in reached.items() if share < BADLY]
    above = {
        words: [
            layer
            for layer in record["layers"]
            if recovered(record, prompts, "saap", 0, layer) > recovered(record, prompts, "quest", 0, layer)
        ]
        for words, prompts in (("texts and code", reading), ("needles", NEEDLES))
    }
    every = list(record["prompts"])
    mine, true, exact = (
        recovered(record, every, method, 0)
        for method in ("saap", "true order of the buckets", "exact, one choice a group")
    )
    pairs = {(a, b): rising(record, (a, b), 0) for a, b in (("kmeans", "saap"), ("saap", "moments"))}
    of = pairs["kmeans", "saap"][1]
    order = [rising(record, ORDER, budget) for budget in (0, 1)]
    reversed_ = rising(record, (ORDER[2], ORDER[0]), 0)
    return bullets(
        f"**By layer**: on texts and code at {low} rows SAAP recovers {percent(WELL)} or more of what one exact choice "
        f"a query group does in {_layers(best)}, and less than {percent(BADLY)} of it in {_layers(least)}. It finds "
        f"more than `quest` in {_layers(above['texts and code'])} on texts and code, in {_layers(above['needles'])} on "
        "needles.",
        f"**Who ranks the buckets**: at {low} rows the classifier finds more than k-means in "
        f"{pairs['kmeans', 'saap'][0]} of {of} KV heads that look far, and `moments`, which needs no classifier, more "
        f"than it in {pairs['saap', 'moments'][0]}.",
        f"**What limits it**: over all prompts and layers the classifier recovers {mine:.2f}, the same buckets in "
        f"their true order {true:.2f}, one exact choice a group {exact:.2f}. A better "
        "order by mass could bring little; what is missing to one exact choice lies with the buckets, or with ranking "
        "them by mass rather than by mass a row.",
        f"**RoPE**: the paper's order (roped k-means, k-means without RoPE, SAAP, each better than the one before) is "
        f"seen in {order[0][0]} of {order[0][1]} KV heads at {low} rows and in {order[1][0]} at {high}. Roped k-means "
        f"finds more than SAAP without RoPE in {reversed_[0]} of them at {low}.",
    )


def _layers(some: Sequence[int]) -> str:
    """Layers in words."""
    if not some:
        return "no layer"
    *first, last = map(str, some)
    return f"layers {', '.join(first)} and {last}" if first else f"layer {last}"


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
        held = [rising(record, ORDER, budget, layer) for budget in (0, 1)]
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
