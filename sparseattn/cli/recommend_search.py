"""What `recommend` does: frontiers of layers, a search, and a verification on windows held out."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseattn.cli import options as shared
from sparseattn.cli.command import say
from sparseattn.cli.inputs import open_model, open_texts
from sparseattn.cli.progress import Stages, progress_bar
from sparseattn.cli.recommend_options import RecommendOptions
from sparseattn.cli.recommend_plan import MADE, Configuration, keep, make_plan, mean, record_origin, settings_of
from sparseattn.core.budget import Budget, budget_label
from sparseattn.core.context import LayerContext
from sparseattn.cost_model.machine import Machine
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.recommend.bounds import Bound
from sparseattn.recommend.candidates import candidates
from sparseattn.recommend.objective import MeasuredBytes, Objective, PlannedLayer, Predicted
from sparseattn.recommend.records import TrialRecords
from sparseattn.recommend.search import LayerOption, Proposal, propose
from sparseattn.recommend.settling import settle
from sparseattn.recommend.trials import Trials, TrialSettings, averaged
from sparseattn.recommend.windows import TextWindow, windows
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import DENSE, WINDOW, Role, Share
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.serving.vllm.settings import servable
from sparseattn.utils.devices import quarter_of_memory
from sparseattn.utils.ranks import JobRanks, in_turn

ADVICE = "Allow a larger --error, larger budgets, other methods or more --windows to choose by."


class NoPlanError(ValueError):
    """No configuration keeps the bound, in a sentence."""


@dataclass(frozen=True, eq=False)
class Recommendation:
    """What came out.

    Args:
        plan: as saved.
        layers: of the model.
        choices: by layer, what each role was measured to do.
        proposal: the one of the plan.
        objective: what was to be small.
        rounds: see `settling.Settled`.
        serves: whether vLLM can serve it.
    """

    plan: Plan
    layers: Sequence[PlannedLayer]
    choices: dict[int, list[LayerOption]]
    proposal: Proposal
    objective: Objective
    rounds: list[dict[str, Any]]
    serves: bool


def search(options: RecommendOptions, path: Path, ranks: JobRanks | None = None) -> Recommendation:
    """Measure what the records at `path` lack, choose, and verify.

    Several processes divide the windows, and all of them choose: from the same records the same.

    Raises:
        ValueError: what does not fit the model, or records of other settings.
        NoPlanError: nothing keeps the bound.
    """
    begun, stages = time.monotonic(), Stages()
    texts = open_texts(options.text)
    groups = candidates(options.methods, options.budgets, options.length, windows=not options.vllm)
    if options.budget is not None and (not ranks or ranks.first):
        _say_left_out(groups, options.budgets)
    dtype = shared.torch_dtype(options.dtype)
    stages.say(f"load {options.model}")
    model, tokenizer = open_model(options.model, dtype, options.place)
    tokens = Tokens(tokenizer)
    words = [(text.name, text.kind, tokens.ids(text.words)) for text in texts]
    every = windows(words, tokens.start, options.length, options.last, options.windows, options.held_out)
    learns = any(role.selector.learns for group in groups for role in group)
    decoder = ModelDecoder(model, sink=options.sink, window=options.window, chunk=options.chunk, queries=learns)
    decoder.check(options.length, "--length")
    wide = dtype is torch.float32  # computed so on purpose, of a model that keeps 16 bits
    layers = _layers(decoder, wide)
    settings = settings_of(options, texts, decoder, wide, layers)
    first = not ranks or ranks.first
    with in_turn(ranks):
        records = TrialRecords(path, settings, ranks.rank if ranks else None)
        if first:
            records.join()  # what a job has left that was killed
    how = TrialSettings(options.sink, options.window, options.draws, 2 if wide else None)
    trials = Trials(decoder, tokens, records, how, quarter_of_memory(options.place), record_origin)
    wanted = _objective(options, layers, groups, wide)
    searched = [window for window in every if not window.held_out]
    _measure_frontiers(trials, searched, groups, len(layers), stages, ranks)
    means = averaged(trials.frontiers(groups))
    looking = functools.partial(_found, options, trials, every, layers, means, groups, stages, ranks)
    try:
        chosen, instead = _plan_or_instead(looking, wanted, layers, _measured_bytes(options, layers, wide))
    except NoPlanError:
        if first:
            records.join()
        raise
    full, seconds = _full_cost(layers, chosen.choices), time.monotonic() - begun
    plan = make_plan(options, settings, full, chosen, seconds, records.of(MADE), instead)
    if first:
        keep(records, plan)
        records.join()
    return Recommendation(plan, layers, chosen.choices, chosen.proposal, chosen.objective, chosen.rounds, options.vllm)


def _say_left_out(groups: Sequence[Sequence[Role]], budgets: Sequence[Budget]) -> None:
    """Say which methods cannot have a budget that was asked for, and why."""
    for role in (group[0] for group in groups if group[0].method != WINDOW and group[0].selector.uses_budget):
        for budget in budgets:
            try:
                Role(role.method, budget)
            except ValueError as why:
                say(f"{role.method} is tried without --budget {budget_label(budget)}: {why}")


def _plan_or_instead(
    looking: Callable[[Objective], Configuration],
    wanted: Objective,
    layers: Sequence[PlannedLayer],
    by_bytes: MeasuredBytes,
) -> tuple[Configuration, str]:
    """Return what keeps the bound, and where it is not what was wanted but reads fewer bytes, why, as a sentence."""
    try:
        return looking(wanted), ""
    except NoPlanError as none:
        if not isinstance(wanted, Predicted):
            raise NoPlanError(f"{none} {ADVICE}") from None
        chosen = _by_bytes(none, functools.partial(looking, by_bytes))
        reason, time_of_it = str(none), _predicted_time(chosen, layers, wanted)
        return chosen, f"{reason[:1].upper()}{reason[1:]} So this plan is chosen by bytes read. {time_of_it}"


def _found(
    options: RecommendOptions,
    trials: Trials,
    every: Sequence[TextWindow],
    layers: Sequence[PlannedLayer],
    means: dict[int, dict[Role, dict[str, Any]]],
    groups: Sequence[Sequence[Role]],
    stages: Stages,
    ranks: JobRanks | None,
    objective: Objective,
) -> Configuration:
    """Choose and verify what has little of the objective; NoPlanError where nothing keeps the bound."""
    choices = _choices(layers, means, groups, objective)
    families = _families(choices) if options.vllm else [choices]
    return Configuration(
        objective, choices, *_verified(options, trials, every, layers, families, objective, stages, ranks)
    )


def _by_bytes(none: NoPlanError, looking: Callable[[], Configuration]) -> Configuration:
    """Return what keeps the bound and reads fewer bytes; NoPlanError with both reasons where nothing does either."""
    try:
        return looking()
    except NoPlanError as either:
        raise NoPlanError(f"{none} By bytes read, {either} {ADVICE}") from None


def _predicted_time(chosen: Configuration, layers: Sequence[PlannedLayer], wanted: Predicted) -> str:
    """Say what a configuration costs by what was wanted."""
    cost = full = 0.0
    for layer in layers:
        given = chosen.proposal.roles.layers[layer.index]
        roles = {given} if isinstance(given, Role) else set(given)
        cost += wanted.layer(layer, given, {role: wanted.heads(layer, role, []) for role in roles})
        full += sum(wanted.heads(layer, Role(DENSE), []))
    return f"Its step is predicted to take {cost / full:.0%} of full attention's {_unit(wanted)}."


def _objective(
    options: RecommendOptions, layers: Sequence[PlannedLayer], groups: Sequence[Sequence[Role]], wide: bool
) -> Objective:
    """Return what is to be small: bytes that are measured, or what a step is predicted to cost."""
    if not options.predicted:
        return _measured_bytes(options, layers, wide)
    rows = options.context_rows or options.length
    objective = Predicted(rows, options.batch, options.sink, options.window, options.profile)
    _doubt(options.profile, layers[0])
    _check_costs(objective, layers, groups)
    return objective


def _measured_bytes(options: RecommendOptions, layers: Sequence[PlannedLayer], wide: bool) -> MeasuredBytes:
    return MeasuredBytes(options.length, 2 if wide else layers[0].dtype.itemsize)


def _layers(decoder: ModelDecoder, wide: bool) -> list[PlannedLayer]:
    """Return those that can be sparse; of a model that was computed `wide` on purpose with the dtype that it keeps."""
    from sparseattn.models.sparse_cache import SparseCache

    layers = SparseCache(decoder.model, "window", None).prepared.layers
    depth = decoder.config.num_hidden_layers
    return [
        PlannedLayer(
            i,
            layer.heads,
            layer.group,
            layer.size,
            torch.bfloat16 if wide else layer.dtype,
            functools.partial(Share.fresh, layer=LayerContext(i, depth, rope=layer.rope, scale=layer.scale)),
        )
        for i, layer in ((i, layers[i]) for i in decoder.sparse)
    ]


def _doubt(machine: Machine | None, layer: PlannedLayer) -> None:
    """Say where a profile was measured with another shape than the layer's."""
    shape = None if machine is None else machine.about.get("shape")
    own = {"heads": layer.heads, "group": layer.group, "size": layer.size}
    if shape is not None and shape != own:
        measured, wanted = (",".join(str(shape_of[name]) for name in own) for shape_of in (shape, own))
        say(
            f"the profile was measured with --shape {measured}, and the layers have {wanted}: a profile from "
            f"`sparseattn machine --shape {wanted} --out FILE` gives better predictions"
        )


