"""Runs what `recommend` was asked for: frontiers of layers, a search, and a verification on windows held out."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseattn.cli.common import errors, open_model, progress_bar
from sparseattn.cli.recommend_asked import Asked, NoPlan, texts_of
from sparseattn.cli.recommend_made import MADE, keep, made_plan, mean, say_where, settings_of
from sparseattn.core.context import LayerContext
from sparseattn.cost_model.machine import Machine
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.recommend.candidates import candidates
from sparseattn.recommend.objective import Layer, MeasuredBytes, Objective, Predicted
from sparseattn.recommend.records import Records
from sparseattn.recommend.search import Choice, Proposal, propose
from sparseattn.recommend.settling import settle
from sparseattn.recommend.trials import Settings, Trials, averaged
from sparseattn.recommend.windows import Window, windows
from sparseattn.roles.plan import Plan
from sparseattn.roles.roles import DENSE, Role, Share
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.utils.devices import quarter_of_memory


@dataclass(frozen=True, eq=False)
class Found:
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
    layers: Sequence[Layer]
    choices: dict[int, list[Choice]]
    proposal: Proposal
    objective: Objective
    rounds: list[dict[str, Any]]
    serves: bool


def run(asked: Asked, path: Path) -> Found:
    """Measures what the records at `path` lack, chooses, and verifies.

    Raises:
        ValueError: what does not fit the model, or records of other settings.
        NoPlan: nothing keeps the bound.
    """
    begun = time.monotonic()
    texts = texts_of(asked.texts)
    groups = candidates(asked.methods, asked.budgets, asked.length, windows=not asked.vllm)
    model, tokenizer = open_model(asked.model, asked.dtype, asked.device)
    tokens = Tokens(tokenizer)
    every = windows(
        [(name, kind, tokens.ids(words)) for name, kind, words in texts],
        tokens.start,
        asked.length,
        asked.last,
        asked.search,
        asked.held_out,
    )
    learns = any(role.selector.learns for group in groups for role in group)
    decoder = ModelDecoder(model, sink=asked.sink, window=asked.window, chunk=asked.chunk, queries=learns)
    decoder.check(asked.length, "--length")
    wide = asked.dtype is torch.float32  # computed so on purpose, of a model that keeps 16 bits
    layers = _layers(decoder, wide)
    settings = settings_of(asked, texts, decoder, wide, layers)
    records = Records(path, settings)
    trials = Trials(
        decoder,
        tokens,
        records,
        Settings(asked.sink, asked.window, asked.draws, 2 if wide else None),
        quarter_of_memory(asked.device),
        say_where,
    )
    searched = [one for one in every if not one.held_out]
    objective: Objective
    if asked.predicted:
        objective = Predicted(asked.context or asked.length, asked.batch, asked.sink, asked.window, asked.machine)
        _doubt(asked.machine, layers[0])
        _check_costs(objective, layers, groups)
    else:
        objective = MeasuredBytes(asked.length, 2 if wide else layers[0].dtype.itemsize)
    _frontiers(trials, searched, groups, len(layers))
    choices = _choices(layers, averaged(trials.frontiers(groups)), groups, objective)
    families = _families(choices) if asked.vllm else [choices]
    proposal, held, rounds = _verified(asked, trials, every, layers, families, objective)
    plan = made_plan(
        asked, settings, layers, choices, proposal, objective, rounds, held, time.monotonic() - begun, records.of(MADE)
    )
    keep(records, plan)
    return Found(plan, layers, choices, proposal, objective, rounds, asked.vllm)


def _layers(decoder: ModelDecoder, wide: bool) -> list[Layer]:
    """Those that can be sparse; of a model that was computed `wide` on purpose with the dtype that it keeps."""
    from sparseattn.models.sparse_cache import SparseCache

    found = SparseCache(decoder.model, "window", None).prepared.layers
    depth = decoder.config.num_hidden_layers
    return [
        Layer(
            i,
            one.heads,
            one.group,
            one.size,
            torch.bfloat16 if wide else one.dtype,
            functools.partial(Share.fresh, layer=LayerContext(i, depth, rope=one.rope, scale=one.scale)),
        )
        for i, one in ((i, found[i]) for i in decoder.sparse)
    ]


def _doubt(machine: Machine | None, layer: Layer) -> None:
    """Says where a profile was measured with another shape than the layer's."""
    shape = None if machine is None else machine.about.get("shape")
    own = {"heads": layer.heads, "group": layer.group, "size": layer.size}
    if shape is not None and shape != own:
        measured, wanted = (",".join(str(one[name]) for name in own) for one in (shape, own))
        errors.print(
            f"sparseattn: the profile was measured with --shape {measured}, and layers are {wanted}: a profile by "
            f"`sparseattn machine --shape {wanted} --out FILE` predicts them better",
            soft_wrap=True,
        )


