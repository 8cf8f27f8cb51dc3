"""The options of `sparseattn lm-eval`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion
from sparseattn.cli import options as shared

if TYPE_CHECKING:
    from sparseattn.evaluation.harness.settings import SparseSettings

# What is no option of ours is lm-eval's.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True}


@dataclass(frozen=True, eq=False)
class LmEvalOptions:
    """Run lm-evaluation-harness with sparse decoding. All other arguments go to `lm-eval run`.

    The beginning of a prompt is prefilled with full attention. Its tail, and the answer or the continuation that is
    scored, are decoded sparsely. A run in which nothing was sparse writes no score.
    """

    context: typer.Context
    selector: Annotated[
        str | None,
        typer.Option(
            help="A method, NAME or NAME:arg=value,..., such as quest:page=32; `sparseattn info` lists the names. "
            "Default: quest.",
            autocompletion=completion.selectors(),
        ),
    ] = None
    budget: Annotated[
        str,
        typer.Option(
            help="Tokens that a query reads besides sink and window: a number (1024), a share of the context (5%), a "
            "share of the attention (mass:0.95), or all."
        ),
    ] = "1024"
    tail: Annotated[
        str | None,
        typer.Option(
            help="Number of tokens at the end of a prompt that are decoded sparsely: one number, or one per task, such "
            'as "ruler_*=40,longbench2_*=200". Default: what follows the context, if the task says what its context is.'
        ),
    ] = None
    sink: shared.Sink = 4
    window: shared.Window = 64
    seal: shared.Seal = None
    dense_layers: shared.DenseLayers = 0
    roles: Annotated[Path | None, typer.Option(help="Roles file, instead of --selector.")] = None
    plan: Annotated[Path | None, typer.Option(help="Plan for this model, instead of --selector.")] = None
    trust: shared.Trust = None
    tensor_parallel: shared.TensorParallel = False

    @cached_property
    def settings(self) -> SparseSettings:
        """How to decode."""
        from sparseattn.evaluation.harness.settings import SparseSettings

        selectors = [self.selector] if self.selector else None
        return SparseSettings(
            selector=self.selector,
            budget=self.budget,
            sink=self.sink,
            window=self.window,
            seal=self.seal,
            dense_layers=self.dense_layers,
            roles=None if self.roles is None else str(self.roles),
            plan=None if self.plan is None else str(self.plan),
            trust=tuple(sorted(shared.trusted(self.trust, selectors, self.roles, self.plan))),
            tail=self.tail,
        )
