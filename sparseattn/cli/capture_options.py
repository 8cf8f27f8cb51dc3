"""The options of `sparseattn capture`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion
from sparseattn.cli import options as shared


@dataclass(frozen=True)
class CaptureOptions:
    """Run a causal language model with full attention over texts, and write its queries, keys and values as traces.

    Several texts give one trace each, named after its text. The same command again keeps the traces that are finished.
    """

    model: Annotated[str, typer.Option(help=shared.MODEL_HELP, autocompletion=completion.models)]
    text: Annotated[
        list[str],
        typer.Option(
            help=f"Text to run the model on: a folder of UTF-8 files, {shared.TEXT_HELP} Repeat the option for "
            "several.",
            autocompletion=completion.texts,
        ),
    ]
    out: Annotated[Path, typer.Option(help="Trace to write, NAME.safetensors; for several texts a folder.")] = Path(
        "trace.safetensors"
    )
    layers: shared.Layers = None
    tokens: Annotated[
        int | None, typer.Option(help="Number of tokens to use, from the beginning of each text. Default: all.")
    ] = None
    queries: Annotated[
        int | None,
        typer.Option(help="Number of tokens, at the end of each text, whose queries are recorded. Default: all."),
    ] = None
    ahead: Annotated[
        bool,
        typer.Option(
            "--ahead",
            help="Also record the queries that each layer predicts from the previous layer's input, for infinigen.",
        ),
    ] = False
    with_text: Annotated[
        bool,
        typer.Option(
            "--with-text",
            help="Keep the text of each token in the trace, which `sparseattn report --trace` then shows.",
        ),
    ] = False
    chunk: shared.Chunk = 1024
    dtype: Annotated[
        shared.Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help=f"Dtype of the model and of the trace: {', '.join(shared.Dtype)}. Default: the model's.",
        ),
    ] = None
    device: shared.Device = None

    def __post_init__(self) -> None:
        for name in ("tokens", "queries", "chunk"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} must be 1 or more, got {number}")
        if self.tokens is not None and self.queries is not None and self.queries > self.tokens:
            raise ValueError(f"--queries must be at most --tokens {self.tokens}, got {self.queries}")