def _check_costs(objective: Predicted, layers: Sequence[PlannedLayer], groups: Sequence[Sequence[Role]]) -> None:
    """Refuse, before anything is measured, a method whose step nothing predicts there."""
    for group in groups:
        for layer in layers:
            try:
                objective.heads(layer, group[-1], [])
            except (ValueError, NotImplementedError) as why:
                raise ValueError(
                    f"the cost of {group[-1].method!r} in layer {layer.index} is not known: {why}"
                ) from why


def _measure_frontiers(
    trials: Trials,
    searched: Sequence[TextWindow],
    groups: Sequence[Sequence[Role]],
    layers: int,
    stages: Stages,
    ranks: JobRanks | None,
) -> None:
    if ranks:
        items = list(itertools.product(searched, groups))

        def measure(place: int) -> None:
            window, group = items[place]
            trials.frontier(window, [group], lambda done: None)

        stages.say(f"measure {len(groups)} methods in {layers} layers of {len(searched)} windows")
        _divide(trials, ranks, "layers", len(items), measure)
        return
    with progress_bar() as bar:
        task = bar.add_task("layers", total=len(searched) * layers * len(groups))
        for n, window in enumerate(searched, 1):
            bar.update(task, description=f"layers, window {n}/{len(searched)}")
            stages.say(f"measure {len(groups)} methods in {layers} layers, window {n} of {len(searched)}")
            trials.frontier(window, groups, lambda done: bar.advance(task, done))


