"""Every family of methods on one model: the families, the step that measures them, its tables and its picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from scripts.evidence.commands import UNSEEN, short
from scripts.evidence.markdown import bullets, parts, percent, significant, table, text, ticked
from scripts.evidence.step import Step
from scripts.evidence.views_agreement import Agreed, mean
from scripts.evidence.views_rows8 import rounding
from scripts.evidence.views_traces import spec
from sparseattn.selectors.registry import SELECTORS

Record: TypeAlias = "Mapping[str, Any]"

KASCADE = "kascade:artefact=OUT/kascade.safetensors"
ORACLE, CONTROLS, ROUNDED = "exact keys (oracle)", "controls", "rounded rows"
FAMILIES: dict[str, tuple[str, ...]] = {
    ORACLE: ("exact:group=softmax",),
    "page scores": (
        *("quest", "quest:page=8,int8=True", "unique", "mean:page=4,bits=8", "quad:page=8,bits=4"),
        *("clse:bits=8", "clse:page=8,bits=4", "ellipsoid:bits=4", "infllm:page=16"),
    ),
    "keys of few bits": (
        *("lowbit", "lowbit:bits=4", "lowbit:page=8", "lowbit:bits=1,page=8"),
        *("fier", "selfindex", "pq", "pqcache", "twostage", "pariskv"),
    ),
    "channels": ("sparq", "doublesparsity", "loki", "rocketkv"),
    "graphs": ("retrieval:share=0.25",),
    "buckets": ("kmeans", "moments", "saap"),
    "dropping rows": ("h2o", "tova", "snapkv", "pyramidkv"),
    "sampling": ("magicpig", "vattention"),
    "top-p": ("topp",),
    "estimated tails": ("tailed:rows=64", "tailed:inner=lowbit,rows=64", "retroinfer"),
    "reuse": ("freekv", f"{KASCADE},anchors=COUNT", f"{KASCADE},anchors=COUNT,inner=lowbit"),
    CONTROLS: ("recent", "random", "window"),
}
TRAINED = ("kmeans", "moments", "saap")  # on SmolLM2
PAGES = "--selector quest:page=32 --selector clse:page=32,bits=8"  # whose pages are groups of rounded keys
BUDGETS = "64,256,1024"
EQUALLY = "--window 91 --seal 64"  # of 32 tokens behind a prefill, the first of which ends it: groups of 64 are full
CLOSE = (0.1, 0.03, 0.01)  # nats a token


def field(model: str, length: int, layers: str, anchors: int, trained: bool, minutes: float) -> Step:
    """Agreement with full attention of every family, at several budgets and at equally many rows that wait.

    Args:
        model, length: what is asked, and tokens of a window.
        layers: all that attend to the whole context, for Kascade's map, which is made from other texts.
        anchors: layers that choose for the others.
        trained: whether artefacts of the bucket methods are there.
        minutes: about what it takes.
    """
    every = [one for name, specs in FAMILIES.items() for one in specs if trained or one not in TRAINED]
    methods = " ".join(f"--selector '{one.replace('COUNT', str(anchors))}'" for one in every)
    asked = (
        f"sparseattn eval --model {model} --dtype float32 --task agreement {UNSEEN} --lengths {length} --last 32 "
        f"--samples 1 --budget {BUDGETS} {EQUALLY} --out OUT"
    )
    return Step(
        f"field-{short(model)}",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens, by every family of methods",
        f"sparseattn capture --model {model} --layers {layers} --dtype bfloat16 --text alice --text click "
        "--tokens 4096 --queries 128 --out OUT/prompts && "
        "sparseattn calibrate OUT/prompts --method kascade --out OUT/kascade.safetensors && "
        f"{asked} {methods} && {asked} {PAGES} --kv-bits 8,4",
        minutes,
        "eval.jsonl",
    )


@dataclass(frozen=True)
class Point:
    """A method at a budget, over all windows.

    Args:
        family, label: of `FAMILIES` or `ROUNDED`; as people type the method, and bits of rows below 16.
        budget: rows, or None.
        kl: nats a token.
        same: share of equal likeliest tokens.
        rows, share: read in a sparse layer for a query head, and bytes of such a layer's.
    """

    family: str
    label: str
    budget: int | None
    kl: float
    same: float
    rows: float
    share: float


def points(record: Record) -> list[Point]:
    """Of a record of `field`, in its order."""
    agreed = Agreed(record)
    found = []
    for asked in agreed.asked:
        windows = agreed.of(asked)
        method, bits = rounding(asked[0])
        budget = None if asked[1] is None else int(asked[1])
        measured = (mean(windows, name) for name in ("kl", "same_top", "rows", "bytes_share"))
        label = _without_file(spec(method))
        found.append(Point(family(asked[0]), label + (f", {bits} bits" if bits < 16 else ""), budget, *measured))
    return found


def _without_file(name: str) -> str:
    """A method without its artefact, which says where a run put it."""
    method, _, given = name.partition(":")
    kept = ",".join(one for one in given.split(",") if not one.startswith("artefact="))
    return f"{method}:{kept}" if kept else method


def family(label: str) -> str:
    """Of a method's label."""
    method, bits = rounding(label)
    name = method.partition("(")[0]
    if bits < 16:
        return ROUNDED
    return next(
        group
        for group, specs in FAMILIES.items()
        if name in {SELECTORS[one.partition(":")[0]].__name__ for one in specs}
    )