def _check_costs(objective: Predicted, layers: Sequence[Layer], groups: Sequence[Sequence[Role]]) -> None:
    """ValueError, before anything is measured, for a method whose step nothing predicts there."""
    for group in groups:
        for layer in layers:
            try:
                objective.heads(layer, group[-1], [])
            except (ValueError, NotImplementedError) as why:
                raise ValueError(f"what {group[-1].method!r} costs in layer {layer.index} is not known: {why}") from why


def _frontiers(trials: Trials, searched: Sequence[Window], groups: Sequence[Sequence[Role]], layers: int) -> None:
    with progress_bar() as bar:
        task = bar.add_task("", total=len(searched) * layers * len(groups))
        for n, one in enumerate(searched, 1):
            where = f"{one.prompt.facts['text']} from token {one.prompt.facts['start']}"
            bar.update(task, description=f"what each layer loses: window {n}/{len(searched)}, {where}")
            trials.frontier(one, groups, lambda done: bar.advance(task, done))


def _choices(
    layers: Sequence[Layer],
    means: dict[int, dict[Role, dict[str, Any]]],
    groups: Sequence[Sequence[Role]],
    objective: Objective,
) -> dict[int, list[Choice]]:
    asked = {role for group in groups for role in group}
    found: dict[int, list[Choice]] = {}
    for layer in layers:
        nothing = [0.0] * layer.heads
        dense = Role(DENSE)
        found[layer.index] = [Choice(dense, 0.0, nothing, objective.heads(layer, dense, [1.0] * layer.heads))]
        for role, point in means[layer.index].items():
            costs = objective.heads(layer, role, point["bytes_heads"])
            if role in asked and all(map(math.isfinite, costs)):
                found[layer.index].append(Choice(role, point["kl"], point["kl_heads"], costs))
    return found


def _families(choices: dict[int, list[Choice]]) -> list[dict[int, list[Choice]]]:
    """The choices that an engine can serve together: of one size of pages and of entries."""
    shapes: dict[str, tuple[int, int] | None] = {}
    for every in choices.values():
        for one in every:
            made = one.role.selector
            shapes[one.role.method] = (made.page, made.unit) if isinstance(made, PageSelector) else None
    sizes = sorted({shape for shape in shapes.values() if shape is not None})
    if not sizes:
        return [choices]
    return [
        {layer: [one for one in every if shapes[one.role.method] in (None, size)] for layer, every in choices.items()}
        for size in sizes
    ]


def _verified(
    asked: Asked,
    trials: Trials,
    every: Sequence[Window],
    layers: Sequence[Layer],
    families: Sequence[dict[int, list[Choice]]],
    objective: Objective,
) -> tuple[Proposal, list[dict[str, Any]], list[dict[str, Any]]]:
    """The configuration that keeps the bound on windows held out, what was measured of it there, and the rounds."""
    bound = asked.bound
    searched, held_out = ([one for one in every if one.held_out == held] for held in (False, True))
    held: list[dict[str, Any]] = []

    def losses(proposal: Proposal, where: Sequence[Window], what: str) -> list[dict[str, Any]]:
        found = []
        with progress_bar() as bar:
            task = bar.add_task(what, total=len(where))
            for one in where:
                found.append(trials.agreement(one, proposal.roles))
                bar.advance(task)
        return found

    def loss(proposal: Proposal) -> float:
        return mean(
            [bound.loss(one) for one in losses(proposal, searched, "search: a configuration, window by window")]
        )

    def verify(proposal: Proposal, n: int) -> float:
        held[:] = losses(proposal, held_out, f"verification {n}, window by window")
        return mean([bound.loss(one) for one in held])

    full = sum(sum(families[0][layer.index][0].cost_heads) for layer in layers)
    settled = settle(
        lambda limit: propose(layers, families, limit, asked.by_head, objective),
        loss,
        verify,
        bound.limit,
        bound.power,
        full,
    )
    if settled.proposal is not None:
        return settled.proposal, held, settled.rounds
    unit = f"{'predicted ' if asked.predicted else ''}{objective.unit}"
    unit += f" on {asked.machine.name}" if asked.machine is not None else ""
    tried = "".join(
        f" {100 * bound.share(one['verified']):.3g} % at {one['cost'] / full:.0%} of full attention's {unit};"
        for one in settled.rounds
    )
    raise NoPlan(
        f"no configuration was found that keeps {bound} on the windows held out and costs less than full attention"
        f"{' (verified:' + tried.rstrip(';') + ')' if tried else ''}: allow a larger --error, larger budgets or "
        f"other methods"
    )
