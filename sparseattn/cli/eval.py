"""`sparseattn eval`: what each method leaves of a model's answers to long prompts, and of its predictions of a text;
and what servers answer to the same prompts."""

from __future__ import annotations

import contextlib
import itertools
import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.cli import common
from sparseattn.cli.common import (
    KV_BITS_HELP,
    LEAD,
    MODEL_HELP,
    PLAN_HELP,
    ROLES_HELP,
    SELECTOR_HELP,
    TEXT_HELP,
    Trust,
    in_a_sentence,
    open_roles,
    own_selectors,
    results_folder,
    trusted,
)
from sparseattn.cli.eval_engines import addresses, local, served, settings_of_methods, switched
from sparseattn.cli.eval_plan import ALL_LAYERS, Wanted, one_of, positive
from sparseattn.cli.eval_run import measured
from sparseattn.cli.eval_show import show
from sparseattn.cli.eval_sources import OWN_TOKENS, Files, sources
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.prompts import TAIL, TEMPLATE
from sparseattn.evaluation.tasks.records import Records
from sparseattn.evaluation.tasks.registry import TASKS
from sparseattn.evaluation.tasks.scoring import EDITION, SCORINGS
from sparseattn.models.load import REFERENCE
from sparseattn.reporting.eval_records import Row
from sparseattn.reporting.eval_tables import marked
from sparseattn.roles.plan import Plan
from sparseattn.serving.vllm.settings import DEFAULT
from sparseattn.utils.devices import usable_device
from sparseattn.utils.dtypes import STORED, stored_dtype
from sparseattn.utils.locks import locked

SELECTED = ("exact", "quest", "lowbit", "random", "window")
SERVED = (DEFAULT, "lowbit:bits=1,page=16", "window")  # by vLLM
LOCAL, VLLM = ENGINES = ("local", "vllm")
GENERATED = "passkey,kv"
AT_ONCE = 4  # requests at a server