def best(found: Iterable[Point]) -> list[Point]:
    """Those that no other is nearer than at as few bytes, the fewest bytes first."""
    kept: list[Point] = []
    for one in sorted(found, key=lambda one: (one.share, one.kl)):
        if not kept or one.kl < kept[-1].kl:
            kept.append(one)
    return kept


def grouped(found: Sequence[Point]) -> dict[str, list[Point]]:
    """By family, in the order of `FAMILIES`."""
    return {name: mine for name in (*FAMILIES, ROUNDED) if (mine := [one for one in found if one.family == name])}


def findings(record: Record) -> str:
    """The fewest bytes of any method, and of each family, to be within so many nats of full attention."""
    every = points(record)
    items = []
    for close in CLOSE:
        near = {
            name: min((one for one in mine if one.kl <= close), key=lambda one: one.share, default=None)
            for name, mine in grouped(every).items()
            if name != CONTROLS
        }
        there = sorted((one for one in near.values() if one is not None), key=lambda one: one.share)
        missed = [name for name, one in near.items() if one is None]
        said = [f"{ticked(one.label)} at {_budget(one)} ({one.family}) {percent(one.share, 1)}" for one in there[:4]]
        words = f"Within {close} nats a token, fewest bytes: {'; '.join(said)}." if said else f"Within {close}: none."
        items.append(words + (f" No measured budget of these is as near: {', '.join(missed)}." if missed else ""))
    return bullets(*items)


def _budget(one: Point) -> str:
    return "any budget" if one.budget is None else f"{one.budget:,} rows"


def tables(record: Record) -> str:
    """Every method by family: divergence, equal tokens and bytes at each budget."""
    found, one = points(record), Agreed(record).rows[0]
    budgets = sorted({point.budget for point in found if point.budget is not None})
    lines = []
    for name, mine in grouped(found).items():
        for label in dict.fromkeys(point.label for point in mine):
            at = {point.budget: point for point in mine if point.label == label}
            asked = [None] if None in at else budgets
            cells = [
                f"{significant(at[budget].kl, 2)}, {percent(at[budget].same)}, {percent(at[budget].share)}"
                if budget in at
                else ""
                for budget in asked
            ]
            lines.append([name, ticked(label), *cells, *[""] * (len(budgets) - len(cells))])
    agreed = Agreed(record)
    words = text(
        f"`{one['model']}`, {agreed.length:,} tokens, the last {one['scored_tokens']} of {agreed.windows()} window of "
        f"each of {', '.join(agreed.texts)}; sink {one['sink']}, window {one['window']}, every layer that attends to "
        "the whole context sparse. KL divergence from full attention in nats a token, share of equal likeliest tokens, "
        "bytes read of a sparse layer's:"
    )
    return parts(words, table(["family", "method", *(f"{rows:,} rows" for rows in budgets)], lines, left=2))


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel a model: every measurement a grey point, and the best of each family a line with its name."""
    from sparseattn.reporting.line_style import name_ends, style
    from sparseattn.reporting.plots import panels as plots

    named = [[name for name in grouped(points(one)) if name != CONTROLS] for one in records]
    labels = list(dict.fromkeys(name for names in named for name in names))
    figure, axes = plots.panel_grid(1, len(records), (4.6, 4.4), labels)
    for axis, record, names in zip(axes.flat, records, named, strict=True):
        every = points(record)
        axis.scatter([one.share for one in every], [one.kl for one in every], s=9, color="0.78", label="_every")
        for name in names:
            line = best(one for one in every if one.family == name)
            look = style(labels.index(name), name)
            axis.plot([one.share for one in line], [one.kl for one in line], **look)
        plots.logarithmic(axis, plots.SHARE)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(plots.COUNT)
        axis.set_xlim(right=1.1)
        axis.grid(alpha=0.3)
        agreed = Agreed(record)
        axis.set_title(f"{agreed.rows[0]['model']}, {agreed.length:,} tokens", fontsize=10, loc="left")
        axis.set_xlabel("bytes read / bytes of the cache")
    axes.flat[0].set_ylabel("KL from full attention, nats a token")
    figure.suptitle("Divergence of predictions against bytes read: grey every method, a line the best of a family")
    name_ends(figure, axes.flat)
    plots.save(figure, path)
