"""The tables of docs/saap.md on SmolLM2's artefact, and its picture, from the record of judge.py."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.files import write_atomic

FAR = 0.3  # share of a query head's attention on indexed rows from which on it counts as looking far
TEXTS, NEEDLES = ("alice", "workshop", "click"), ("passkey", "kv")
SHOWN = ("exact", "exact, one choice a group", "true order of the buckets", "saap", "moments", "kmeans", "quest")
ORDER = ("kmeans, roped", "kmeans", "saap")  # the paper's, rising


def recovered(
    record: Mapping[str, Any], prompt: str, method: str, budget: int, layer: int | None = None
) -> list[float]:
    """What a method recovered, of every query head of a prompt that looks far (of one layer, or of all)."""
    one = record["prompts"][prompt]
    at = [i for i, index in enumerate(record["layers"]) if layer in (None, index)]
    found = one["methods"][method][budget]["recovered"]
    mass = one["indexed_mass"]
    return [x for i in at for x, share in zip(found[i], mass[i], strict=True) if share >= FAR]


def mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def over(record: Mapping[str, Any], names: Sequence[str], method: str, layer: int | None = None) -> str:
    """Both budgets' means over the far heads of some prompts, as a cell."""
    means = [mean([x for name in names for x in recovered(record, name, method, b, layer)]) for b in (0, 1)]
    return ", ".join("-" if one is None else f"{one:.2f}" for one in means)


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Name -> table in Markdown."""
    prompts = record["prompts"]
    budgets = [one["rows"] for one in next(iter(next(iter(prompts.values()))["methods"].values()))]
    methods = list(next(iter(prompts.values()))["methods"])

    def drawn(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])

    by_prompt = []
    for method in methods:
        share = mean([one["methods"][method][0]["bytes_share"] for one in prompts.values()])
        cells = [over(record, (name,), method) for name in prompts]
        by_prompt.append([f"`{method}`" if "," not in method and " " not in method else method, *cells, f"{share:.0%}"])
    head = [
        f"{budgets[0]}, {budgets[1]} rows",
        *(f"`{name}` ({one['kind']})" for name, one in prompts.items()),
        f"bytes, {budgets[0]} rows",
    ]
    by_layer = {}
    for group, names in (("texts", TEXTS), ("needles", NEEDLES)):
        rows = []
        for layer in record["layers"]:
            far = sum(len(recovered(record, name, "exact", 0, layer)) for name in names)
            total = sum(len(one[0]) for one in (record["prompts"][name]["indexed_mass"] for name in names))
            rows.append([str(layer), f"{far} of {total}", *(over(record, names, one, layer) for one in SHOWN)])
        by_layer[group] = drawn(["layer", "far heads", *SHOWN], rows)
    order = []
    for layer in record["layers"]:
        cells = [over(record, [*TEXTS, *NEEDLES], method, layer) for method in ORDER]
        held = [ordered(record, layer, budget) for budget in (0, 1)]
        order.append([str(layer), *cells, ", ".join(f"{yes} of {of}" for yes, of in held)])
    return {
        "prompts": drawn(head, by_prompt),
        **by_layer,
        "order": drawn(["layer", *ORDER, "KV heads in this order"], order),
    }


def ordered(record: Mapping[str, Any], layer: int, budget: int) -> tuple[int, int]:
    """KV heads of all prompts with a query head that looks far: in how many ORDER rises, and how many there are."""
    i, yes, total = record["layers"].index(layer), 0, 0
    for one in record["prompts"].values():
        mass = one["indexed_mass"][i]
        group = len(mass) // record["heads"]
        for h in range(record["heads"]):
            far = [q for q in range(h * group, (h + 1) * group) if mass[q] >= FAR]
            if far:
                found = [sum(one["methods"][m][budget]["recovered"][i][q] for q in far) for m in ORDER]
                total += 1
                yes += found[0] < found[1] < found[2]
    return yes, total


def filled(document: str, made: Mapping[str, str]) -> str:
    """The document with its tables `<!-- from saap-smollm2: NAME -->` replaced; ValueError for a name that is none."""

    def table(match: re.Match[str]) -> str:
        if match[1] not in made:
            raise ValueError(f"there is no table {match[1]}, there are {', '.join(made)}")
        return f"<!-- from saap-smollm2: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- from saap-smollm2: ([\w-]+) -->\n.*?<!-- end -->", table, document, flags=re.DOTALL)


def picture(record: Mapping[str, Any], path: Path) -> None:
    """What methods recover by layer at the lower budget, texts and needles apart, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    from sparseattn.cli.lines import name_ends, room, style

    shown = [name for name in SHOWN if name != "exact, one choice a group"]
    width = room(shown)[0]
    figure = Figure(figsize=(2 * (3.6 + width), 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, names) in zip(axes, (("texts and code", TEXTS), ("needles and records", NEEDLES)), strict=True):
        for k, method in enumerate(shown):
            points = [
                (layer, mean([x for name in names for x in recovered(record, name, method, 0, layer)]))
                for layer in record["layers"]
            ]
            axis.plot(*zip(*((a, b) for a, b in points if b is not None), strict=True), **style(k, method))
        axis.set_title(title)
        axis.set_xlabel("layer")
        axis.set_xticks(record["layers"])
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("recovered at 82 rows of 8,192")
    name_ends(figure, axes)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    write_atomic(path, drawn.getvalue())
