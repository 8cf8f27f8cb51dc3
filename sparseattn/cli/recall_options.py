"""The options of `sparseattn recall`, and what its help says; see `cli.command`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.evaluation.builtin_traces import BUILTIN

if TYPE_CHECKING:
    from sparseattn.selectors.base import Selector

SELECTED = ("flat", "ivf", "hnsw", "hnsw:metric=l2", "bridge", "retrieval", "retrieval:metric=query")
KEYS = "16384,131072"
LEADS, DEPTHS = "prose", (10, 18)  # where nothing is named: a trace, and its layers a third and two thirds down


@dataclass(frozen=True)
class RecallOptions:
    """Measure recall@k against the share of keys scanned, for attention's queries and, as a control, for keys.

    This is the figure of RetrievalAttention (arXiv 2409.10516). recall.png has the largest number of keys of each
    source; several --keys add scaling.png, and several --tokens add scaling-NAME.png for each trace. Selectors that
    learn from queries see those of the indexed tokens, and in the control the keys.
    """

    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Trace files, or built-in traces by name: {', '.join(BUILTIN)}. Default: see --keys.",
            autocompletion=completion.traces,
        ),
    ] = None
    selector: Annotated[list[str] | None, shared.selector_option(f"Default: {' '.join(SELECTED)}.")] = None
    keys: Annotated[
        str | None,
        typer.Option(
            help=f"Numbers of synthetic keys, such as {KEYS}. Without traces and --keys, the command measures layers "
            f"{' and '.join(map(str, DEPTHS))} of the trace {LEADS}, in a few minutes."
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Number of tokens to keep from the beginning of traces; several with commas, such as 4096,16384, show "
            "how the cost grows. Default: all."
        ),
    ] = None
    gap: Annotated[
        str,
        typer.Option(
            help="How far synthetic queries point away from the directions in which keys vary, several with commas."
        ),
    ] = "0,0.26,0.4"
    spread: Annotated[float, typer.Option(help="Share of the synthetic keys' variance that lies within clusters.")] = (
        0.28
    )
    size: Annotated[int, typer.Option(help="head_dim of synthetic keys.")] = 64
    seed: Annotated[
        str, typer.Option(help="Seed of synthetic keys and queries; results of several, with commas, are averaged.")
    ] = "0"
    queries: Annotated[
        int, typer.Option(help="Number of tokens at the end whose queries search; the tokens before them are indexed.")
    ] = 64
    k: Annotated[int, typer.Option("--k", help="Number of keys to find, and to select.")] = 100
    values: Annotated[
        str | None,
        typer.Option(
            help="Values of every index's search parameter, such as 100,200. Default: a series that grows by a factor "
            "of 1.4."
        ),
    ] = None
    sink: Annotated[int, typer.Option(help="Number of first tokens of a trace that are not indexed.")] = 4
    layers: shared.Layers = None
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records (recall.jsonl) and the figures; it replaces those of an earlier run."
        ),
    ] = Path("recall")
    json: shared.JsonLines = False
    figures: shared.Figures = True

    def __post_init__(self) -> None:
        if self.queries < 1 or self.sink < 0:
            raise ValueError(f"--queries must be 1 or more and --sink 0 or more, got {self.queries} and {self.sink}")
        if self.knobs is not None and min(self.knobs) < 1:
            raise ValueError(f"--values must be 1 or more, got {self.values!r}")
        if self.tokens is not None and self.keys and not self.traces:
            raise ValueError("--tokens shortens traces, and --keys alone measures none: name a trace")
        of_traces = [name for name in ("layers", "sink") if getattr(self, name) != getattr(type(self), name)]
        if of_traces and self.keys and not self.traces:
            raise ValueError(f"only traces have {shared.spelled(of_traces)}: name a trace")
        of_keys = ("gap", "spread", "size", "seed")
        if not self.keys and (idle := [name for name in of_keys if getattr(self, name) != getattr(type(self), name)]):
            raise ValueError(f"only synthetic keys have {shared.spelled(idle)}: give --keys")

    @cached_property
    def methods(self) -> list[tuple[str, Selector]]:
        """The indexes, each under its label without the knob."""
        from sparseattn.selectors.registry import make_selector

        return _by_label([make_selector(spec) for spec in self.selector or SELECTED])

    @cached_property
    def knobs(self) -> list[int] | None:
        """Values of every index's knob; None: each one's own."""
        return values.integers(self.values, "--values")

    @cached_property
    def token_counts(self) -> list[int] | list[None]:
        """Tokens of traces to keep; None: all."""
        counts = values.integers(self.tokens, "--tokens")
        return [None] if counts is None else sorted(set(counts))


def _by_label(selectors: Sequence[Selector]) -> list[tuple[str, Selector]]:
    """Return each by its label without the knob, which the command turns; ValueError where two differ in that alone."""
    named: dict[str, Selector] = {}
    for selector in selectors:
        first = named.setdefault(selector.label(knob=False), selector)
        if repr(first) != repr(selector):
            raise ValueError(
                f"{first.label()} and {selector.label()} differ only in {selector.knob}, which this command varies: "
                f"give one of them, and its values with --values"
            )
    return list(named.items())
