"""What `recommend` shows people: what was chosen and why, as text on the screen and as a page."""

from __future__ import annotations

from pathlib import Path

from sparseattn.cli.recommend_search import Recommendation
from sparseattn.recommend.bounds import MEASURES, Bound
from sparseattn.recommend.single import singles
from sparseattn.reporting.agreement_tables import with_interval
from sparseattn.reporting.table import Column, Table
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
    divergence, more, same, read = (
        with_interval(key, verified[key]["mean"], verified[key]["interval"])
        for key in ("kl", "nll_difference", "same_top", "bytes_share")
    )
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
    """Prints what was found and where it lies."""
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
    texts = ", ".join(f"{one['name']} ({one['kind']}, SHA-256 {one['sha256'][:12]})" for one in made["texts"])
    parts = [
        f"# Plan {result.plan.name} for {result.plan.model['name']}",
        *sentences(result),
        "## Layers",
        _layers(result).markdown(),
        "## What the windows said",
        _rounds(result).markdown(),
        "## Beside one method and budget for all layers",
        "By what the layers lose alone, at the plan's predicted KL: what each method costs with the budget for that,\n"
        "read off the line between two budgets. `-`: all its budgets lose more.",
        _singles(result).markdown(),
        "## Setting",
        f"Texts: {texts}. {made['windows']} windows of {made['length']:,} tokens to choose by and {made['held_out']} "
        f"to verify on, which share no token; the last {made['last']} tokens of each are decoded. Sink "
        f"{result.plan.sink}, window {result.plan.window}, {made['dtype']}. Methods: {', '.join(made['methods'])}.",
        f"Made {made['created']} with {', '.join(f'{k} {v}' for k, v in made['versions'].items())}.",
    ]
    return "\n\n".join(parts) + "\n"


def _layers(result: Recommendation) -> Table:
    """Return the roles of each layer, what they are predicted to lose, and what they cost."""
    out = Table(
        "",
        [
            *map(Column.text, ("layer", "roles")),
            Column("predicted KL", "{:.2g}".format),
            _cost_column(result, "share of full attention's{} cost"),
        ],
    )
    for layer in result.layers:
        choices = {choice.role: choice for choice in result.choices[layer.index]}
        full = sum(result.choices[layer.index][0].cost_heads)
        roles = result.plan.layers[layer.index]
        if isinstance(roles, Role):
            kl = choices[roles].kl
        else:
            kl = sum(choices[role].kl_heads[head] for head, role in enumerate(roles))
        costs = {role: choice.cost_heads for role, choice in choices.items()}
        out.add(layer.index, _given(roles), kl, result.objective.layer(layer, roles, costs) / full)
    return out


def _rounds(result: Recommendation) -> Table:
    """Return what each round aimed at, and what the windows said of its plan."""
    measured = [Column(name, "{:.4g}".format) for name in ("bound aimed at", "windows chosen by", "windows held out")]
    out = Table("", [Column("round"), *measured, _cost_column(result, "{} cost")])
    for number, one in enumerate(result.rounds, 1):
        costs = one["cost"] / result.plan.made["cost"]["full"]
        out.add(number, one["target"], one["searched"], one["verified"], costs)
    return out


def _singles(result: Recommendation) -> Table:
    """Return what this plan costs, and each method alone with the budget that loses as much."""
    cost = result.plan.made["cost"]
    out = Table("", [Column.text("method"), _cost_column(result, "share of full attention's{} cost")])
    out.add("this plan", cost["plan"] / cost["full"])
    for method, other in singles(result.layers, result.choices, result.proposal.kl).items():
        out.add(f"`{method}`", None if other is None else other / cost["full"])
    return out


def _cost_column(result: Recommendation, head: str) -> Column:
    predicted = " predicted" if result.plan.made["cost"]["predicted"] else ""
    return Column(head.format(predicted).strip(), "{:.1%}".format)


def _given(given: Role | tuple[Role, ...]) -> str:
    return given.label if isinstance(given, Role) else "; ".join(role.label for role in given)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
