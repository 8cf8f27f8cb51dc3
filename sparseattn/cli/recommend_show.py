"""What `recommend` shows people: what was chosen and why, as text on the screen and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseattn.cli.recommend_search import Recommendation
from sparseattn.recommend.bounds import MEASURES, Bound
from sparseattn.recommend.single import singles
from sparseattn.reporting.terminal import Screen
from sparseattn.roles.roles import Role


def sentences(result: Recommendation) -> list[str]:
    """Return what was found, in short."""
    made, cost = result.plan.made, result.plan.made["cost"]
    bound = Bound(made["bound"]["measure"], made["bound"]["most"])
    verified = made["verified"]
    name = MEASURES[bound.measure][0]
    share = cost["plan"] / cost["full"]
    what = "bytes read of keys and values" if cost["unit"] == "bytes" else f"seconds on {cost['machine']}"
    predicted = ", predicted" if cost["predicted"] else ""
    divergence = _interval(verified["kl"], (0, math.inf))
    more = _interval(verified["nll_difference"])
    same, read = (_interval(verified[what], (0, 1), 100, 1) for what in ("same_top", "bytes_share"))
    return [
        f"Bound: {bound}, that is, {MEASURES[bound.measure][1]}, at most {100 * bound.most:g} %.",
        f"Cost of a step in the layers that can be sparse{predicted}: {_number(cost['plan'])} {what}, {share:.1%} of "
        f"full attention's {_number(cost['full'])}, at {cost['context']:,} rows and batch {cost['batch']}.",
        f"Verified on {verified['windows']} windows held out ({verified['tokens']:,} tokens): KL {divergence} nats "
        f"a token, equal likeliest tokens {same} %, NLL more {more}; bytes {read} % of "
        f"a sparse layer's. The bound's measure ({name}) is {100 * bound.share(made['rounds'][-1]['verified']):.3g} %.",
        f"On the windows it was chosen by: {100 * bound.share(made['rounds'][-1]['searched']):.3g} %. The sum of the "
        f"layers predicted a KL of {made['predicted']['kl']:.4f}.",
    ]


def say(result: Recommendation, plan: Path, why: Path, drawn: Path) -> None:
    """Print what was found and where it lies."""
    screen = Screen()
    for line in sentences(result):
        screen.print(line, soft_wrap=True)
    for index in result.plan.layers:
        screen.print(f"  layer {index}: {_given(result.plan.layers[index])}", soft_wrap=True)
    screen.print(
        f"{plan}: for SparseCache(model, plan=...) and `sparseattn eval --plan`"
        + (", and for `sparseattn serve --plan`" if result.serves else "; what vLLM serves is made by --for vllm")
        + f". Why: {why}; to look at: {drawn}",
        soft_wrap=True,
    )


def page(result: Recommendation) -> str:
    """Return the page of why, in Markdown."""
    made = result.plan.made
    told = " predicted" if made["cost"]["predicted"] else ""
    lines = [
        f"# Plan {result.plan.name} for {result.plan.model['name']}",
        "",
        *(f"{one}\n" for one in sentences(result)),
    ]
    lines += [
        "## Layers",
        "",
        f"| layer | roles | predicted KL | share of full attention's{told} cost |",
        "| --- | --- | ---: | ---: |",
    ]
    for layer in result.layers:
        every = {one.role: one for one in result.choices[layer.index]}
        full = sum(result.choices[layer.index][0].cost_heads)
        given = result.plan.layers[layer.index]
        kl = every[given].kl if isinstance(given, Role) else sum(every[r].kl_heads[h] for h, r in enumerate(given))
        cost = result.objective.layer(layer, given, {role: one.cost_heads for role, one in every.items()})
        lines.append(f"| {layer.index} | {_given(given)} | {kl:.2g} | {cost / full:.1%} |")
    lines += [
        "",
        "## What the windows said",
        "",
        f"| round | bound aimed at | windows chosen by | windows held out |{told} cost |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    full = made["cost"]["full"]
    for n, one in enumerate(result.rounds, 1):
        lines.append(
            f"| {n} | {one['target']:.4g} | {one['searched']:.4g} | {one['verified']:.4g} | {one['cost'] / full:.1%} |"
        )
    lines += [
        "",
        "## Beside one method and budget for all layers",
        "",
        "By what the layers lose alone, at the plan's predicted KL: what each method costs with the budget for that,",
        "read off the line between two budgets. `-`: all its budgets lose more.",
        "",
        f"| method | share of full attention's{told} cost |",
        "| --- | ---: |",
        f"| this plan | {made['cost']['plan'] / full:.1%} |",
    ]
    for method, other in singles(result.layers, result.choices, result.proposal.kl).items():
        lines.append(f"| `{method}` | {'-' if other is None else f'{other / full:.1%}'} |")
    texts = ", ".join(f"{one['name']} ({one['kind']}, SHA-256 {one['sha256'][:12]})" for one in made["texts"])
    lines += [
        "",
        "## Setting",
        "",
        f"Texts: {texts}. {made['windows']} windows of {made['length']:,} tokens to choose by and {made['held_out']} "
        f"to verify on, which share no token; the last {made['last']} tokens of each are decoded. Sink "
        f"{result.plan.sink}, window {result.plan.window}, {made['dtype']}. Methods: {', '.join(made['methods'])}.",
        "",
        f"Made {made['created']} with {', '.join(f'{k} {v}' for k, v in made['versions'].items())}.",
        "",
    ]
    return "\n".join(lines)


def _given(given: Role | tuple[Role, ...]) -> str:
    return given.label if isinstance(given, Role) else "; ".join(role.label for role in given)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _interval(
    one: Mapping[str, Any], ends: tuple[float, float] = (-math.inf, math.inf), times: float = 1, digits: int = 4
) -> str:
    """Return a mean and its interval, within the `ends` that there can be."""
    level, around = f"{times * one['mean']:.{digits}f}", one["interval"]
    if around is None:
        return level
    low, high = times * max(around[0], ends[0]), times * min(around[1], ends[1])
    return f"{level} ({low:.{digits}f} to {high:.{digits}f})"
