"""The options of `sparseattn report`, and what its help says; see `cli.command`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.core.budget import Budget, parse_budget
from sparseattn.evaluation.builtin_traces import BUILTIN

EXPLORED = ("quest", "lowbit", "exact")
QUERIES = 8
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
    sink: int = 4
    window: int = 64
    device: str | None = None


@dataclass(frozen=True)
class ReportOptions:
    """Write one self-contained HTML page from the records of other commands: plots, maps, tables and every setting.

    With --trace also the attention of single tokens: which rows hold it, and which of them methods read.
    """

    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Folders that bench, inspect, recall, eval or recommend wrote; what is read: {', '.join(FILES)}."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="The page to write; one that is there is replaced.")] = Path("report.html")
    title: Annotated[str | None, typer.Option(help="Heading of the page. Default: model, length and methods.")] = None
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Trace file, or built-in trace by name ({', '.join(BUILTIN)}), whose attention is explored token by "
            f"token, over its text where it was captured --with-text; repeat for more."
        ),
    ] = None
    selector: Annotated[
        list[str] | None,
        shared.selector_option(f"Their rows are shown there. Default: {' '.join(EXPLORED)}."),
    ] = None
    budget: Annotated[str, typer.Option(help="Rows beyond sink and window that these read there.")] = "256"
    queries: Annotated[int, typer.Option(help="Tokens at the end of a trace that ask there.")] = QUERIES
    layers: shared.Layers = None
    sink: shared.Sink = 4
    window: shared.Window = 64
    device: shared.ReplayDevice = None

    def __post_init__(self) -> None:
        if self.selector and not self.trace:
            raise ValueError("--selector says whose rows are shown of a --trace, and none is named")

    def explored(self) -> Explored:
        """Return the traces whose attention is shown."""
        return Explored(
            self.trace or (),
            self.selector or EXPLORED,
            parse_budget(self.budget),
            self.queries,
            values.integers(self.layers, "--layers"),
            self.sink,
            self.window,
            self.device,
        )
