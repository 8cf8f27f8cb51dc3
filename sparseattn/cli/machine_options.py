"""The options of `sparseattn machine`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.core.budget import Mass, parse_budget
from sparseattn.cost_model.data_sheet import CPU, published
from sparseattn.cost_model.known_models import named
from sparseattn.cost_model.links import LINKS

METHODS = ("lowbit", "lowbit:bits=1,page=16", "quest:page=8,int8=True", "retroinfer")  # those that the README names
GPUS = tuple(sheet.name for sheet in published())


class RankShare(str, Enum):
    exact = "exact"
    union = "union"


@dataclass(frozen=True)
class MachineOptions:
    """Measure this CPU (in about a minute), show a machine's figures, or predict decode steps on it.

    With --model, predict whole decode steps of a model and whether it fits the memory; with --selector alone, predict
    the attention of one layer. The figures of GPUs come from data sheets, so times on them are predictions.
    """

    name: Annotated[
        str | None,
        typer.Argument(
            help=f"Machine: {CPU} (as measured here before), {', '.join(GPUS)}, or the file of a profile. Default: "
            "measure this CPU.",
            autocompletion=completion.machines,
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Model whose decode steps to predict: {', '.join(named())}, or a config.json or its folder. Repeat "
            "the option for several.",
            autocompletion=completion.shapes,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: the profile of this CPU (default: in the cache folder), or with --model the "
            "predictions as JSON (default: none)."
        ),
    ] = None
    shape: Annotated[
        str, typer.Option(help="Shape to measure or predict with: KV heads, query heads per KV head, head_dim.")
    ] = "8,4,128"
    dtype: Annotated[
        shared.Dtype,
        typer.Option(metavar="DTYPE", help=f"Dtype of keys and values, for predictions: {', '.join(shared.Dtype)}."),
    ] = shared.Dtype.bfloat16
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{shared.SELECTOR_HELP} Default with --model: {' '.join(METHODS)}.",
            autocompletion=completion.selectors(),
        ),
    ] = None
    context: Annotated[
        str, typer.Option(help="Tokens of each sequence, such as 32768, 128k or 1M; with --model several with commas.")
    ] = "128k"
    batch: Annotated[str, typer.Option(help="Sequences that decode together; with --model several with commas.")] = "1"
    budget: Annotated[
        str, typer.Option(help="Tokens that a query reads besides sink and window: a number or a share (5%).")
    ] = "2048"
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Processes that the rows of every sequence are dealt to, such as 8,64: predict a rank's attention, "
            "without the weights; with --model."
        ),
    ] = None
    link: Annotated[
        str,
        typer.Option(
            help=f"With --ranks: what they send over, {' or '.join(LINKS)} by data sheet, or GB/s and microseconds a "
            "message (25,10)."
        ),
    ] = "nvlink"
    share: Annotated[
        RankShare, typer.Option(help="With --ranks: whether they agree on the best rows of all, or each takes its own.")
    ] = RankShare.exact
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False

    def __post_init__(self) -> None:
        if len(self.sizes) != 3:
            raise ValueError(
                f"--shape must be three numbers (KV heads, query heads per KV head, head_dim), got {self.shape!r}"
            )
        unused = [name for name in ("context", "budget", "batch") if self._is_changed(name)]
        if unused and not self.selector and not self.model:
            raise ValueError(f"--{unused[0]} needs --selector or --model, whose steps it predicts")
        if isinstance(parse_budget(self.budget), Mass):
            raise ValueError(
                f"a predicted step reads as many rows at every step, and --budget {self.budget} takes what it needs: "
                f"give rows, such as 2048, or a share of the context, such as 5%"
            )
        if self.name is None and (self.selector or self.model):
            given = "--model" if self.model else "--selector"
            raise ValueError(f"{given} needs the name of a machine, such as `sparseattn machine h100`")
        if self.ranks is not None and not self.model:
            raise ValueError("--ranks needs --model, whose rows are dealt")
        if self.ranks is None and (self._is_changed("link") or self._is_changed("share")):
            raise ValueError("--link and --share need --ranks")
        if self.name is not None and not self.selector and not self.model and self._is_changed("shape"):
            raise ValueError("--shape needs --selector, or no machine name so that this CPU is measured")
        if self.model and self._is_changed("shape"):
            raise ValueError("--model has a shape of its own: leave out --shape or --model")
        if not self.model and len(self.contexts) * len(self.batches) > 1:
            raise ValueError("several values of --context or --batch need --model")
        if self.name is None and self._is_changed("dtype"):
            raise ValueError("--dtype needs the name of a machine; measuring this CPU covers all dtypes")
        if self.name is not None and self.out is not None and not self.model:
            raise ValueError(f"--out needs --model, or no machine name so that this CPU is measured; got {self.name}")

    def _is_changed(self, name: str) -> bool:
        """Return whether an option is not at its default."""
        return bool(getattr(self, name) != getattr(MachineOptions, name))

    @cached_property
    def sizes(self) -> list[int]:
        """KV heads, query heads of each, and head size."""
        return values.integers(self.shape, "--shape") or []

    @cached_property
    def contexts(self) -> list[int]:
        """Rows of each sequence."""
        rows = [values.row_count(text, "--context") for text in self.context.split(",")]
        values.check_positive({"--context": min(rows)})
        return rows

    @cached_property
    def rank_counts(self) -> list[int]:
        """How many ranks; empty without any."""
        counts = values.integers(self.ranks, "--ranks") or [] if self.ranks is not None else []
        values.check_positive({"--ranks": min(counts, default=1)})
        return counts

    @cached_property
    def batches(self) -> list[int]:
        """Sequences."""
        sizes = values.integers(self.batch, "--batch") or []
        values.check_positive({"--batch": min(sizes)})
        return sizes