@in_a_sentence
def evaluate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{MODEL_HELP} Default: {LEAD}; {REFERENCE} where that cannot be had. With --endpoint its tokenizer "
            "alone is loaded; default the first server's own."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="local: the model here, through transformers; vllm: in vLLM's engine in this process, all "
            "its decoding sparse, for selectors whose index is by page."
        ),
    ] = LOCAL,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="[NAME=]URL[#MODEL] of a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...), asked "
            "instead of a model here; the key is OPENAI_API_KEY. Repeat it: the others are compared with the first."
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at an --endpoint, or prompts in vLLM, at once. Default: 4.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(TASKS)}, and {AGREEMENT}: how far predictions of --text are from full attention's; "
            f"several with commas. Default: {GENERATED}, or none where --prompts are given."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, or of a window of --text.")] = "1024,4096",
    depths: Annotated[str, typer.Option(help="Where the needle lies: 0 is the beginning, 1 the end.")] = "0,0.5,1",
    samples: Annotated[int, typer.Option(help="Prompts for each length and depth, or windows of --text.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; each next one adds one.")] = 0,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            callback=own_selectors,
            help=f"{SELECTOR_HELP} Default: {' '.join(SELECTED)}. Full attention is measured beside them.",
        ),
    ] = None,
    roles: Annotated[list[Path] | None, typer.Option(help=ROLES_HELP)] = None,
    plan: Annotated[list[Path] | None, typer.Option(help=PLAN_HELP)] = None,
    trust: Trust = None,
    budget: Annotated[
        str,
        typer.Option(help="Rows beyond sink and window: numbers, shares of the context, a mass (mass:0.95), or all."),
    ] = "64,256,1024",
    protocol: Annotated[
        str,
        typer.Option(
            help="question: the question's tokens go through the sparse path, one by one, and then the answer's. "
            "prefill: the question is read densely too, all but its last token. Both with a comma."
        ),
    ] = "question",
    dense_layers: Annotated[int, typer.Option(help="First layers that stay dense (Quest's paper: 2).")] = 0,
    sparse_layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers that selectors choose in, such as 0-9,12; the others stay dense. Repeat it to compare sets. "
            f"Default: {ALL_LAYERS}, every one that attends to the whole context, but for --dense-layers."
        ),
    ] = None,
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = 4,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = 64,
    seal: Annotated[
        int | None,
        typer.Option(
            help="Rows that wait, all of them read, before sealing; default the selector's span, since more flatters."
        ),
    ] = None,
    kv_bits: Annotated[str, typer.Option(help=KV_BITS_HELP)] = "16",
    text: Annotated[list[str] | None, typer.Option(help=f"For {AGREEMENT}: {TEXT_HELP} Repeat for more.")] = None,
    last: Annotated[int, typer.Option(help=f"Tokens at the end of each window that {AGREEMENT} looks at.")] = 64,
    filler: Annotated[
        str | None, typer.Option(help=f"To hide needles in: {TEXT_HELP} Default: made-up sentences.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON Lines of your own prompts: prompt, or context and question, and answers; the names of fields in "
            "LongBench, RULER and InfiniteBench are understood. Repeat for more."
        ),
    ] = None,
    scoring: Annotated[
        str,
        typer.Option(
            help="Of --prompts. all: share of the answers found, less where values are named that were not asked for; "
            "part: any found; exact: nothing but an answer; f1: words shared with the nearest."
        ),
    ] = "all",
    template: Annotated[
        str, typer.Option(help="How --prompts with a context and a question are written; \\n is a line's end.")
    ] = TEMPLATE.replace("\n", "\\n"),
    tail: Annotated[
        int, typer.Option(help="Characters at the end of a whole prompt that count as its question.")
    ] = TAIL,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of an answer at most. Default: twice the right answers' and 8; with --prompts {OWN_TOKENS}."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longer --prompts lose the middle of their context, as in LongBench. Default: what is too long for "
            "the model is refused."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put prompts into the model's chat template; ask an --endpoint as a chat."),
    ] = False,
    dtype: Annotated[str | None, typer.Option(help=f"Of the model: {', '.join(STORED)}; as stored by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per forward call of the prefill.")] = 2048,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records, eval.jsonl, and the figures; what is there already is not measured again."
        ),
    ] = Path("eval"),
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNGs into --out.")] = True,
) -> None:
    """Ask a model about long prompts, with full attention and with every selector and budget, and score its answers.

    A prompt is read once; every method goes on from there. Interrupt it as you like: the same command goes on.
    """
    specs = (
        [] if endpoint or ((roles or plan) and not selector) else selector or (SERVED if engine == VLLM else SELECTED)
    )
    positive({"--chunk": chunk, "--seal": seal, "--concurrency": concurrency})
    named = trusted(trust, selector)
    wanted = Wanted.of(
        tasks=task or ("" if prompts else GENERATED),
        lengths=lengths,
        depths=depths,
        samples=samples,
        seed=seed,
        protocols=protocol,
        selectors=specs,
        budgets=budget,
        roles=[*open_roles(roles, trusted=named), *open_roles(plan, Plan, named)],
        layers=sparse_layers or [ALL_LAYERS],
        rounding=common.kv_bits(kv_bits),
        seal=seal,
        last=last,
        answer_tokens=answer_tokens,
        max_length=max_length,
    )
    one_of("--scoring", scoring, SCORINGS)
    stored = None if dtype is None else stored_dtype(dtype, "--dtype")
    one_of("--engine", engine, ENGINES)
    rows = {"sink": sink, "window": window, "dense_layers": dense_layers}
    where = addresses(endpoint, given(context), wanted.tasks) if endpoint else []
    if where and engine != LOCAL:
        raise ValueError("--engine vllm runs a model here, and --endpoint asks servers: give one of the two")
    if concurrency is not None and not where and engine == LOCAL:
        raise ValueError("--concurrency is of servers and of vLLM: name a server with --endpoint, or --engine vllm")
    to_serve = settings_of_methods(wanted, specs, rows, given(context)) if engine == VLLM else []
    if bool(text) != (AGREEMENT in wanted.tasks):
        raise ValueError(f"--task {AGREEMENT} and --text go together")
    if figures:
        from sparseattn.reporting import plots  # noqa: F401 (fails at once if matplotlib is missing, before any work)
    files = Files.read(prompts or [], scoring, template, tail, filler, text or [])
    place = usable_device(device)
    results_folder(out)

    with contextlib.ExitStack() as held:
        held.enter_context(locked(out / "eval.lock", f"--out {out}"))  # of two runs, each would write every record
        if where:
            opened = held.enter_context(served(where, model, chat, concurrency or AT_ONCE))
        elif engine == VLLM:
            opened = held.enter_context(switched(wanted, model, chat, dtype, to_serve, concurrency or AT_ONCE))
        else:
            opened = local(wanted, model, chat, stored, place, rows, seal, chunk)
        asked = sources(wanted, files, opened.engine, opened.tokens)
        settings = {
            **opened.settings,
            "chat": chat,
            "answer_tokens": answer_tokens,
            "scoring": scoring,
            "scoring_edition": EDITION,
        }
        records = Records(out / "eval.jsonl", settings)
        found: list[dict[str, Any]] = []
        first = compared_with(opened.engine)
        each = held.enter_context(contextlib.closing(measured(asked, opened.engine, records)))
        for _, column in itertools.groupby(each, lambda one: (one["task"], one.get("length"))):
            whole = marked(list(column), first)  # what that one answers is known once the column is
            found += whole
            if json:
                typer.echo("\n".join(map(json_module.dumps, whole)))
        show(found, records.path, json=json, figures=figures)


def given(context: typer.Context) -> set[str]:
    """The parameters that the user gave."""
    sources_of = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources_of.items() if source is not None and source.name != "DEFAULT"}


def compared_with(engine: Engine) -> Row:
    """Where the records of what all else is compared with stand in tables."""
    first = engine.passes[0].compared[0]
    return first.label, first.written
