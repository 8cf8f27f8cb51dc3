"""The options of `sparseattn recommend`, checked before anything is read, loaded or measured."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.core.budget import Budget, Mass, budget_label
from sparseattn.core.no_effect import idle_budget, refuse
from sparseattn.recommend.bounds import MEASURES, Bound, parse_error
from sparseattn.recommend.defaults import BUDGETS, DRAFT_BUDGETS, METHODS, SERVED

if TYPE_CHECKING:
    import torch

    from sparseattn.cost_model.machine import Machine

KL = "kl"
DRAFTS = "2,4,8"
OF_PLANS = ("error", "measure", "machine", "context", "batch", "by", "held_out", "draws", "name", "plan")


class By(str, Enum):
    """What a method and a budget is chosen for."""

    head = "head"
    layer = "layer"


class Target(str, Enum):
    """What a plan is for."""

    transformers = "transformers"
    vllm = "vllm"


class Project(str, Enum):
    """Another project whose settings a plan is written as."""

    trtllm = "trtllm"
    modelopt = "modelopt"
    sglang = "sglang"
    ucm = "ucm"


GROUPS = {  # of options, in help
    "What to keep": ("text", "model", "error", "measure"),
    "What to save": ("machine", "context", "batch"),
    "What to choose from": ("selector", "budget", "by", "engine", "lossless", "drafts", "sink", "window"),
    "How long to look": ("length", "last", "windows", "held_out", "draws"),
    "How to compute": ("dtype", "device", "chunk"),
    "Results": ("name", "out", "plan", "export", "json"),
}


@dataclass(frozen=True, eq=False)
class RecommendOptions:
    """Choose a method and a budget for every layer of a model, and verify the result on held-out text.

    You can interrupt the command at any time; the same command continues where it stopped. With --lossless it starts
    again.
    """

    text: Annotated[
        list[str],
        typer.Option(
            help="Text of the kind that the model will read: a folder of UTF-8 files, "
            f"{shared.TEXT_HELP} Repeat the option for several.",
            autocompletion=completion.texts,
        ),
    ]
    model: Annotated[str, typer.Option(help=shared.MODEL_HELP, autocompletion=completion.models)] = shared.LEAD
    error: Annotated[
        str, typer.Option(help="Largest allowed change of the next-token distribution, such as 1%; see --measure.")
    ] = "1%"
    measure: Annotated[
        str,
        typer.Option(
            help="What --error limits. " + "; ".join(f"{name}: {about}" for name, (_, about) in MEASURES.items()) + ".",
            autocompletion=completion.one_of(MEASURES),
        ),
    ] = KL
    machine: Annotated[
        str | None,
        typer.Option(
            help="Minimise the predicted step time on this machine: cpu (as `sparseattn machine` measured it), h100 or "
            "another GPU of `sparseattn machine`, or the file of a profile. Default: minimise the bytes read.",
            autocompletion=completion.machines,
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            "--context", help="Tokens of the context for which costs are predicted, such as 128k. Default: --length."
        ),
    ] = None
    batch: Annotated[int, typer.Option(help="Sequences that decode together, for predicted costs.")] = 1
    selector: Annotated[
        list[str] | None,
        shared.selector_option(
            f"Default: {' '.join(METHODS)}; for vLLM {' '.join(SERVED)}. Full attention and the window alone are "
            "always candidates too."
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="Budgets to choose from, with commas: tokens besides sink and window, or shares of the context (5%). "
            f"Default: those of {','.join(map(budget_label, BUDGETS))} that are below half of --length; with "
            f"--lossless {','.join(map(budget_label, DRAFT_BUDGETS))}."
        ),
    ] = None
    by: Annotated[
        By | None,
        typer.Option(
            help="Choose a method and a budget for each KV head (head), or one for all heads of a layer (layer). "
            "Default: head; for vLLM layer, as it serves nothing else."
        ),
    ] = None
    engine: Annotated[
        Target,
        typer.Option(
            "--for",
            metavar="ENGINE",
            help="What will run the plan. transformers: a SparseCache; vllm: `sparseattn serve`, with one choice per "
            "layer and one page size.",
        ),
    ] = Target.transformers
    lossless: Annotated[
        bool,
        typer.Option(
            "--lossless",
            help="Choose how to draft for full attention's own tokens instead: method, budget and --drafts by measured "
            "tokens a second. --error and a plan have no part in it.",
        ),
    ] = False
    drafts: Annotated[
        str, typer.Option(help="Numbers of tokens to draft before each check, with commas, for --lossless.")
    ] = DRAFTS
    length: Annotated[int, typer.Option(help="Tokens of each window, a piece of the text.")] = 4096
    last: Annotated[int, typer.Option(help="Number of tokens to decode, at the end of each window.")] = 32
    windows: Annotated[int, typer.Option(help="Number of windows to choose on.")] = 4
    held_out: Annotated[int, typer.Option(help="Number of further windows, to verify on.")] = 6
    draws: Annotated[
        int, typer.Option(help="Backward passes per window, which estimate how much the error of each layer matters.")
    ] = 16
    sink: shared.Sink = 4
    window: shared.Window = 64
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the plan in tables. Default: the model, the error, and those of --measure, --machine, "
            "--context, --by, --batch and --for that you give."
        ),
    ] = None
    dtype: shared.ModelDtype = None
    device: shared.Device = None
    chunk: shared.Chunk = 2048
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for plan.json, plan.md (the reasons), report.html and the records (recommend.jsonl). What it "
            "has already is not measured again."
        ),
    ] = Path("recommend")
    plan: Annotated[
        Path | None,
        typer.Option(
            help="File to write the plan to, NAME.json; the reasons go to NAME.md beside it. Default: plan.json in "
            "--out."
        ),
    ] = None
    export: Annotated[
        Project | None,
        typer.Option(
            help="Write the plan as another project's settings too, NAME.PROJECT.json beside the plan, where it has "
            "the method with the same meaning. With --by layer."
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of tables.")] = False

    def __post_init__(self) -> None:
        if None in self.budgets:
            raise ValueError("--budget takes tokens, shares or masses, got 'all': full attention is always a candidate")
        if self.predicted and (masses := [budget for budget in self.budgets if isinstance(budget, Mass)]):
            raise ValueError(
                f"what {masses[0]} reads is measured, not predicted: give --machine, --context and --batch budgets in "
                f"tokens or shares"
            )
        if self.vllm:
            self._check_for_vllm()
        if not self.lossless and self.drafts != DRAFTS:
            raise ValueError("--drafts needs --lossless")
        if self.lossless and self.vllm:
            raise ValueError("--lossless is for generate_lossless with transformers: leave --for vllm out")
        if self.export is not None and (self.by_head or self.lossless):
            raise ValueError("--export writes one method for all heads of a layer: give --by layer, without --lossless")
        plans = [f.name for f in fields(self) if f.name in OF_PLANS and getattr(self, f.name) != f.default]
        if self.lossless and plans:
            raise ValueError(f"{shared.spelled(plans)} cannot be given with --lossless, which makes no plan")
        numbers = ("batch", "length", "last", "windows", "held_out", "draws", "chunk")
        values.check_positive(
            {"--context": self.context_rows, **{shared.spelled([name]): getattr(self, name) for name in numbers}}
        )
        if self.length < self.last + 2:
            raise ValueError(
                f"--length {self.length} does not hold the --last {self.last} tokens to decode and 2 before them: "
                f"give --length {self.last + 2} or more"
            )
        if self.sink < 0 or self.window < 1:
            raise ValueError(f"--sink must be 0 or more and --window 1 or more, got {self.sink} and {self.window}")
        if self.lossless:
            _ = self.draft_numbers
        self._check_effect()
        for name in ("bound", "profile", "place"):  # what cannot be had is refused before anything is made
            getattr(self, name)

    def _check_effect(self) -> None:
        """Refuse a sink and window that leave nothing to choose from, and a budget asked for that is too large."""
        most = max((b for b in self.budgets if isinstance(b, int)), default=0)
        if self.budget is not None and not self.lossless and most >= self.length / 2:
            raise ValueError(
                f"--budget {most} is half of --length {self.length} or more, at which a plan saves little: give "
                f"budgets below {-(-self.length // 2):,}, or a --length above {2 * most:,}"
            )
        if self.budget is None:
            if (why := self._idle(self.budgets[0])) is not None and why.startswith("--budget"):
                why = f"give a larger --length, or a --budget below the default ones: {why}"
            refuse(why)
            return
        refuse(*map(self._idle, self.budgets))

    def _idle(self, budget: Budget) -> str | None:
        """Return why a budget has no effect at the first token that is decoded; None where it has."""
        what = f"a window before its --last {self.last}"
        return idle_budget(budget, self.length - self.last, self.sink, self.window, what)

    def _check_for_vllm(self) -> None:
        if self.by is By.head:
            raise ValueError("vLLM serves one choice per layer: leave out --by head")
        if shares := [budget for budget in self.budgets if not isinstance(budget, int)]:
            raise ValueError(f"vLLM needs budgets in tokens, such as --budget 64,256, got {budget_label(shares[0])}")
        from sparseattn.serving.vllm.settings import servable

        for method in self.selector or ():
            servable(method)

    @cached_property
    def draft_numbers(self) -> tuple[int, ...]:
        """How many tokens to draft, each number once."""
        from sparseattn.models.lossless import MOST_DRAFTS

        numbers = tuple(dict.fromkeys(values.integers(self.drafts, "--drafts") or ()))
        if not numbers or not all(1 <= number <= MOST_DRAFTS for number in numbers):
            raise ValueError(f"--drafts takes numbers from 1 to {MOST_DRAFTS}, with commas, got {self.drafts!r}")
        return numbers

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
        """The budgets to choose among, each once; of those for drafts, where none are given, what has an effect."""
        if self.budget is not None:
            return tuple(values.budgets(self.budget))
        if self.lossless:
            return tuple(budget for budget in DRAFT_BUDGETS if not self._idle(budget)) or DRAFT_BUDGETS[:1]
        return BUDGETS

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
            raise ValueError(f"--plan must end in .json, got {path}")
        return path
