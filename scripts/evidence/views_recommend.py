"""Views of plans: beside one method and budget for all layers, at equal divergence, on texts that no plan saw."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import parts, percent, table, text, ticked
from scripts.evidence.views_agreement import FULL, mean
from scripts.evidence.views_traces import spec
from sparseattn.evaluation.intervals import student
from sparseattn.recommend.single import between

Record: TypeAlias = "Mapping[str, Any]"
Window: TypeAlias = "tuple[Any, ...]"

PLAN = "plan "  # begins the label of one
DRAWS = 1000  # of windows, for an interval


class Compared:
    """What each configuration did on every window: its divergence and its bytes."""

    def __init__(self, record: Record) -> None:
        self.rows = [one for one in rows(record) if one["method"] != FULL]
        found: dict[tuple[str, str | None], dict[Window, tuple[float, float]]] = {}
        for one in self.rows:
            place = (one["text"], one["length"], one["start"])
            found.setdefault((one["method"], one["budget"]), {})[place] = one["kl"], one["bytes_share"]
        self.windows = sorted(set.intersection(*(set(each) for each in found.values())))
        self.found = found
        self.plans = [method for method, _ in found if method.startswith(PLAN)]
        self.methods = list(dict.fromkeys(method for method, _ in found if not method.startswith(PLAN)))

    def of(self, label: str, budget: str | None, windows: Sequence[Window]) -> tuple[float, float]:
        """Mean divergence and bytes over windows."""
        each = [self.found[label, budget][one] for one in windows]
        return sum(kl for kl, _ in each) / len(each), sum(share for _, share in each) / len(each)

    def single(self, kl: float, windows: Sequence[Window]) -> tuple[str, float] | None:
        """The method that has a divergence for the fewest bytes with one budget for all layers, and these bytes.

        See `single.between`; None where every method loses more at all its budgets.
        """
        best: tuple[str, float] | None = None
        for method in self.methods:
            budgets = [budget for label, budget in self.found if label == method]
            share = between((self.of(method, budget, windows) for budget in budgets), kl)
            if share is not None and (best is None or share < best[1]):
                best = method, share
        return best

    def ratio(self, plan: str, windows: Sequence[Window]) -> float | None:
        """A plan's bytes over those of the best single method at its divergence."""
        kl, share = self.of(plan, None, windows)
        other = self.single(kl, windows)
        return None if other is None else share / other[1]

    def interval(self, plan: str) -> tuple[float, float] | None:
        """Of the ratio, 95 %, by drawing windows anew."""
        draw, found = random.Random(0), []
        for _ in range(DRAWS):
            ratio = self.ratio(plan, draw.choices(self.windows, k=len(self.windows)))
            if ratio is not None:
                found.append(ratio)
        found.sort()
        return (found[len(found) // 40], found[-1 - len(found) // 40]) if len(found) > DRAWS // 2 else None


def equal(record: Record) -> str:
    """Each plan beside the best method and budget for all layers at its divergence."""
    found = Compared(record)
    out = []
    for plan in found.plans:
        kl, share = found.of(plan, None, found.windows)
        mine = [one for one in found.rows if one["method"] == plan]
        around = student([one["kl"] for one in mine])
        other, ratio, spread = found.single(kl, found.windows), found.ratio(plan, found.windows), found.interval(plan)
        out.append(
            (
                ticked(plan.removeprefix(PLAN)),
                f"{kl:.4f}" + (f" ({max(around[0], 0):.4f} to {around[1]:.4f})" if around else ""),
                percent(mean(mine, "same_top"), 1),
                percent(share, 1),
                ticked(spec(other[0])) if other else "-",
                percent(other[1], 1) if other else "-",
                _saved(ratio, spread),
            )
        )
    head = ("plan", "KL", "same top", "bytes", "best single method", "its bytes", "fewer bytes")
    texts = ", ".join(f"`{name}`" for name in dict.fromkeys(one["text"] for one in found.rows))
    one = found.rows[0]
    about = (
        f"{one['model']}, {one['length']:,} tokens, {len(found.windows)} windows of {texts}, {one['scored_tokens']} "
        f"tokens of each. In brackets 95 % intervals over windows. Bytes are those of all layers that can be sparse, "
        f"with what is read to choose; those of the best single method are the least at which it loses no more than "
        f"the plan, read off the line between its budgets, in logarithms."
    )
    return parts(text(about), table(head, out))


def _saved(ratio: float | None, spread: tuple[float, float] | None) -> str:
    if ratio is None:
        return "-"
    return percent(1 - ratio) + (f" ({percent(1 - spread[1])} to {percent(1 - spread[0])})" if spread else "")


def took(record: Record) -> str:
    """How long one plan takes, from nothing."""
    made = record["made"]
    machine = made["machine"]
    return text(
        f"For {record['model']['name']} the first command takes {made['seconds'] / 60:.0f} minutes on "
        f"{machine['cores']} cores ({machine['processor']}), with {len(made['methods'])} methods at "
        f"{len(made['budgets'])} budgets in {len(record['layers'])} layers; its plan reads "
        f"{percent(made['cost']['plan'] / made['cost']['full'])} of full attention's bytes."
    )


def findings(*records: Record) -> str:
    """In a sentence, whether plans read fewer bytes than the best single method."""
    sentences = []
    for record in records:
        found = Compared(record)
        fewer = [1 - ratio for plan in found.plans if (ratio := found.ratio(plan, found.windows)) is not None]
        alone = len(found.plans) - len(fewer)
        told = f"for {found.rows[0]['model']} {sum(one > 0 for one in fewer)} of {len(found.plans)} read fewer bytes"
        if fewer:
            told += f" ({percent(min(fewer))} to {percent(max(fewer))})"
        sentences.append(told + (f", and no single method loses as little as {alone} of them" if alone else ""))
    return text(
        "Plans were judged on texts that they never saw, beside the best single method with one budget for all layers, "
        f"at equal KL: {'; '.join(sentences)}."
    )