def _divide(trials: Trials, ranks: JobRanks, words: str, count: int, measure: Callable[[int], object]) -> None:
    """`Trials.divide` with a progress bar of all processes."""
    with progress_bar() as bar:
        task = bar.add_task(f"{words}, {ranks.count} processes", total=count)
        trials.divide(ranks, count, measure, lambda done: bar.update(task, completed=done))


def _choices(
    layers: Sequence[PlannedLayer],
    means: dict[int, dict[Role, dict[str, Any]]],
    groups: Sequence[Sequence[Role]],
    objective: Objective,
) -> dict[int, list[LayerOption]]:
    """Return, by layer, what each role was measured to do there, full attention first."""
    roles = {role for group in groups for role in group}
    choices: dict[int, list[LayerOption]] = {}
    for layer in layers:
        nothing = [0.0] * layer.heads
        dense = Role(DENSE)
        choices[layer.index] = [LayerOption(dense, 0.0, nothing, objective.heads(layer, dense, [1.0] * layer.heads))]
        for role, point in means[layer.index].items():
            costs = objective.heads(layer, role, point["bytes_heads"])
            if role in roles and all(map(math.isfinite, costs)):
                choices[layer.index].append(LayerOption(role, point["kl"], point["kl_heads"], costs))
    return choices


