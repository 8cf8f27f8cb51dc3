"""The console command `sparseattn`: its commands by name, each imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import sparseattn
from sparseattn.cli.help_groups import grouped

# A command NAME is the function `run` of NAME.py in this folder, its options and its help are in NAME_options.py. What
# stands here is its line in `sparseattn --help`, where commands are in groups. GROUPS of the options are in its help.
GROUPS = {
    "Compare methods": {
        "bench": "Compare methods with full attention, step by step, at the end of traces.",
        "recall": "Measure recall@k against the share of keys scanned.",
        "inspect": "Measure on traces why methods find or miss tokens.",
        "report": "Write one HTML page from the records of other commands.",
    },
    "Choose one": {
        "recommend": "Choose a method and a budget for every layer of a model that keep an error bound.",
        "eval": "Ask a model about long prompts with every method, and score its answers.",
        "doctor": "Say for each layer of a model from which length on it would be sparse, or why not.",
        "lm-eval": "Run lm-evaluation-harness with sparse decoding, and prove that it was sparse.",
        "machine": "Measure this CPU, show a machine's figures, or predict decode steps on it.",
    },
    "Run it": {
        "serve": "Serve a model with vLLM's OpenAI-compatible server and sparse attention.",
    },
    "Prepare": {
        "capture": "Run a model on texts and write its queries, keys and values as traces.",
        "train": "Make from traces the file that a method learns or is calibrated by.",
        "calibrate": "Another name of train, for calibrations: Loki, Double Sparsity, Kascade and others.",
        "models": "List, fetch and remove the models known by name.",
        "info": "Show what runs here and all names (methods, traces, texts), or describe files.",
    },
}
# Divide their work under torchrun.
SEVERAL = ("bench", "calibrate", "capture", "eval", "lm-eval", "recall", "recommend", "train")
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
UsageError: Any = typer.BadParameter.__base__  # of click, which newer versions of typer hold inside
INTERRUPTED = 130  # the status of a command that Ctrl-C ended
WANTED = {"int": "a whole number", "float": "a number"}  # by the kind of a fault of pydantic's
NO_NUMPY = "Failed to initialize NumPy"  # torch's warning, where no extra brought it


class LazyCommand(TyperCommand):
    """A command whose options are imported when they are asked for, and the rest when it runs."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command that `load` makes, which is what runs; no option of it is an empty text."""
        words = list(args)  # parsing takes them away
        context = load(str(self.name)).make_context(info_name, args, parent, **extra)
        if not context.resilient_parsing:
            _refuse_empty(context, words)
        return context


def _refuse_empty(context: Any, words: list[str]) -> None:
    """Refuse an option or an argument without a character: a path would be the current folder, a name the default."""
    given, *_ = context.command.make_parser(context).parse_args(args=words)  # texts, of which a context has made paths
    for parameter in context.command.params:
        value = given.get(parameter.name)
        if "" in (value if isinstance(value, list | tuple) else (value,)):
            raise typer.BadParameter("it must not be empty, got ''", ctx=context, param=parameter)


class Commands(TyperGroup):
    """All commands, of which none is imported yet."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, line in COMMANDS.items():
            self.add_command(LazyCommand(name, help=line))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the groups."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, group by group."""
        width = max(map(len, COMMANDS))
        for title, lines in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, line in lines.items()])

    def main(self, *arguments: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command. A wrong command line ends in one line with status 2, Ctrl-C in one line with status 130."""
        quiet = {**extra, "standalone_mode": False}
        if not standalone_mode:
            return super().main(*arguments, **quiet)
        try:
            status = super().main(*arguments, **quiet)
        except UsageError as error:
            _say(f"{_sentence(error)} See `{'sparseattn' if error.ctx is None else error.ctx.command_path} --help`.")
            status = 2
        except (KeyboardInterrupt, typer.Abort):
            status = INTERRUPTED
        if status == INTERRUPTED:
            _say("interrupted")
        sys.exit(status)


def _sentence(error: Any) -> str:
    """Return what is wrong with a command line as one line."""
    for fault in getattr(error.__cause__, "errors", list)():  # of pydantic, whose words are of Python
        if should := WANTED.get(fault["type"].partition("_")[0]):
            return f"{'/'.join(error.param.opts)} must be {should}, got {fault['input']!r}."
    words = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    return f"{words[:1].lower()}{words[1:]}{'' if words.endswith(('.', '?')) else '.'}"


def _say(line: str) -> None:
    typer.secho(f"sparseattn: {line}", fg="red", err=True)


def load(name: str) -> Any:
    """Return the command of a name, whose options are in a module of their own, which imports no torch."""
    file = name.replace("-", "_")
    module = _imported(name, f"{file}_options")
    options = getattr(module, f"{name.title().replace('-', '')}Options")
    command = _imported(name, "command").command
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    made = grouped(getattr(module, "GROUPS", {}))
    register = alone.command(name, cls=made, context_settings=getattr(module, "CONTEXT", None))

    def run(given: Any) -> None:
        ranks = importlib.import_module("sparseattn.utils.ranks")
        ranks.check_job(name, SEVERAL)
        _imported(name, file).run(given)

    register(command(options, run))
    return typer.main.get_command(alone)


def _imported(name: str, module: str) -> Any:
    """Return a module of this folder; say in a sentence which package a command lacks where it cannot be imported."""
    warnings.filterwarnings("ignore", NO_NUMPY, UserWarning)
    try:
        with _left_at_once():
            return importlib.import_module(f"sparseattn.cli.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sparseattn":
            raise
        _say(f"`sparseattn {name}` needs the package {error.name}, which is not installed")
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _left_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process within the block, which only imports.

    A KeyboardInterrupt would not do: imports of torch and numpy catch it, and then fail for another reason.
    """
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return

    def leave(*_: object) -> None:
        _say("interrupted")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(sparseattn.__version__)
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Sparse attention that looks at the query: compare methods on traces and models, choose one, and run it.

    `sparseattn COMMAND --help` explains a command.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


__all__ = ["app"]
