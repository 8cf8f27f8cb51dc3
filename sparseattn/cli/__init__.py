"""The console command `sparseattn`: one file a subcommand."""

from __future__ import annotations

import typer

from sparseattn.cli import bench, capture, info

app = typer.Typer(
    help="Query-aware sparse attention: capture traces, compare methods, see what runs here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench.bench)
app.command("capture")(capture.capture)
app.command("info")(info.info)

__all__ = ["app"]
