"""The options of `sparseattn info`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion


@dataclass(frozen=True)
class InfoOptions:
    """Show versions, devices, the kernels that run here, and all names: methods, traces and texts.

    With the name of a method, show its paper, what it reads, where it differs from the paper, and its arguments. With
    a file, show what it holds, and compare every tensor with its hash; the exit status is 2 if a file is damaged.
    """

    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Names of methods, or files: traces, trained indexes, calibrations and saved indexes. Default: show "
            "what runs here.",
            autocompletion=completion.selectors(),
        ),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object instead of text; for several files one per line.")
    ] = False