def _full_cost(layers: Sequence[PlannedLayer], choices: dict[int, list[LayerOption]]) -> float:
    """Return what full attention, the first choice of each layer, costs."""
    return sum(sum(choices[layer.index][0].cost_heads) for layer in layers)


def _families(choices: dict[int, list[LayerOption]]) -> list[dict[int, list[LayerOption]]]:
    """Return the choices that an engine can serve together: of one size of pages and of entries."""
    shapes: dict[str, tuple[int, int] | None] = {}
    for every in choices.values():
        for choice in every:
            served = None if choice.role.method == DENSE else servable(choice.role.method)
            shapes[choice.role.method] = (served.page, served.unit) if isinstance(served, PageSelector) else None
    sizes = sorted({shape for shape in shapes.values() if shape is not None})
    if not sizes:
        return [choices]
    return [
        {
            layer: [choice for choice in every if shapes[choice.role.method] in (None, size)]
            for layer, every in choices.items()
        }
        for size in sizes
    ]


def _verified(
    options: RecommendOptions,
    trials: Trials,
    every: Sequence[TextWindow],
    layers: Sequence[PlannedLayer],
    families: Sequence[dict[int, list[LayerOption]]],
    objective: Objective,
    stages: Stages,
    ranks: JobRanks | None,
) -> tuple[Proposal, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the configuration that keeps the bound on windows held out, what was measured of it there, and the rounds.

    Raises:
        NoPlanError: there is none.
    """
    bound = options.bound
    searched, held_out = ([window for window in every if window.held_out == out] for out in (False, True))
    verified: list[dict[str, Any]] = []  # of the newest proposal
    numbers = itertools.count(1)

    def losses(proposal: Proposal, where: Sequence[TextWindow], what: str) -> list[dict[str, Any]]:
        records = []
        stages.say(f"{what}: a plan on {len(where)} {'window' if len(where) == 1 else 'windows'}")
        if ranks:
            _divide(trials, ranks, what, len(where), lambda place: trials.agreement(where[place], proposal.roles))
        with progress_bar() as bar:
            task = bar.add_task(what, total=len(where))
            for window in where:
                records.append(trials.agreement(window, proposal.roles))
                bar.advance(task)
        return records

    def loss(proposal: Proposal) -> float:
        records = losses(proposal, searched, f"search {next(numbers)}")
        return mean([bound.loss(record) for record in records])

    def verify(proposal: Proposal, n: int) -> float:
        verified[:] = losses(proposal, held_out, f"verification {n}")
        return mean([bound.loss(record) for record in verified])

    full = _full_cost(layers, families[0])

    def proposed(limit: float) -> Proposal:
        return propose(layers, families, limit, options.by_head, objective)

    settled = settle(proposed, loss, verify, bound.limit, bound.power, full)
    if settled.proposal is not None:
        return settled.proposal, verified, settled.rounds
    raise _none_keeps(bound, settled.rounds, full, _unit(objective))


def _none_keeps(bound: Bound, rounds: Sequence[dict[str, Any]], full: float, unit: str) -> NoPlanError:
    """Return what is said where no round kept the bound; full: what full attention costs, in `unit`."""
    tried = "; ".join(
        f"{100 * bound.share(tried['verified']):.3g} % at {tried['cost'] / full:.0%} of full attention's {unit}"
        for tried in rounds
    )
    return NoPlanError(
        f"no configuration that costs less than full attention keeps {bound} on the held-out windows"
        f"{f' (verified: {tried})' if tried else ''}."
    )


def _unit(objective: Objective) -> str:
    if not isinstance(objective, Predicted):
        return objective.unit
    return f"predicted {objective.unit}" + ("" if objective.machine is None else f" on {objective.machine.name}")
