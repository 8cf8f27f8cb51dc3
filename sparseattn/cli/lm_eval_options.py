"""The options of `sparseattn lm-eval`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import options as shared

if TYPE_CHECKING:
    from sparseattn.evaluation.harness.settings import SparseSettings

# What is no option of ours is lm-eval's.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True}


@dataclass(frozen=True, eq=False)
class LmEvalOptions:
    """Run lm-evaluation-harness with sparse decoding; further arguments are those of `lm-eval run`.

    A prompt is prefilled densely but for its tail. The tail, and an answer or a continuation that is scored, are
    decoded sparsely. A run in which nothing was sparse writes no score.
    """

    context: typer.Context
    selector: Annotated[
        str | None,
        typer.Option(
            help="NAME[:arg=value,...], such as quest:page=32; `sparseattn info` lists the names. Default: quest."
        ),
    ] = None
    budget: Annotated[
        str, typer.Option(help='Rows beyond sink and window: a number, a share of the context ("5%"), a mass, or all.')
    ] = "1024"
    tail: Annotated[
        str | None,
        typer.Option(
            help="Tokens at the end of a prompt that are decoded sparsely: a number, or by task, such as "
            '"ruler_*=40,longbench2_*=200". Default: what stands behind the context, where the document tells it.'
        ),
    ] = None
    sink: shared.Sink = 4
    window: shared.Window = 64
    seal: shared.Seal = None
    dense_layers: shared.DenseLayers = 0
    roles: Annotated[Path | None, typer.Option(help="File of roles, instead of --selector.")] = None
    plan: Annotated[Path | None, typer.Option(help="File of a plan for this model, instead of --selector.")] = None
    trust: shared.Trust = None

    @cached_property
    def settings(self) -> SparseSettings:
        """How to decode."""
        from sparseattn.evaluation.harness.settings import SparseSettings

        return SparseSettings(
            selector=self.selector,
            budget=self.budget,
            sink=self.sink,
            window=self.window,
            seal=self.seal,
            dense_layers=self.dense_layers,
            roles=None if self.roles is None else str(self.roles),
            plan=None if self.plan is None else str(self.plan),
            trust=tuple(sorted(shared.trusted(self.trust, [self.selector] if self.selector else None))),
            tail=self.tail,
        )
