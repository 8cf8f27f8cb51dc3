"""`sparseattn info`: versions, devices, and which kernels can run here."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer
from rich.console import Console

from sparseattn.cli.common import in_a_sentence
from sparseattn.environment import kernels, machine, versions
from sparseattn.selectors import SELECTORS


@in_a_sentence
def info(json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False) -> None:
    """Show versions, devices, which kernels can run here, and the selectors by name."""
    facts = {"versions": versions(), "machine": machine(), "kernels": kernels(), "selectors": list(SELECTORS)}
    if json:
        typer.echo(json_module.dumps(facts))
        return
    out = Console(highlight=False)
    for title, value in facts.items():
        out.print(f"[bold]{title}[/bold]")
        if isinstance(value, dict):
            for name, what in value.items():
                out.print(f"  {name:14} {what}", markup=False, soft_wrap=True)
        else:
            out.print(f"  {', '.join(value)}", markup=False)
