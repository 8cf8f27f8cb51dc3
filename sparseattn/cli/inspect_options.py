"""The options of `sparseattn inspect`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion
from sparseattn.cli import options as shared
from sparseattn.evaluation.builtin_traces import BUILTIN


@dataclass(frozen=True)
class InspectOptions:
    """Measure on traces why methods find or miss tokens.

    The measures are: how far queries are from keys, how few tokens hold the attention, how these tokens change from
    step to step, and how loose Quest's bounds are.
    """

    traces: Annotated[
        list[str],
        typer.Argument(
            help=f"Trace files, or built-in traces by name: {', '.join(BUILTIN)}.", autocompletion=completion.traces
        ),
    ]
    sink: shared.Sink = 4
    window: shared.Window = 64
    layers: shared.Layers = None
    last: Annotated[int, typer.Option(help="Number of tokens to measure, at the end of each trace.")] = 32
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records (inspect.jsonl, one per layer) and the figures; it replaces those of an "
            "earlier run."
        ),
    ] = Path("inspect")
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Show every head separately in the tables; the records always do.")
    ] = False
    json: shared.JsonLines = False
    figures: shared.Figures = True
