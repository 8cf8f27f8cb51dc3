"""The options of `sparseattn inspect`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import options as shared
from sparseattn.evaluation.builtin_traces import BUILTIN


@dataclass(frozen=True)
class InspectOptions:
    """Measure why methods find or miss rows: how far queries lie from keys, how few rows hold the attention, how these
    change from token to token, and how loose Quest's bounds are."""

    traces: Annotated[
        list[str], typer.Argument(help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)}).")
    ]
    sink: shared.Sink = 4
    window: shared.Window = 64
    layers: shared.Layers = None
    last: Annotated[int, typer.Option(help="Tokens at the end of each trace that are measured.")] = 32
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records, inspect.jsonl, one a layer, and the figures; an earlier run's are replaced."
        ),
    ] = Path("inspect")
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Every head apart in the tables; the records always hold them.")
    ] = False
    json: shared.JsonLines = False
    figures: shared.Figures = True
