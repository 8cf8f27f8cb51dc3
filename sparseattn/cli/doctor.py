"""`sparseattn doctor`: what settings make of every layer of a model, before anything is run with them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.cli.command import command, say
from sparseattn.cli.inputs import open_model
from sparseattn.core.budget import Budget, parse_budget
from sparseattn.core.diagnosis import LayerDiagnosis, nothing_active
from sparseattn.core.effects import idle_above, idle_budget, idle_layers
from sparseattn.reporting.doctor_tables import layers_table
from sparseattn.reporting.terminal import table_screen
from sparseattn.roles.plan import Plan
from sparseattn.roles.roles import Roles
from sparseattn.serving.vllm.settings import DEFAULT, Settings, parse

SELECTOR = "quest"
ABOVE = Settings.above
IDLE = 1  # the exit status where no layer would leave a row out


class Runner(str, Enum):
    """What decodes."""

    transformers = "transformers"
    vllm = "vllm"


@dataclass(frozen=True, eq=False)
class DoctorOptions:
    """The options of `doctor`."""

    context: typer.Context
    model: Annotated[str, typer.Argument(metavar="MODEL", help=shared.MODEL_HELP)]
    selector: Annotated[
        str | None,
        typer.Option(help=f"NAME[:arg=value,...]; default {SELECTOR}, and for vLLM {DEFAULT}."),
    ] = None
    budget: Annotated[
        str, typer.Option(help='Rows beyond sink and window: a number, a share ("5%"), a mass, or all.')
    ] = "1024"
    roles: Annotated[Path | None, typer.Option(help="File of roles, instead of --selector.")] = None
    plan: Annotated[Path | None, typer.Option(help="File of a plan for this model, instead of --selector.")] = None
    trust: shared.Trust = None
    length: Annotated[int | None, typer.Option(help="Rows of the sequence; default the model's positions.")] = None
    engine: Annotated[
        Runner, typer.Option("--for", help="transformers: a SparseCache; vllm: a server of `sparseattn serve`.")
    ] = Runner.transformers
    above: Annotated[int, typer.Option(help="For vLLM: sequences of so many rows or fewer stay dense.")] = (
        Settings.above
    )
    sink: shared.Sink = 4
    window: shared.Window = 64
    dense_layers: shared.DenseLayers = 0
    json: shared.JsonLines = False

    def __post_init__(self) -> None:
        values.check_positive({"--length": self.length})
        if sum(x is not None for x in (self.selector, self.roles, self.plan)) > 1:
            raise ValueError("--selector, --roles and --plan each say what a layer reads: give one of them")
        if self.vllm and self.roles is not None:
            raise ValueError("vLLM serves one method a layer: --for vllm takes --selector or --plan, and no --roles")

    @property
    def vllm(self) -> bool:
        """Whether vLLM decodes."""
        return self.engine is Runner.vllm

    @cached_property
    def given(self) -> set[str]:
        """The parameters that the user gave."""
        return shared.given_options(self.context)

    @cached_property
    def rows(self) -> Budget:
        """The budget of all layers."""
        return parse_budget(self.budget)

    @cached_property
    def file(self) -> Roles | None:
        """The roles or the plan, opened."""
        modules = shared.trusted(self.trust, [self.selector] if self.selector else None)
        if self.plan is not None:
            return Plan.load(self.plan, modules)
        return None if self.roles is None else Roles.load(self.roles, modules)

    @property
    def settings(self) -> Settings:
        """Of an engine."""
        if isinstance(self.file, Plan):
            return Settings.of_plan(self.file, self.above)
        if not isinstance(self.rows, int):
            raise ValueError(f"for vLLM a --budget is rows, got {self.budget}")
        names = ("sink", "window", "dense_layers", "above")
        zones = {name: getattr(self, name) for name in names}
        return parse({"selector": self.selector or DEFAULT, "budget": self.rows, **zones})


@command(DoctorOptions)
def run(options: DoctorOptions) -> None:
    """Say of each layer of MODEL from which row on it is sparse and by which method, or why it is dense.

    Rows are those of the settings; nothing is decoded. Settings without effect at --length are named. The exit status
    is 1 where no layer would leave a row out.
    """
    _ = options.file
    model, _ = open_model(options.model, None, torch.device("cpu"))
    config = model.config.get_text_config(decoder=True)
    length = options.length or getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"{options.model} does not say how many positions it has: give a --length")
    lines, most = _lines(options, model, length)
    if options.json:
        typer.echo(
            "\n".join(json.dumps({"model": options.model, "for": options.engine.value, **asdict(x)}) for x in lines)
        )
    else:
        how = "vLLM" if options.vllm else "a SparseCache"
        table_screen().print(layers_table(f"{options.model} in {how}, a sequence of {length:,} rows", lines))
    for sentence in _without_effect(options, length, most):
        say(sentence, "yellow")
    if nothing_active(lines):
        say(f"nothing is sparse at {length:,} rows", "red")
        raise typer.Exit(IDLE)


def _lines(options: DoctorOptions, model: Any, length: int) -> tuple[list[LayerDiagnosis], int]:
    """Return a line for each layer, and how many of the first may stay dense so that one is sparse."""
    from sparseattn.models.diagnosis import diagnosed
    from sparseattn.models.sparse_cache import SparseCache
    from sparseattn.serving.vllm.diagnosis import diagnosed_for_vllm

    whole = SparseCache(model, "window", None, sink=0, window=1)
    if options.vllm:
        return diagnosed_for_vllm(whole, options.settings, length), len(whole.sparse_layers) - 1
    zones: dict[str, Any] = {"sink": options.sink, "window": options.window, "seal": None}
    file, most = options.file, max(whole.sparse_layers)
    if isinstance(file, Plan):
        return diagnosed(SparseCache(model, plan=file, seal=None), length), most
    if file is not None:
        return diagnosed(SparseCache(model, budget=options.rows, roles=file, **zones), length), most
    zones["dense_layers"] = min(options.dense_layers, len(whole.layers))
    return diagnosed(SparseCache(model, options.selector or SELECTOR, options.rows, **zones), length), most


def _without_effect(options: DoctorOptions, length: int, most: int) -> list[str]:
    """Return a sentence for each setting that changes nothing at a length."""
    found: list[str | None] = []
    if options.vllm:
        found.append(idle_above(options.above, length, "the sequence"))
    elif "above" in options.given:
        found.append("--above is of vLLM (--for vllm): a SparseCache is sparse from the first row on that it can leave")
    of_plan = shared.spelled(sorted({"budget", "sink", "window", "dense_layers"} & options.given))
    if options.file is None:
        found.append(idle_budget(options.rows, length, options.sink, options.window, "the sequence"))
        found.append(idle_layers(options.dense_layers, most))
    elif isinstance(options.file, Plan) and of_plan:
        found.append(f"a plan says what each layer reads: {of_plan} change nothing")
    return [sentence for sentence in found if sentence is not None]
