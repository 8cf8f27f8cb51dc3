"""The console command `sparseattn`: its commands by name, each imported when it is called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import sparseattn

# A command is a module of this folder with a function `run`. What stands here is its line in `sparseattn --help`.
COMMANDS = {
    "bench": "Compare selectors with full attention, step by step, at the end of traces.",
    "calibrate": "Calibrate Loki, Double Sparsity or Kascade on traces, or fit a selector's estimates.",
    "capture": "Run a model over texts and write its queries, keys and values as traces.",
    "eval": "Ask a model about long prompts, with every selector and budget, and score its answers.",
    "info": "Show what runs here, and what is known by name; or what a file holds.",
    "inspect": "Measure on traces why methods find or miss rows.",
    "machine": "Measure this CPU, show a machine's figures, or predict decode steps on it.",
    "models": "List, fetch and remove the models known by name.",
    "recall": "Measure recall@k against the share of keys scanned.",
    "recommend": "Choose a method and a budget for every layer of a model, within a bound.",
    "report": "Write one HTML page from the records of other commands.",
    "serve": "Serve a model by vLLM's OpenAI-compatible server, with sparse attention.",
    "train": "Train SAAP's centroids and query classifiers on traces.",
}


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command in the module, which is what runs."""
        return load(str(self.name)).make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """All commands, of which none is imported yet."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, line in COMMANDS.items():
            self.add_command(LazyCommand(name, help=line))


def load(name: str) -> Any:
    """Return the command of a name; say in a sentence which package is missing where its module cannot be imported."""
    try:
        module = importlib.import_module(f"sparseattn.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sparseattn":
            raise
        typer.echo(f"sparseattn: `sparseattn {name}` needs the package {error.name}, which is not installed", err=True)
        raise typer.Exit(2) from None
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(module.run)
    return typer.main.get_command(alone)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(sparseattn.__version__)
        raise typer.Exit


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Query-aware sparse attention: capture and inspect traces, compare methods, search indexes, ask models, see what
    runs here."""


__all__ = ["app"]
