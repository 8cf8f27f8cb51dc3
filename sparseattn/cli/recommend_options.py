"""The options of `sparseattn recommend`, checked before anything is read, loaded or measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.core.budget import Budget, budget_label
from sparseattn.recommend.bounds import MEASURES, Bound, parse_error
from sparseattn.recommend.defaults import BUDGETS, METHODS, SERVED

if TYPE_CHECKING:
    import torch

    from sparseattn.cost_model.machine import Machine

KL = "kl"


class By(str, Enum):
    """What a method and a budget is chosen for."""

    head = "head"
    layer = "layer"


class Target(str, Enum):
    """What a plan is for."""

    transformers = "transformers"
    vllm = "vllm"


@dataclass(frozen=True, eq=False)
class RecommendOptions:
    """Choose a method and a budget for every layer of a model, and verify the whole on text that nothing was chosen by.

    Interrupt it as you like: the same command goes on.
    """

    text: Annotated[
        list[str],
        typer.Option(
            help=f"Of the kind that the model is to read: a folder of UTF-8 files, {shared.TEXT_HELP} Repeat for more."
        ),
    ]
    model: Annotated[str, typer.Option(help=shared.MODEL_HELP)] = shared.LEAD
    error: Annotated[str, typer.Option(help="The most that predictions may change, such as 1%; see --measure.")] = "1%"
    measure: Annotated[
        str,
        typer.Option(
            help="What --error bounds. " + "; ".join(f"{name}: {about}" for name, (_, about) in MEASURES.items())
        ),
    ] = KL
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict a step's time on it, and have little of that: cpu (as `sparseattn machine` measured it), "
            "h100 or another GPU of `sparseattn machine`, or a profile's file. Default: have little of the bytes read."
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            "--context", help="Rows of the context that costs are predicted for, such as 128k. Default: --length."
        ),
    ] = None
    batch: Annotated[int, typer.Option(help="Sequences of a step that costs are predicted for.")] = 1
    selector: Annotated[
        list[str] | None,
        shared.selector_option(
            f"Default: {' '.join(METHODS)}; for vLLM {' '.join(SERVED)}. Full attention and the window are always "
            "among them."
        ),
    ] = None
    budget: Annotated[
        str, typer.Option(help="Rows beyond sink and window, or shares of the context, that a layer may have.")
    ] = ",".join(map(budget_label, BUDGETS))
    by: Annotated[
        By | None,
        typer.Option(
            help="What a method and a budget is chosen for: each KV head (head), or each layer with all its heads "
            "(layer). Default: head, but layer for vLLM, which serves no other."
        ),
    ] = None
    engine: Annotated[
        Target,
        typer.Option(
            "--for",
            metavar="ENGINE",
            help="transformers: SparseCache; vllm: what vLLM serves, by layer, one size of page.",
        ),
    ] = Target.transformers
    length: Annotated[int, typer.Option(help="Tokens of a window of the text.")] = 4096
    last: Annotated[int, typer.Option(help="Tokens at the end of each window that are decoded.")] = 32
    windows: Annotated[int, typer.Option(help="Windows to choose by.")] = 4
    held_out: Annotated[int, typer.Option(help="Further windows, to verify on.")] = 6
    draws: Annotated[int, typer.Option(help="Backward passes a window, by which errors of layers are weighed.")] = 16
    sink: shared.Sink = 4
    window: shared.Window = 64
    name: Annotated[
        str | None,
        typer.Option(
            help="What tables call the plan. Default: the model, the error, and what of --measure, --machine, "
            "--context, --by, --batch and --for is given."
        ),
    ] = None
    dtype: shared.ModelDtype = None
    device: shared.Device = None
    chunk: shared.Chunk = 2048
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for plan.json, plan.md, which says why, report.html, and the records, recommend.jsonl; what "
            "is there already is not measured again."
        ),
    ] = Path("recommend")
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the plan, and beside it the page of why, as .md. Default: plan.json in --out."
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="The plan on standard output instead of tables.")] = False

    def __post_init__(self) -> None:
        if None in self.budgets:
            raise ValueError(
                "--budget has rows, shares or masses, got 'all': full attention is always among the choices"
            )
        if self.vllm:
            self._check_for_vllm()
        numbers = ("batch", "length", "last", "windows", "held_out", "draws", "chunk")
        values.check_positive(
            {"--context": self.context_rows, **{shared.spelled([name]): getattr(self, name) for name in numbers}}
        )
        if self.sink < 0 or self.window < 1:
            raise ValueError(f"--sink is 0 or more and --window 1 or more, got {self.sink} and {self.window}")
        for name in ("bound", "profile", "place"):  # what cannot be had is refused before anything is made
            getattr(self, name)

    def _check_for_vllm(self) -> None:
        if self.by is By.head:
            raise ValueError("--by head is not for vLLM, where the KV heads of a layer agree: leave it out")
        if shares := [budget for budget in self.budgets if not isinstance(budget, int)]:
            raise ValueError(f"in vLLM a budget is rows, got {budget_label(shares[0])}: give such as --budget 64,256")
        from sparseattn.serving.vllm.settings import servable

        for method in self.selector or ():
            servable(method)

    @cached_property
    def bound(self) -> Bound:
        """The most that a plan may change predictions."""
        return Bound(self.measure, parse_error(self.error))

    @cached_property
    def profile(self) -> Machine | None:
        """The machine that a step's time is predicted on; None: costs are bytes."""
        from sparseattn.cost_model.machine import Machine

        return None if self.machine is None else Machine.load(self.machine)

    @cached_property
    def context_rows(self) -> int | None:
        """Rows of the context that costs are predicted for."""
        return None if self.context is None else values.row_count(self.context, "--context")

    @property
    def predicted(self) -> bool:
        """Whether costs are predicted by formula, not measured on the windows."""
        return self.machine is not None or self.context is not None or self.batch > 1

    @property
    def vllm(self) -> bool:
        """Whether the plan is for vLLM."""
        return self.engine is Target.vllm

    @property
    def by_head(self) -> bool:
        """Whether each KV head has a method and a budget of its own."""
        return self.by is not By.layer and not self.vllm

    @property
    def methods(self) -> tuple[str, ...]:
        """The selectors to choose among, as texts."""
        return tuple(self.selector or (SERVED if self.vllm else METHODS))

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        """The budgets to choose among, each once."""
        return tuple(values.budgets(self.budget))

    @cached_property
    def place(self) -> torch.device:
        """The device."""
        from sparseattn.utils.devices import usable_device

        return usable_device(self.device)

    @property
    def plan_name(self) -> str:
        """What tables call the plan: with what makes it another one than the plan without these options."""
        if self.name:
            return self.name
        parts = [Path(self.model).name, self.error]
        parts += [self.measure] * (self.measure != KL)
        parts += [] if self.machine is None else [Path(self.machine).stem]
        parts += [] if self.context is None else [self.context]
        parts += [] if self.by is None else [self.by.value]
        parts += [f"batch{self.batch}"] * (self.batch > 1)
        return "-".join([*parts, *["vllm"] * self.vllm])

    @property
    def plan_path(self) -> Path:
        """Where the plan is written; the page of why lies beside it, as .md."""
        path = self.plan or self.out / "plan.json"
        if path.suffix != ".json":
            raise ValueError(f"--plan ends in .json, since the page of why lies beside it, got {path}")
        return path
