"""What `recommend` keeps: the settings of its records, and the plan with what it was made for and what was measured."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseattn.cli.inputs import InputText
from sparseattn.cli.recommend_options import RecommendOptions
from sparseattn.core.budget import budget_record
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.intervals import student
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.recommend.objective import Objective, PlannedLayer, Predicted
from sparseattn.recommend.records import TrialRecords
from sparseattn.recommend.search import LayerOption, Proposal
from sparseattn.roles.plan import Plan

FORMAT = 2  # of the records
# Settings of records that a plan says by itself.
OF_PLAN = ("format", "model", "fingerprint", "sink", "window", "budgets", "layers")
PLAN, MADE = "plan", "made"  # kinds of a record


def settings_of(
    options: RecommendOptions,
    texts: Sequence[InputText],
    decoder: ModelDecoder,
    wide: bool,
    layers: Sequence[PlannedLayer],
) -> dict[str, Any]:
    """Return what measurements depend on: not the bound, the machine or the methods, of which more may come."""
    return {
        "format": FORMAT,
        "model": options.model,
        "fingerprint": decoder.fingerprint(),
        "dtype": str(decoder.model.dtype).removeprefix("torch."),
        "bytes_of": 2 if wide else None,
        "texts": [
            {"name": text.name, "kind": text.kind, "sha256": hashlib.sha256(text.words.encode()).hexdigest()}
            for text in texts
        ],
        "length": options.length,
        "last": options.last,
        "windows": options.windows,
        "held_out": options.held_out,
        "draws": options.draws,
        "sink": options.sink,
        "window": options.window,
        "budgets": [budget_record(budget) for budget in options.budgets],
        "layers": [[layer.index, layer.heads, layer.group, layer.size] for layer in layers],
    }


@dataclass(frozen=True, eq=False)
class Configuration:
    """A configuration that keeps the bound, as in `Recommendation`, and what the held-out windows said of it."""

    objective: Objective
    choices: dict[int, list[LayerOption]]
    proposal: Proposal
    verified: list[dict[str, Any]]
    rounds: list[dict[str, Any]]


def make_plan(
    options: RecommendOptions,
    settings: dict[str, Any],
    full: float,
    chosen: Configuration,
    seconds: float,
    measured: Sequence[dict[str, Any]],
    instead: str = "",
) -> Plan:
    """Return the plan, with what it was made for.

    Args:
        options: of the command.
        settings: of its records.
        full: what full attention costs.
        chosen: what keeps the bound.
        seconds: that this run took, without what earlier ones left in the records.
        measured: records of versions and machines that measured.
        instead: why this is no plan of what was asked for, as a sentence; "" where it is.
    """
    proposal, rounds = chosen.proposal, chosen.rounds
    made = {
        "bound": asdict(options.bound) | {"limit": options.bound.limit},
        **{name: value for name, value in settings.items() if name not in OF_PLAN},
        "methods": list(options.methods),
        "budgets": settings["budgets"],
        "by_head": options.by_head,
        "cost": _cost(chosen, full, options.length),
        "predicted": {"kl": proposal.kl},
        "searched": {options.bound.measure: rounds[-1]["searched"]},
        "rounds": list(rounds),
        "verified": _verified(chosen.verified),
        "measured": [{name: record[name] for name in ("date", "versions", "machine")} for record in measured],
        "seconds": round(seconds, 1),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        **({"instead": instead} if instead else {}),
    }
    return Plan(
        proposal.layers,
        options.plan_name if options.name or not instead else f"{options.plan_name}-by-bytes",
        model={"name": options.model, "fingerprint": settings["fingerprint"]},
        sink=options.sink,
        window=options.window,
        made=made,
    )


def _verified(windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the held-out windows measured: means with their intervals."""
    facts: dict[str, Any] = {"windows": len(windows), "tokens": sum(record["scored_tokens"] for record in windows)}
    for name in ("kl", "same_top", "nll_difference", "nll", "rows", "context", "bytes_share"):
        values = [record[name] for record in windows]
        facts[name] = {"mean": mean(values), "interval": student(values)}
    return facts


def _cost(chosen: Configuration, full: float, length: int) -> dict[str, Any]:
    """Return what the plan costs, beside full attention's `full`, and of what it was counted; length: of a window."""
    objective = chosen.objective
    facts = {
        "unit": objective.unit,
        "plan": chosen.proposal.cost,
        "full": full,
        "context": length,
        "batch": 1,
        "machine": None,
        "predicted": isinstance(objective, Predicted),
    }
    if isinstance(objective, Predicted):
        machine_name = None if objective.machine is None else objective.machine.name
        facts |= {"context": objective.context, "batch": objective.batch, "machine": machine_name}
    return facts


def record_origin(records: TrialRecords) -> None:
    """Leave in the records what measures from here on: versions and machine, unless what was measured last says so."""
    where = json.loads(json.dumps({"versions": versions(), "machine": machine()}))
    if not any(all(record[name] == where[name] for name in where) for record in records.of(MADE)[-1:]):
        records.add(MADE, {"date": datetime.date.today().isoformat(), **where})


def keep(records: TrialRecords, plan: Plan) -> None:
    """Leave the plan in the records, once."""
    chosen = {"name": plan.name, "layers": plan.records()}
    chosen |= {name: plan.made[name] for name in ("bound", "cost", "predicted", "rounds", "verified")}
    chosen = json.loads(json.dumps(chosen))
    if not any(all(record.get(name) == value for name, value in chosen.items()) for record in records.of(PLAN)):
        records.add(PLAN, chosen)


def mean(values: Sequence[float]) -> float:
    """Return the mean of one value or more."""
    return sum(values) / len(values)
