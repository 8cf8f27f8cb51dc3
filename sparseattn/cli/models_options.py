"""The options of `sparseattn models`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from sparseattn.cli import completion


@dataclass(frozen=True)
class ModelsOptions:
    """List the models known by name and the converted GGUF files, and what each takes on the disk."""

    fetch: Annotated[
        str | None,
        typer.Option(
            help="Fetch this model into the cache now, so that it needs no network later.",
            autocompletion=completion.packaged,
        ),
    ] = None
    remove: Annotated[
        list[str] | None,
        typer.Option(
            help="Remove this model, or the folder of a converted GGUF file, from the cache. Repeat the option for "
            "several.",
            autocompletion=completion.packaged,
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of the table.")] = False
