"""The options of `sparseattn eval`, checked before anything is read, loaded or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
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
ON_DEVICE = ("dtype", "device", "tensor_parallel")
OF_PROMPTS = ("layout", "templates", "demos", "results", "scoring", "template", "tail", "max_length")
SEEDS = 1 << 32  # RULER's own code draws by these
OF_TASKS, OF_QUESTIONS = ("lengths", "samples"), ("depths", "seed", "filler")
GROUPS = {  # of options, in help
    "Who answers": ("model", "engine", "endpoint", "concurrency", *ON_DEVICE, "chunk", "chat"),
    "Made-up questions": ("task", "lengths", "depths", "samples", "seed", "filler", "qa", "ruler_words"),
    "Agreement on a text": ("text", "last"),
    "Prompts from files": (*OF_PROMPTS[:3], "prompts", "scoring", "template", "tail", "max_length", "results"),
    "Methods": ("selector", "roles", "plan", "trust", "budget", "sink", "window", "seal", "kv_rows"),
    "What is sparse": ("protocol", "dense_layers", "sparse_layers"),
    "Answers and records": ("answer_tokens", "out", "json", "figures"),
}


class ResultsForm(str, Enum):
    """A form that results are written in besides `eval.jsonl`."""

    kvpress = "kvpress"


class EngineName(str, Enum):
    """Where a model runs that no server has."""

    local = "local"
    vllm = "vllm"


@dataclass(frozen=True, eq=False)
class EvalOptions:
    """Ask a model about long prompts, with full attention and with every method and budget, and score its answers.

    The model reads a prompt once, and every method decodes from there. You can interrupt the command at any time; the
    same command continues where it stopped.
    """

    context: typer.Context
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{shared.MODEL_HELP} Default: {shared.LEAD}, or {REFERENCE} if that cannot be fetched. With "
            "--endpoint only its tokenizer is loaded; the default is then the first server's model.",
            autocompletion=completion.models,
        ),
    ] = None
    engine: Annotated[
        EngineName,
        typer.Option(
            help="What runs the model. local: transformers; vllm: vLLM's engine in this process, with selectors that "
            "index pages; all its decode steps are sparse."
        ),
    ] = EngineName.local
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Server to ask instead of running a model here, as [NAME=]URL[#MODEL]. It speaks OpenAI's protocol "
            "(vLLM, SGLang, llama.cpp, ...); its key is read from OPENAI_API_KEY. Repeat the option to compare further "
            "servers with the first."
        ),
    ] = None
    concurrency: Annotated[
        int | None, typer.Option(help="Requests sent at once to an --endpoint, or prompts at once in vLLM. Default: 4.")
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help=f"Tasks, several with commas: {', '.join(TASKS)}; those of RULER, {', '.join(TEMPLATES)}; and "
            f"{AGREEMENT}, which compares next-token distributions on --text with those of full attention. Default: "
            f"{GENERATED}, or none if --prompts are given.",
            autocompletion=completion.several_of((*TASKS, *TEMPLATES, AGREEMENT)),
        ),
    ] = None
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt or of a window of --text, several with commas.")] = (
        "1024,4096"
    )
    depths: Annotated[
        str,
        typer.Option(help="Positions of the needle in the prompt, several with commas: 0 is the beginning, 1 the end."),
    ] = "0,0.5,1"
    samples: Annotated[int, typer.Option(help="Number of prompts per length and depth, or of windows of --text.")] = 2
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the first prompt; each further prompt adds 1. RULER draws all prompts of a task from one "
            f"seed, {SEED} unless you give this option."
        ),
    ] = 0
    selector: Annotated[
        list[str] | None,
        shared.selector_option(f"Default: {' '.join(SELECTED)}. Full attention is always measured too."),
    ] = None
    roles: shared.Roles = None
    plan: shared.Plans = None
    trust: shared.Trust = None
    budget: shared.Budgets = BUDGETS
    protocol: Annotated[
        str,
        typer.Option(
            help="What is decoded sparsely. question: the tokens of the question, one by one, and then the answer; "
            "prefill: only the question's last token and the answer; generate: the answer without its first token. "
            "Several with commas.",
            autocompletion=completion.several_of(PROTOCOLS),
        ),
    ] = "question"
    dense_layers: shared.DenseLayers = 0
    sparse_layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers that decode sparsely, such as 0-9,12; the others stay dense. Repeat the option to compare "
            f"sets of layers. Default: {shared.ALL_LAYERS}, the layers that attend to the whole context, without the "
            "first --dense-layers."
        ),
    ] = None
    sink: shared.Sink = 4
    window: shared.Window = 64
    seal: shared.Seal = None
    kv_rows: shared.KvRows = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Text for the task {AGREEMENT}: a folder of UTF-8 files, {shared.TEXT_HELP} Repeat the option for "
            "several.",
            autocompletion=completion.texts,
        ),
    ] = None
    last: Annotated[
        int, typer.Option(help=f"Number of tokens that {AGREEMENT} compares, at the end of each window.")
    ] = 64
    filler: Annotated[
        str | None,
        typer.Option(
            help=f"Text to hide needles in: {shared.TEXT_HELP} Default: made-up sentences.",
            autocompletion=completion.texts,
        ),
    ] = None
    qa: Annotated[
        Path | None,
        typer.Option(help=f"JSON file of questions and documents for {QA}, as SQuAD or HotpotQA publish them."),
    ] = None
    ruler_words: Annotated[
        Path | None,
        typer.Option(help=f"RULER's english_words.json, for lists of {CWE} that need more words than wonderwords has."),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of prompts (JSON Lines, JSON or parquet), or a folder of such files. Prompts are a benchmark's "
            "as published, or your own with the fields prompt (or context and question) and answers. Repeat the "
            "option for several."
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            help=f"Form of --prompts: {', '.join(LAYOUTS)}. Write NAME:TASK if the files do not name the benchmark's "
            "task. Default: recognised by the fields.",
            autocompletion=completion.one_of(LAYOUTS),
        ),
    ] = None
    templates: Annotated[
        Path | None,
        typer.Option(
            help="The benchmark's file of prompt templates, or a clone of its repository. Default: beside the data."
        ),
    ] = None
    demos: Annotated[Path | None, typer.Option(help="File from which HELMET draws the examples before a question.")] = (
        None
    )
    scoring: Annotated[
        str,
        typer.Option(
            help="Score of --prompts in the layout plain. all: share of the right answers that the reply names, lower "
            "if it names wrong values too; part: any right answer is named; exact: the reply is a right answer and "
            "nothing else; f1: words shared with the closest right answer.",
            autocompletion=completion.one_of(SCORINGS),
        ),
    ] = "all"
    template: Annotated[
        str, typer.Option(help="How the context and the question of --prompts become a prompt; \\n is a new line.")
    ] = TEMPLATE.replace("\n", "\\n")
    tail: Annotated[
        int,
        typer.Option(
            help="Number of characters at the end of a prompt that count as its question, if its file gives none."
        ),
    ] = TAIL
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer in tokens. Default: twice as long as the right answer plus 8; with --prompts "
            f"{OWN_TOKENS}."
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt in tokens: longer --prompts lose the middle of their context, as in LongBench. "
            "Default: prompts that are too long for the model are refused."
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Put prompts into the model's chat template; with --endpoint, send them as chat messages."
        ),
    ] = False
    dtype: shared.ModelDtype = None
    device: shared.Device = None
    tensor_parallel: shared.TensorParallel = False
    chunk: shared.Chunk = 2048
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records (eval.jsonl) and the figures. What it has already is not measured again."
        ),
    ] = Path("eval")
    results: Annotated[
        ResultsForm | None,
        typer.Option(
            help="With kvpress, also write predictions.csv, metrics.json and config.yaml of every method and budget, "
            "in the form of kvpress' leaderboard. Needs --prompts in the layout kvpress."
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
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"--seed is 0 to {SEEDS - 1}, as NumPy takes them, got {self.seed}")
        values.check_one_of("--scoring", self.scoring, SCORINGS)
        if self.layout is not None:
            layout_named(self.layout)

    def check_together(self) -> None:
        """Refuse options that exclude each other, or that need another."""
        if self.endpoint and self.engine is not EngineName.local:
            raise ValueError("--engine vllm and --endpoint exclude each other: give one of the two")
        if self.results is not None and self.endpoint:
            raise ValueError(
                "--results kvpress needs the number of tokens read, which a server of --endpoint does not tell"
            )
        if self.concurrency is not None and not self.endpoint and self.engine is EngineName.local:
            raise ValueError("--concurrency needs --endpoint or --engine vllm")
        if not self.prompts:  # how long these are is known when they are read
            self.check_effect()
        if bool(self.text) != (AGREEMENT in self.tasks):
            raise ValueError(f"--task {AGREEMENT} needs --text, and only that task takes it")
        if (self.qa is not None) != (QA in self.tasks):
            raise ValueError(f"--task {QA} needs --qa, and only that task takes it")
        if self.ruler_words is not None and CWE not in self.tasks:
            raise ValueError(f"only --task {CWE} takes --ruler-words")
        if not self.prompts and (alone := shared.spelled(name for name in OF_PROMPTS if name in self.given)):
            raise ValueError(f"{alone} needs --prompts: name a file")
        self._check_asked()

    def _check_asked(self) -> None:
        """Refuse options of tasks that are not asked, and records among the prompts."""

        def given(names: Sequence[str]) -> str:
            return shared.spelled(name for name in names if name in self.given)

        if not self.tasks and (alone := given((*OF_TASKS, *OF_QUESTIONS))):
            raise ValueError(f"{alone} needs --task, and --prompts are asked as they are: leave it out or name a task")
        if set(self.tasks) <= {AGREEMENT} and (alone := given(OF_QUESTIONS)):
            raise ValueError(f"{alone} needs a --task with made-up questions: leave it out, or name one")
        if AGREEMENT not in self.tasks and (alone := given(("last",))):
            raise ValueError(f"{alone} needs --task {AGREEMENT}, and only that task takes it")
        for path in self.prompts or ():
            if path.is_dir() and self.out.resolve().is_relative_to(path.resolve()):
                raise ValueError(
                    f"--out {self.out} lies within --prompts {path}, all of whose files are read: name a folder outside"
                )

    def check_effect(self, own: int = 0) -> None:
        """Refuse what reads all rows of the longest prompt: sink and window, or a budget that was asked for.

        Args:
            own: rows of the longest of `--prompts`, with its answer.

        Raises:
            NoEffect: naming the option, and the number that would have an effect.
        """
        from sparseattn.core.no_effect import idle_budget, refuse
        from sparseattn.selectors.baselines.native import Native

        if self.endpoint:
            return
        if self.answer_tokens == 1 and "generate" in self.protocols:
            refuse(
                "--answer-tokens 1 has no effect on --protocol generate: an answer's first token comes from the dense "
                "prefill, so give 2 or more"
            )
        longest = max(self.prompt_lengths[-1] if self.tasks else 0, own)
        selectors = [method.selector for method in self.methods if method.selector is not None]
        if all(isinstance(selector, Native) for selector in selectors):  # a model's own index has no zones
            return
        asked = self.budget != BUDGETS and any(selector.uses_budget for selector in selectors)
        # A share always leaves rows out, so that of it sink and window alone are looked at.
        for budget in values.budgets(self.budget if asked else "1%"):
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

        modules = shared.trusted(self.trust, self.selector, self.roles, self.plan)
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
