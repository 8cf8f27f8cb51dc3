"""The options of `sparseattn report`, and what its help says; see `cli.command`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.core.budget import Budget
from sparseattn.evaluation.builtin_traces import BUILTIN

EXPLORED = ("quest", "lowbit", "exact")
QUERIES = 8
SINK, WINDOW = 4, 64
FILES = (  # of `KINDS`
    "recommend.jsonl",
    "bench.jsonl",
    "by-layer.jsonl",
    "inspect.jsonl",
    "recall.jsonl",
    "eval.jsonl",
)


@dataclass(frozen=True)
class Explored:
    """Traces whose attention the page shows, and how.

    Args:
        traces: names or files.
        selectors: whose rows are shown; of different labels.
        budget: theirs.
        queries: tokens at the end that ask.
        layers: of the model; None: all.
        sink, window: rows that every method reads.
        device: to replay on; None: a CUDA device if there is one, for selectors that can work there.
    """

    traces: Sequence[str]
    selectors: Sequence[str] = EXPLORED
    budget: Budget = 256
    queries: int = QUERIES
    layers: Sequence[int] | None = None
    sink: int = SINK
    window: int = WINDOW
    device: str | None = None


@dataclass(frozen=True)
class ReportOptions:
    """Write one self-contained HTML page from the records of other commands: plots, maps, tables and every setting.

    With --trace, the page also shows the attention of single tokens: which tokens hold it, and which of these each
    method reads.
    """

    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Folders that bench, inspect, recall, eval or recommend wrote. The command reads {', '.join(FILES)}."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="Page to write; it replaces an older one.")] = Path("report.html")
    title: Annotated[
        str | None, typer.Option(help="Heading of the page. Default: the model, its tokens and the methods.")
    ] = None
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Show the attention of each token of this trace: a file, or a built-in trace by name: "
            f"{', '.join(BUILTIN)}. Text appears if it was captured --with-text. Repeat the option for several.",
            autocompletion=completion.traces,
        ),
    ] = None
    selector: Annotated[
        list[str] | None,
        shared.selector_option(
            f"What they read is shown on the --trace. Default: methods of the folder's bench.jsonl, else "
            f"{' '.join(EXPLORED)}."
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="Tokens that these methods read besides sink and window, on the --trace. Default: 256, or the middle "
            "one that bench measured."
        ),
    ] = None
    queries: Annotated[int, typer.Option(help="Number of tokens to show, at the end of the --trace.")] = QUERIES
    layers: shared.Layers = None
    sink: Annotated[
        int | None, typer.Option(help=f"Number of first tokens that every query reads. Default: {SINK}, or bench's.")
    ] = None
    window: Annotated[
        int | None,
        typer.Option(help=f"Number of most recent tokens that every query reads. Default: {WINDOW}, or bench's."),
    ] = None
    device: shared.ReplayDevice = None

    def __post_init__(self) -> None:
        if self.selector and not self.trace:
            raise ValueError("--selector needs a --trace, on which it is shown")

    @property
    def layer_numbers(self) -> list[int] | None:
        """The layers to show; None: all."""
        return values.integers(self.layers, "--layers")
