"""The options of `sparseattn models`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class ModelsOptions:
    """List the models known by name, and what is kept of them and of converted GGUF files."""

    fetch: Annotated[str | None, typer.Option(help="Fetch this model now, so that it is there without a network.")] = (
        None
    )
    remove: Annotated[
        list[str] | None,
        typer.Option(help="Remove this model, or the folder of a converted GGUF file, from the cache."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="JSON lines instead of the table.")] = False
