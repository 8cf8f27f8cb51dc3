"""The options of `sparseattn bench`, and what its help says; see `cli.command`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.evaluation.builtin_traces import BUILTIN, LEADING
from sparseattn.reporting import equal_cost

if TYPE_CHECKING:
    from sparseattn.codecs.base import RowCodec
    from sparseattn.core.budget import Budget
    from sparseattn.evaluation.replay_settings import Replay
    from sparseattn.roles.roles import Method
    from sparseattn.traces.trace import Trace

ALL = "all"  # of --selector: every method
BUDGETS = "64,256,1024"  # where none are asked for; those of them that a trace is too short for change nothing
# Not `retrieval`, whose graphs take longer to build than all of these take together.
SELECTED = ("exact", "quest", "quest:group=each", "quest:page=8,int8=True", "lowbit", "random", "window")


GROUPS = {  # of options, in help
    "Methods": ("selector", "roles", "trust", "budget", "sink", "window", "seal", "kv_rows"),
    "What is measured": ("layers", "last", "every", "far", "device", "indexes"),
    "Comparisons": ("per_head", "by_layer", "rows", "bytes_read", "by_step"),
    "Results": ("out", "wide", "json", "figures"),
}


@dataclass(frozen=True)
class BenchOptions:
    """Decode the end of recorded traces again with every method, and compare each step with full attention.

    Without any traces and methods given, bench compares a few methods on three traces and also writes report.html.
    """

    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Trace files, or built-in traces by name: {', '.join(BUILTIN)}. Default: {', '.join(LEADING)}, or "
            f"with --selector {ALL} only {LEADING[0]}.",
            autocompletion=completion.traces,
        ),
    ] = None
    selector: Annotated[
        list[str] | None,
        shared.selector_option(
            f"The name {ALL} stands for every method with its defaults; the output says which of them cannot run, and "
            f"why. Default: {' '.join(SELECTED)}, and on built-in traces also what was trained for their model.",
            ALL,
        ),
    ] = None
    roles: shared.Roles = None
    trust: shared.Trust = None
    budget: shared.Budgets = BUDGETS
    sink: shared.Sink = 4
    window: shared.Window = 64
    layers: shared.Layers = None
    last: Annotated[int, typer.Option(help="Number of tokens to decode, at the end of each trace.")] = 32
    every: Annotated[
        int,
        typer.Option(help="Measure only the last of every so many decoded tokens. It makes a large --last affordable."),
    ] = 1
    far: Annotated[
        float,
        typer.Option(
            help="Measure only heads that have at least this share (0 to 1) of their attention outside sink and window."
        ),
    ] = 0.0
    seal: shared.Seal = None
    kv_rows: shared.KvRows = None
    indexes: Annotated[
        Path | None, typer.Option(help="Folder that keeps built indexes, so that later runs read them. Default: none.")
    ] = None
    device: shared.ReplayDevice = None
    out: Annotated[
        Path,
        typer.Option(help="Folder for the records (bench.jsonl) and the figures; it replaces those of an earlier run."),
    ] = Path("bench")
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Show every head separately, in the table and in the JSON.")
    ] = False
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer",
            help="Also measure where methods fail: the error of each layer and head, at equal tokens and at equal "
            "bytes (by-layer.jsonl).",
        ),
    ] = False
    rows: Annotated[
        str | None,
        typer.Option(
            help="Compare methods at equal numbers of tokens: those that sink, window and this one of the --budget "
            "values allow, such as 256. Measurements at two budgets are interpolated if necessary. Default with "
            f"--selector {ALL} or --by-layer: {equal_cost.ROWS}, or the middle budget if that is not among them."
        ),
    ] = None
    bytes_read: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            help="Compare methods at equal bytes: this share of the KV cache, such as 10%, with the index counted in. "
            f"Measurements at two budgets are interpolated if necessary. Default with --selector {ALL} or --by-layer: "
            f"{equal_cost.BYTES:.0%}.",
        ),
    ] = None
    by_step: Annotated[
        str | None,
        typer.Option(help="Measures to record and draw for every decoded token too, such as recall@10,relative_error."),
    ] = None
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", help="Show every measure in the table. Default: tokens, bytes, error and recovered attention."
        ),
    ] = False
    json: shared.JsonLines = False
    figures: shared.Figures = True

    def __post_init__(self) -> None:
        if not 0 <= self.far <= 1:
            raise ValueError(f"--far is a share of the attention from 0 to 1, got {self.far}")
        from sparseattn.evaluation.step_measures import check_steps

        check_steps(self.steps)

    @property
    def demo(self) -> bool:
        """Whether nothing is named, so that a page to look at is written too."""
        return not (self.traces or self.selector or self.roles)

    @property
    def every_method(self) -> bool:
        """Whether every known method is measured."""
        return ALL in (self.selector or [])

    @property
    def comparing(self) -> bool:
        """Whether methods are compared at equal rows and at equal bytes."""
        return self.by_layer or self.every_method or self.rows is not None or self.bytes_read is not None

    @cached_property
    def budgets(self) -> list[Budget]:
        """Each once, in the order given."""
        return values.budgets(self.budget)

    @cached_property
    def codecs(self) -> list[RowCodec | None]:
        """What keeps sealed rows; None: they stay as they come."""
        return values.row_codecs(self.kv_rows)

    @cached_property
    def layer_numbers(self) -> list[int] | None:
        """The layers to measure; None: all."""
        return values.integers(self.layers, "--layers")

    @property
    def steps(self) -> list[str]:
        """The measures of every decoded token."""
        return self.by_step.split(",") if self.by_step else []

    @property
    def equal(self) -> tuple[Budget, float]:
        """The budget whose rows, and the share of the cache's bytes, at which methods are compared."""
        return equal_cost.chosen_rows(self.rows, self.budgets), equal_cost.chosen_bytes(self.bytes_read)

    def replay(self, codec: RowCodec | None = None) -> Replay:
        """Return how traces are replayed, with rows that a codec keeps."""
        from sparseattn.evaluation.replay_settings import Replay

        layers = self.layer_numbers
        return Replay(
            self.sink, self.window, self.last, layers, self.seal, self.indexes, self.device, codec, self.every
        )

    def check_effect(self, traces: Sequence[Trace]) -> None:
        """NoEffect for a budget that was asked for and covers the longest trace."""
        from sparseattn.core.no_effect import idle_budget, refuse

        longest = max(traces, key=lambda trace: trace.tokens)
        for budget in self.budgets if self.budget != BUDGETS else ():
            refuse(idle_budget(budget, longest.tokens, self.sink, self.window, f"the longest trace ({longest.name})"))

    def check_method(self, trace: Trace, layers: list[int], method: Method, budgets: Sequence[Budget]) -> None:
        """Refuse, by a ValueError, a method that cannot be measured on a trace."""
        from sparseattn.evaluation.replay_settings import check_replay, replay_device

        replay_device(method, self.device)
        refused: list[ValueError] = []
        for codec in self.codecs:
            try:
                check_replay(trace, budgets, method, replace(self.replay(codec), layers=layers))
            except ValueError as error:
                refused.append(error)
        if len(refused) == len(self.codecs):  # a method that refuses codecs alone is measured without
            raise refused[0]
