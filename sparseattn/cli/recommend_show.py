"""What `recommend` shows people: what was chosen and why, as text on the screen and as a page."""

from __future__ import annotations

import shlex
from pathlib import Path

from sparseattn.cli.eval_options import EvalOptions
from sparseattn.cli.recommend_search import Recommendation
from sparseattn.evaluation.intervals import draws_for
from sparseattn.recommend.bounds import MEASURES, Bound
from sparseattn.recommend.single import singles
from sparseattn.reporting.agreement_tables import with_interval
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import Screen
from sparseattn.roles.role import Role
from sparseattn.selectors.trust import named_modules
from sparseattn.serving.vllm.defaults import ABOVE

MOST_WINDOWS = 1000  # that a user may be told to verify on


def say(result: Recommendation, plan: Path, why: Path, drawn: Path | None) -> None:
    """Print cost, error, the best single method, where the plan lies, and the next command; and what is in doubt."""
    screen = Screen()
    for line in (*doubts(result), _cost(result), _error(result), _best_single(result)):
        screen.print(line, soft_wrap=True)
    page = "" if drawn is None else f"; to look at: {drawn}"
    screen.print(f"Plan: {plan}; why, layer by layer: {why}{page}", soft_wrap=True)
    screen.print(f"Next: {_next(result, plan)}", soft_wrap=True)


def doubts(result: Recommendation) -> list[str]:
    """Return why the plan is not what was asked for, and why it may not keep the bound on other text."""
    made = result.plan.made
    said = [made["instead"]] if "instead" in made else []
    loss, high, windows = *_loss(result), made["verified"]["windows"]
    bound = _bound(result)
    if high is None:
        said.append(
            f"Warning: an interval of the error needs 3 held-out windows or more, got --held-out {windows}: on other "
            f"text the plan may not keep {bound}."
        )
    elif high > bound.limit:
        enough = draws_for(bound.limit - loss, high - loss, windows)
        more = f"about --held-out {enough} would" if enough <= MOST_WINDOWS else "no practical number of them would"
        said.append(
            f"Warning: the plan keeps {bound} on average, but the interval reaches {_percent(result, high)}. "
            f"{windows} held-out windows ({made['verified']['tokens']:,} tokens) are too few to be sure; {more} be "
            f"enough. A smaller --error is safer too."
        )
    return said


def _cost(result: Recommendation) -> str:
    cost = result.plan.made["cost"]
    predicted = "predicted " if cost["predicted"] else ""
    seconds = cost["unit"] == "seconds"
    what, number = (f"time on {cost['machine']}", "{:.3g} ms".format) if seconds else ("bytes", "{:,.0f}".format)
    plan, full = (number(cost[name] * (1e3 if seconds else 1)) for name in ("plan", "full"))
    return (
        f"Cost: {_share(cost['plan'] / cost['full'])} of full attention's {predicted}{what} per step ({plan} of "
        f"{full}, at {cost['context']:,} tokens and batch {cost['batch']})"
    )


def _error(result: Recommendation) -> str:
    verified, bound = result.plan.made["verified"], _bound(result)
    loss, high = _loss(result)
    interval = "" if high is None else f" (95 % interval up to {_percent(result, high)})"
    return (
        f"Error ({bound.measure}): {_percent(result, loss)} on average{interval}, bound {100 * bound.most:.6g} %; "
        f"{verified['windows']} held-out windows, {verified['tokens']:,} tokens"
    )


