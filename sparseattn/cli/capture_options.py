"""The options of `sparseattn capture`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import options as shared


@dataclass(frozen=True)
class CaptureOptions:
    """Run a causal language model over texts with its own attention and write queries, keys and values.

    Of several texts each has a trace of its name; traces that are there already, from the same command, are kept.
    """

    model: Annotated[str, typer.Option(help=shared.MODEL_HELP)]
    text: Annotated[
        list[str],
        typer.Option(help=f"To run the model on: a folder of UTF-8 files, {shared.TEXT_HELP} May be repeated."),
    ]
    out: Annotated[
        Path, typer.Option(help="Trace to write, a .safetensors file; a folder of traces for several texts.")
    ] = Path("trace.safetensors")
    layers: shared.Layers = None
    tokens: Annotated[int | None, typer.Option(help="Use only the first TOKENS tokens of each text.")] = None
    queries: Annotated[
        int | None, typer.Option(help="Record the queries of the last QUERIES tokens alone; default of all.")
    ] = None
    ahead: Annotated[
        bool,
        typer.Option(
            "--ahead", help="Record too the queries that layers make of the input of the layer before, for infinigen."
        ),
    ] = False
    with_text: Annotated[
        bool,
        typer.Option(
            "--with-text", help="Keep the text in the trace, a piece a token, for `sparseattn report --trace`."
        ),
    ] = False
    chunk: shared.Chunk = 1024
    dtype: Annotated[
        shared.Dtype | None,
        typer.Option(
            metavar="DTYPE", help=f"{', '.join(shared.Dtype)}: the model's and the trace's; default the model's."
        ),
    ] = None
    device: shared.Device = None

    def __post_init__(self) -> None:
        for name in ("tokens", "queries", "chunk"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} is at least 1, got {number}")
