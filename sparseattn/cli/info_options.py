"""The options of `sparseattn info`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class InfoOptions:
    """Show versions, devices, which kernels run here, and methods, traces and texts by name; or what FILES hold.

    A method's name in place of a file shows its paper, what it reads, where it departs from the paper, and its
    arguments. Every tensor of a file is read and compared with its hash; the exit status is 2 where a file is damaged.
    """

    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Methods by name; traces, artefacts, calibrations and index files; none: what runs here."),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="A JSON object, of several files one a line, instead of text.")
    ] = False
