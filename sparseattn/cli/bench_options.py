"""The options of `sparseattn bench`, and what its help says; see `cli.command`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
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


@dataclass(frozen=True)
class BenchOptions:
    """Replay the end of traces through selectors and compare every step with full attention.

    Where neither traces nor methods are named, a page to look at is written beside the figures, as `report` does.
    """

    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)}); default {', '.join(LEADING)}, with "
            f"--selector {ALL} the first of these."
        ),
    ] = None
    selector: Annotated[
        list[str] | None,
        shared.selector_option(
            f"The name {ALL} takes every method with its defaults; the output says which cannot run, and why. Default: "
            f"{' '.join(SELECTED)}, and on built-in traces what was trained for their model."
        ),
    ] = None
    roles: shared.Roles = None
    trust: shared.Trust = None
    budget: shared.Budgets = BUDGETS
    sink: shared.Sink = 4
    window: shared.Window = 64
    layers: shared.Layers = None
    last: Annotated[int, typer.Option(help="Tokens at the end of each trace that are decoded.")] = 32
    far: Annotated[
        float, typer.Option(help="Only heads with at least this share of their attention beyond sink and window.")
    ] = 0.0
    seal: shared.Seal = None
    kv_rows: shared.KvRows = None
    indexes: Annotated[
        Path | None, typer.Option(help="Folder of index files: what was built once is read back. Default: none.")
    ] = None
    device: shared.ReplayDevice = None
    out: Annotated[
        Path, typer.Option(help="Folder for the records, bench.jsonl, and the figures; an earlier run's are replaced.")
    ] = Path("bench")
    per_head: Annotated[bool, typer.Option("--per-head", help="Every head apart, in the table and in the JSON.")] = (
        False
    )
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer",
            help="Layers and heads too: where methods fail, at equal rows attended and at equal bytes, by-layer.jsonl.",
        ),
    ] = False
    rows: Annotated[
        str | None,
        typer.Option(
            help="Compare methods at equal rows: each attends as many as sink, window and this --budget allow, "
            f"interpolated between two budgets if need be. Default with --selector {ALL} or --by-layer: "
            f"{equal_cost.ROWS}, or else the middle budget."
        ),
    ] = None
    bytes_read: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            help="Compare methods at equal bytes: each reads this share of the cache, the index included, interpolated "
            f"between two budgets if need be. Default with --selector {ALL} or --by-layer: {equal_cost.BYTES:.0%}.",
        ),
    ] = None
    by_step: Annotated[
        str | None,
        typer.Option(
            help="Measures to record and to draw at every decoded token too, such as recall@10,relative_error."
        ),
    ] = None
    wide: Annotated[
        bool, typer.Option("--wide", help="Every measure in the table; default rows, bytes, error, recovered.")
    ] = False
    json: shared.JsonLines = False
    figures: shared.Figures = True

    def __post_init__(self) -> None:
        if not 0 <= self.far <= 1:
            raise ValueError(f"--far is a share of the attention, 0 to 1, got {self.far}")
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
        return Replay(self.sink, self.window, self.last, layers, self.seal, self.indexes, self.device, codec)

    def check_effect(self, traces: Sequence[Trace]) -> None:
        """NoEffect for a budget that was asked for and covers the longest trace."""
        from sparseattn.core.effects import idle_budget, refuse

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
