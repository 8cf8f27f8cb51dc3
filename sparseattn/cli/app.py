"""The console command `sparseattn`: one file a subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

import sparseattn
from sparseattn.cli import (
    bench,
    calibrate,
    capture,
    eval,
    info,
    inspect,
    machine,
    models,
    recall,
    recommend,
    report,
    serve,
    train,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(sparseattn.__version__)
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Query-aware sparse attention: capture and inspect traces, compare methods, search indexes, ask models, see what
    runs here."""


app.command("bench")(bench.bench)
app.command("calibrate")(calibrate.calibrate)
app.command("capture")(capture.capture)
app.command("eval")(eval.evaluate)
app.command("info")(info.info)
app.command("inspect")(inspect.inspect)
app.command("machine")(machine.machine)
app.command("models")(models.models)
app.command("recall")(recall.recall)
app.command("recommend")(recommend.recommend)
app.command("report")(report.report)
app.command("serve")(serve.serve)
app.command("train")(train.train)

__all__ = ["app"]