def _best_single(result: Recommendation) -> str:
    """Return the cheapest method that loses as much with one budget for all layers."""
    costs = singles(result.layers, result.choices, result.proposal.kl)
    known = [(cost, method) for method, cost in costs.items() if cost is not None]
    if not known:
        return "Best single method: none reaches this error with any budget"
    cost, method = min(known)
    return f"Best single method at this error: {method}, {_share(cost / result.plan.made['cost']['full'])}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _next(result: Recommendation, plan: Path) -> str:
    made, model, length = result.plan, shlex.quote(result.plan.model["name"]), result.plan.made["length"]
    file = shlex.quote(str(plan))
    trusted = "".join(f" --trust {module}" for module in named_modules(role.method for role in made.distinct()))
    if result.serves:
        return (
            f"sparseattn serve {model} --plan {file}{trusted}  # measured at {length:,} tokens; serve is sparse above "
            f"{ABOVE:,} (--above)"
        )
    rows = "".join(
        f" --{name} {getattr(made, name)}"
        for name in ("sink", "window")
        if getattr(made, name) != getattr(EvalOptions, name)
    )
    return (
        f"sparseattn eval --model {model} --task agreement --text OTHER_TEXT --lengths {length}{rows} --plan "
        f"{file}{trusted}"
    )


def _bound(result: Recommendation) -> Bound:
    bound = result.plan.made["bound"]
    return Bound(bound["measure"], bound["most"])


def _loss(result: Recommendation) -> tuple[float, float | None]:
    """Return the mean loss on the held-out windows, in the bound's unit, and the upper end of its interval."""
    bound = _bound(result)
    key = MEASURES[bound.measure][0]
    known = result.plan.made["verified"][key]
    ends = [known["mean"], *(known["interval"] or ())]
    loss, *others = (bound.loss({key: end}) for end in ends)
    return loss, max(others, default=None)


def _percent(result: Recommendation, loss: float) -> str:
    return f"{100 * _bound(result).share(loss):.3g} %"


def sentences(result: Recommendation) -> list[str]:
    """Return what was found, for the page of why."""
    made, bound = result.plan.made, _bound(result)
    verified, searched = made["verified"], made["rounds"][-1]["searched"]
    divergence, more, same, read = (
        with_interval(key, verified[key]["mean"], verified[key]["interval"])
        for key in ("kl", "nll_difference", "same_top", "bytes_share")
    )
    return [
        *doubts(result),
        f"Bound: {bound}, that is, {MEASURES[bound.measure][1]}, at most {100 * bound.most:g} %.",
        f"{_cost(result)}.",
        f"{_error(result)}.",
        f"On held-out text: KL {divergence} nats per token, top-1 agreement {same} %, delta NLL {more}; bytes read "
        f"{read} % per sparse layer.",
        f"On the windows used to choose, the error is {_percent(result, searched)}. The sum of the layers predicted a "
        f"KL of {made['predicted']['kl']:.4f}.",
    ]


def page(result: Recommendation) -> str:
    """Return the page of why, in Markdown."""
    made = result.plan.made
    texts = ", ".join(f"{text['name']} ({text['kind']}, SHA-256 {text['sha256'][:12]})" for text in made["texts"])
    parts = [
        f"# Plan {result.plan.name} for {result.plan.model['name']}",
        *sentences(result),
        "## Layers",
        _layers(result).markdown(),
        "## Rounds",
        _rounds(result).markdown(),
        "## Beside one method and budget for all layers",
        "Each method's cost with the one budget at which its layers' losses add up to the plan's predicted KL,\n"
        "interpolated between two budgets. `-`: all its budgets lose more.",
        _singles(result).markdown(),
        "## Setting",
        f"Texts: {texts}. {made['windows']} windows of {made['length']:,} tokens to choose and {made['held_out']} "
        f"to verify, which share no token; the last {made['last']} tokens of each are decoded. Sink "
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
    measured = [
        Column(name, "{:.4g}".format)
        for name in ("bound aimed at", "error on windows to choose", "on held-out windows")
    ]
    out = Table("", [Column("round"), *measured, _cost_column(result, "{} cost")])
    for number, tried in enumerate(result.rounds, 1):
        costs = tried["cost"] / result.plan.made["cost"]["full"]
        out.add(number, tried["target"], tried["searched"], tried["verified"], costs)
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
