"""The options of `sparseattn eval`, checked before anything is read, loaded or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.evaluation.layouts.base import TAIL, TEMPLATE
from sparseattn.evaluation.layouts.registry import LAYOUTS, layout_named
from sparseattn.evaluation.ruler.tasks import CWE, QA, SEED, TEMPLATES
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.compared import PROTOCOLS
from sparseattn.evaluation.tasks.registry import TASKS
from sparseattn.evaluation.tasks.scoring import SCORINGS
from sparseattn.models.packaged import REFERENCE
from sparseattn.serving.vllm import defaults

if TYPE_CHECKING:
    from sparseattn.codecs.base import RowCodec
    from sparseattn.evaluation.tasks.run import Method

SELECTED = ("exact", "quest", "lowbit", "random", "window")
SERVED = (defaults.SELECTOR, "lowbit:bits=1,page=16", "window")  # by vLLM
GENERATED = "passkey,kv"
BUDGETS = "64,256,1024"  # where none are asked for; those of them that a prompt is too short for change nothing
OWN_TOKENS = 64  # of an answer to a prompt of the user's
OF_PROMPTS = ("layout", "templates", "demos", "results")


class ResultsForm(str, Enum):
    """A form that results are written in besides `eval.jsonl`."""

    kvpress = "kvpress"


class EngineName(str, Enum):
    """Where a model runs that no server has."""

    local = "local"
    vllm = "vllm"


@dataclass(frozen=True, eq=False)
class EvalOptions:
    """Ask a model about long prompts, with full attention and with every selector and budget, and score its answers.

    A prompt is read once; every method goes on from there. Interrupt it as you like: the same command goes on.
    """

    context: typer.Context
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{shared.MODEL_HELP} Default: {shared.LEAD}; {REFERENCE} where that cannot be had. With --endpoint "
            "its tokenizer alone is loaded; default the first server's own."
        ),
    ] = None
    engine: Annotated[
        EngineName,
        typer.Option(
            help="local: the model here, through transformers; vllm: in vLLM's engine in this process, all "
            "its decoding sparse, for selectors whose index is by page."
        ),
    ] = EngineName.local
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="[NAME=]URL[#MODEL] of a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...), asked "
            "instead of a model here; the key is OPENAI_API_KEY. Repeat it: the others are compared with the first."
        ),
    ] = None
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at an --endpoint, or prompts in vLLM, at once. Default: 4.")
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(TASKS)}; RULER's own, {', '.join(TEMPLATES)}; and {AGREEMENT}: how far predictions of "
            f"--text are from full attention's; several with commas. Default: {GENERATED}, or none where "
            "--prompts are given."
        ),
    ] = None
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, or of a window of --text.")] = "1024,4096"
    depths: Annotated[str, typer.Option(help="Where the needle lies: 0 is the beginning, 1 the end.")] = "0,0.5,1"
    samples: Annotated[int, typer.Option(help="Prompts for each length and depth, or windows of --text.")] = 2
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the first prompt; each next one adds one. RULER draws all prompts of a task from one seed, "
            f"{SEED} unless this is given."
        ),
    ] = 0
    selector: Annotated[
        list[str] | None,
        shared.selector_option(f"Default: {' '.join(SELECTED)}. Full attention is measured beside them."),
    ] = None
    roles: shared.Roles = None
    plan: shared.Plans = None
    trust: shared.Trust = None
    budget: shared.Budgets = BUDGETS
    protocol: Annotated[
        str,
        typer.Option(
            help="question: the question's tokens go through the sparse path, one by one, and then the answer's. "
            "prefill: the question is read densely too, all but its last token. Both with a comma."
        ),
    ] = "question"
    dense_layers: shared.DenseLayers = 0
    sparse_layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers that selectors choose in, such as 0-9,12; the others stay dense. Repeat it to compare sets. "
            f"Default: {shared.ALL_LAYERS}, every one that attends to the whole context, but for --dense-layers."
        ),
    ] = None
    sink: shared.Sink = 4
    window: shared.Window = 64
    seal: shared.Seal = None
    kv_rows: shared.KvRows = None
    text: Annotated[
        list[str] | None,
        typer.Option(help=f"For {AGREEMENT}: a folder of UTF-8 files, {shared.TEXT_HELP} Repeat for more."),
    ] = None
    last: Annotated[int, typer.Option(help=f"Tokens at the end of each window that {AGREEMENT} looks at.")] = 64
    filler: Annotated[
        str | None, typer.Option(help=f"To hide needles in: {shared.TEXT_HELP} Default: made-up sentences.")
    ] = None
    qa: Annotated[
        Path | None,
        typer.Option(help=f"Questions and documents for {QA}: a JSON file in the form of SQuAD or HotpotQA."),
    ] = None
    ruler_words: Annotated[
        Path | None,
        typer.Option(help=f"More words for {CWE}: RULER's english_words.json, for lists longer than wonderwords'."),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files of prompts, JSON Lines, JSON or parquet, or folders of them: your own (prompt, or context and "
            "question, and answers), or a benchmark's as it publishes them. Repeat for more."
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            help=f"The form of --prompts, of {', '.join(LAYOUTS)}; NAME:TASK where files do not say the benchmark's "
            "task. Default: told from the fields."
        ),
    ] = None
    templates: Annotated[
        Path | None,
        typer.Option(
            help="The benchmark's own file of prompts, or a clone of its repository. Default: beside the data."
        ),
    ] = None
    demos: Annotated[
        Path | None, typer.Option(help="The file that HELMET draws the examples before a question from.")
    ] = None
    scoring: Annotated[
        str,
        typer.Option(
            help="Of --prompts of the layout plain. all: share of the answers found, less where values are named that "
            "were not asked for; part: any found; exact: nothing but an answer; f1: words shared with the nearest."
        ),
    ] = "all"
    template: Annotated[
        str, typer.Option(help="How --prompts with a context and a question are written; \\n is a line's end.")
    ] = TEMPLATE.replace("\n", "\\n")
    tail: Annotated[int, typer.Option(help="Characters at the end of a whole prompt that count as its question.")] = (
        TAIL
    )
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of an answer at most. Default: twice the right answers' and 8; with --prompts {OWN_TOKENS}."
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longer --prompts lose the middle of their context, as in LongBench. Default: what is too long for "
            "the model is refused."
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put prompts into the model's chat template; ask an --endpoint as a chat."),
    ] = False
    dtype: shared.ModelDtype = None
    device: shared.Device = None
    chunk: shared.Chunk = 2048
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records, eval.jsonl, and the figures; what is there already is not measured again."
        ),
    ] = Path("eval")
    results: Annotated[
        ResultsForm | None,
        typer.Option(
            help="kvpress: write predictions.csv, metrics.json and config.yaml of every method and budget too, as "
            "kvpress' leaderboard has them; of --prompts of its layout."
        ),
    ] = None
    json: shared.JsonLines = False
    figures: shared.Figures = True

    def __post_init__(self) -> None:
        values.check_positive(
            {
                "--chunk": self.chunk,
                "--seal": self.seal,
                "--concurrency": self.concurrency,
                "--lengths": self.prompt_lengths[0],
                "--samples": self.samples,
                "--last": self.last,
                "--answer-tokens": self.answer_tokens,
                "--max-length": self.max_length,
            }
        )
        values.check_one_of("--scoring", self.scoring, SCORINGS)
        if self.layout is not None:
            layout_named(self.layout)

    def check_together(self) -> None:
        """Refuse options that exclude each other, or that need another."""
        if self.endpoint and self.engine is not EngineName.local:
            raise ValueError("--engine vllm runs a model here, and --endpoint asks servers: give one of the two")
        if self.results is not None and self.endpoint:
            raise ValueError("--results kvpress needs the rows that were read, which no server of --endpoint says")
        if self.concurrency is not None and not self.endpoint and self.engine is EngineName.local:
            raise ValueError("--concurrency is of servers and of vLLM: name a server with --endpoint, or --engine vllm")
        self._check_effect()
        if bool(self.text) != (AGREEMENT in self.tasks):
            raise ValueError(f"--task {AGREEMENT} and --text go together")
        if (self.qa is not None) != (QA in self.tasks):
            raise ValueError(f"--task {QA} and --qa go together")
        if self.ruler_words is not None and CWE not in self.tasks:
            raise ValueError(f"--ruler-words are for --task {CWE}")
        if not self.prompts and (alone := shared.spelled(name for name in OF_PROMPTS if name in self.given)):
            raise ValueError(f"{alone} is of --prompts: name a file with it")

    def _check_effect(self) -> None:
        """NoEffect for a budget that was asked for and covers the longest prompt that is made or cut to length."""
        from sparseattn.core.effects import idle_budget, refuse

        longest = max(self.prompt_lengths[-1] if self.tasks else 0, self.max_length or 0)
        unknown = bool(self.prompts) and self.max_length is None  # how long these are is known when they are read
        if self.endpoint or unknown or self.budget == BUDGETS:
            return
        if any(method.selector is not None and method.selector.uses_budget for method in self.methods):
            for budget in values.budgets(self.budget):
                refuse(idle_budget(budget, longest, self.sink, self.window, "the longest prompt"))

    @cached_property
    def given(self) -> set[str]:
        """The parameters that the user gave."""
        return shared.given_options(self.context)

    @cached_property
    def model_name(self) -> str:
        """The model here: the one that is named, or `inputs.leading_model`."""
        from sparseattn.cli.inputs import leading_model

        return leading_model() if self.model is None else self.model

    @cached_property
    def tasks(self) -> list[str]:
        """Names in `TASKS`, RULER's, and `AGREEMENT`."""
        task = self.task or ("" if self.prompts else GENERATED)
        return values.names(task, "--task", (*TASKS, AGREEMENT, *TEMPLATES))

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Of generated prompts and of windows of a text, in tokens, ascending."""
        return sorted(set(values.integers(self.lengths, "--lengths") or []))

    @cached_property
    def needle_depths(self) -> list[float]:
        """Where needles lie, each once."""
        return list(dict.fromkeys(values.decimals(self.depths, "--depths")))

    @property
    def seeds(self) -> range:
        """A seed for each sample."""
        return range(self.seed, self.seed + self.samples)

    @property
    def ruler_seed(self) -> int:
        """The seed of all prompts of one of RULER's tasks."""
        return self.seed if "seed" in self.given else SEED

    @cached_property
    def protocols(self) -> list[str]:
        """Names in `PROTOCOLS`, each once."""
        return values.names(self.protocol, "--protocol", PROTOCOLS)

    @property
    def specs(self) -> Sequence[str]:
        """The selectors, as texts."""
        if self.endpoint:
            return ()
        if self.selector or self.roles or self.plan:
            return self.selector or ()
        return SERVED if self.engine is EngineName.vllm else SELECTED

    @cached_property
    def methods(self) -> list[Method]:
        """What is compared, full attention first."""
        from sparseattn.cli.eval_methods import methods
        from sparseattn.cli.inputs import open_roles
        from sparseattn.roles.plan import Plan

        modules = shared.trusted(self.trust, self.selector)
        return methods(
            self.specs,
            self.budget,
            self.prompt_lengths,
            self.sparse_layers or [shared.ALL_LAYERS],
            [*open_roles(self.roles, trusted=modules), *open_roles(self.plan, Plan, modules)],
            self.codecs,
            self.seal,
        )

    @property
    def learns(self) -> bool:
        """Whether any method learns from the prefill's queries."""
        selectors = any(method.selector is not None and method.selector.learns for method in self.methods)
        return selectors or any(codec is not None and codec.last_queries > 0 for codec in self.codecs)

    @cached_property
    def codecs(self) -> list[RowCodec | None]:
        """What keeps sealed rows; None: they stay as they come."""
        return values.row_codecs(self.kv_rows)

    @property
    def zones(self) -> dict[str, int]:
        """Rows and layers that no selector chooses in."""
        return {"sink": self.sink, "window": self.window, "dense_layers": self.dense_layers}
