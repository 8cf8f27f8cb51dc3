"""The options of `sparseattn doctor`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.serving.vllm import defaults

if TYPE_CHECKING:
    from sparseattn.core.budget import Budget
    from sparseattn.roles.roles import Roles
    from sparseattn.serving.vllm.settings import Settings

SELECTOR, BUDGET = "quest", 1024  # of a SparseCache; vLLM's are those of `serve`


class Runner(str, Enum):
    """What decodes."""

    transformers = "transformers"
    vllm = "vllm"


@dataclass(frozen=True, eq=False)
class DoctorOptions:
    """For each layer of MODEL, say which method it would use and from which length on, or why it stays dense.

    The answer follows from the model's configuration and the settings below; nothing is decoded. Settings that change
    nothing at --length are named. The exit status is 1 if no layer would skip a token.
    """

    context: typer.Context
    model: Annotated[str, typer.Argument(metavar="MODEL", help=shared.MODEL_HELP, autocompletion=completion.models)]
    selector: Annotated[
        str | None,
        typer.Option(
            help=f"A method, NAME or NAME:arg=value,...; `sparseattn info` lists the names. Default: {SELECTOR}, for "
            f"vLLM {defaults.SELECTOR}.",
            autocompletion=completion.selectors(),
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="Tokens that a query reads besides sink and window: a number (1024), a share of the context (5%), a "
            f"share of the attention (mass:0.95), or all. Default: {BUDGET}, for vLLM {defaults.BUDGET}."
        ),
    ] = None
    roles: Annotated[Path | None, typer.Option(help="Roles file, instead of --selector.")] = None
    plan: Annotated[Path | None, typer.Option(help="Plan for this model, instead of --selector.")] = None
    trust: shared.Trust = None
    length: Annotated[
        int | None, typer.Option(help="Tokens of the sequence. Default: as many as the model supports.")
    ] = None
    engine: Annotated[
        Runner, typer.Option("--for", help="What decodes. transformers: a SparseCache; vllm: `sparseattn serve`.")
    ] = Runner.transformers
    above: Annotated[
        int,
        typer.Option(
            help="For vLLM: sequences of at most this many tokens stay dense. On CPUs `sparseattn serve` measures the "
            "number and logs it."
        ),
    ] = defaults.ABOVE
    sink: shared.Sink = defaults.SINK
    window: shared.Window = defaults.WINDOW
    dense_layers: Annotated[
        int | None,
        typer.Option(
            help=f"Number of first layers that keep full attention. Default: 0, for vLLM {defaults.DENSE_LAYERS}."
        ),
    ] = None
    json: shared.JsonLines = False

    def __post_init__(self) -> None:
        values.check_positive({"--length": self.length})
        if sum(x is not None for x in (self.selector, self.roles, self.plan)) > 1:
            raise ValueError("--selector, --roles and --plan exclude each other: give one of them")
        if self.vllm and self.roles is not None:
            raise ValueError("vLLM serves one method per layer: --for vllm takes --selector or --plan, not --roles")

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
        """The budget of all layers: the one given, or that with which the engine would start."""
        from sparseattn.core.budget import parse_budget

        return parse_budget(self.budget or str(defaults.BUDGET if self.vllm else BUDGET))

    @property
    def first_dense(self) -> int:
        """How many first layers stay dense: as given, or as the engine would start."""
        if self.dense_layers is not None:
            return self.dense_layers
        return defaults.DENSE_LAYERS if self.vllm else 0

    @cached_property
    def file(self) -> Roles | None:
        """The roles or the plan, opened."""
        from sparseattn.roles.plan import Plan
        from sparseattn.roles.roles import Roles

        modules = shared.trusted(self.trust, [self.selector] if self.selector else None, self.roles, self.plan)
        if self.plan is not None:
            return Plan.load(self.plan, modules)
        return None if self.roles is None else Roles.load(self.roles, modules)

    @property
    def settings(self) -> Settings:
        """Of an engine."""
        from sparseattn.roles.plan import Plan
        from sparseattn.serving.vllm.settings import Settings, parse

        if isinstance(self.file, Plan):
            return Settings.of_plan(self.file, self.above)
        if not isinstance(self.rows, int):
            raise ValueError(f"--for vllm needs a --budget in tokens, such as 1024, got {self.budget}")
        zones = {name: getattr(self, name) for name in ("sink", "window", "above")}
        chosen = {"selector": self.selector or defaults.SELECTOR, "budget": self.rows}
        return parse({**chosen, **zones, "dense_layers": self.first_dense})
