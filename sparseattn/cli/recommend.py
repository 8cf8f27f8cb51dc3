"""`sparseattn recommend`: which method and budget each layer of a model should have, for an error to live with."""

from __future__ import annotations

import contextlib
import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.budget import budget_label, parse_budget
from sparseattn.cli import common
from sparseattn.cli.common import MODEL_HELP, SELECTOR_HELP, TEXT_HELP, in_a_sentence, results_folder
from sparseattn.cli.eval_plan import one_of, positive
from sparseattn.cli.recommend_asked import Asked, NoPlan
from sparseattn.cli.recommend_run import run
from sparseattn.cli.recommend_show import page, say
from sparseattn.devices import usable_device
from sparseattn.dtypes import STORED, stored_dtype
from sparseattn.files import write_atomic
from sparseattn.integrations.vllm.settings import Settings, servable
from sparseattn.locks import locked
from sparseattn.machine import Machine
from sparseattn.recommend.bounds import MEASURES, Bound, parse_error
from sparseattn.recommend.candidates import BUDGETS, METHODS, SERVED

HEADS, LAYERS = BY = ("head", "layer")
PAGE = "recommend.md"
ANY, VLLM = ENGINES = ("transformers", "vllm")


@in_a_sentence
def recommend(
    text: Annotated[
        list[str],
        typer.Option(
            help=f"Of the kind that the model is to read: a folder of UTF-8 files, {TEXT_HELP} Repeat for more."
        ),
    ],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = common.LEAD,
    error: Annotated[str, typer.Option(help="The most that predictions may change, such as 1%; see --measure.")] = "1%",
    measure: Annotated[
        str,
        typer.Option(
            help="What --error bounds. " + "; ".join(f"{name}: {about}" for name, (_, about) in MEASURES.items())
        ),
    ] = "kl",
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict a step's time on it, and have little of that: cpu (as `sparseattn machine` measured it), "
            "h100, h200, a100 or a profile's file. Default: have little of the bytes read."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--context", help="Rows of the context that costs are predicted for, such as 128k. Default: --length."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of a step that costs are predicted for.")] = 1,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{SELECTOR_HELP} Default: {' '.join(METHODS)}. Full attention and the window are always among them."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Rows beyond sink and window, or shares of the context, that a layer may have.")
    ] = ",".join(map(budget_label, BUDGETS)),
    by: Annotated[
        str,
        typer.Option(help="What a method and a budget is chosen for: each KV head, or each layer with all its heads."),
    ] = HEADS,
    engine: Annotated[
        str,
        typer.Option("--for", help="transformers: SparseCache; vllm: what vLLM serves, by layer, one size of page."),
    ] = ANY,
    length: Annotated[int, typer.Option(help="Tokens of a window of the text.")] = 4096,
    last: Annotated[int, typer.Option(help="Tokens at the end of each window that are decoded.")] = 32,
    windows: Annotated[int, typer.Option(help="Windows to choose by.")] = 4,
    held_out: Annotated[int, typer.Option(help="Further windows, to verify on.")] = 6,
    draws: Annotated[int, typer.Option(help="Backward passes a window, by which errors of layers are weighed.")] = 16,
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = 4,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = 64,
    name: Annotated[
        str | None, typer.Option(help="What tables call the plan. Default: the model and the error.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Of the model: {', '.join(STORED)}; as stored by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per forward call of the prefill.")] = 2048,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for plan.json, recommend.md, which says why, and the records, recommend.jsonl; what is there "
            "already is not measured again."
        ),
    ] = Path("recommend"),
    plan: Annotated[Path | None, typer.Option(help="Where to write the plan. Default: plan.json in --out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The plan on standard output instead of tables.")] = False,
) -> None:
    """Choose a method and a budget for every layer of a model, and verify the whole on text that nothing was chosen by.

    Interrupt it as you like: the same command goes on.
    """
    bound = Bound(measure, parse_error(error))
    one_of("--by", by, BY)
    one_of("--for", engine, ENGINES)
    if engine == VLLM:
        for method in selector or ():
            servable(method)
    context = None if at is None else _rows(at)
    positive(
        {
            "--context": context,
            "--batch": batch,
            "--length": length,
            "--last": last,
            "--windows": windows,
            "--held-out": held_out,
            "--draws": draws,
            "--chunk": chunk,
        }
    )
    if sink < 0 or window < 1:
        raise ValueError(f"--sink is 0 or more and --window 1 or more, got {sink} and {window}")
    asked = Asked(
        model=model,
        texts=tuple(text),
        bound=bound,
        machine=None if machine is None else Machine.load(machine),
        context=context,
        batch=batch,
        methods=tuple(selector or (SERVED if engine == VLLM else METHODS)),
        budgets=tuple(dict.fromkeys(parse_budget(part) for part in budget.split(","))),
        by_head=by == HEADS and engine != VLLM,
        length=length,
        last=last,
        search=windows,
        held_out=held_out,
        draws=draws,
        sink=sink,
        window=window,
        name=name or f"{Path(model).name}-{error}",
        dtype=None if dtype is None else stored_dtype(dtype, "--dtype"),
        device=usable_device(device),
        chunk=chunk,
        vllm=engine == VLLM,
    )
    results_folder(out)
    target = plan or out / "plan.json"
    if not target.parent.is_dir():
        raise ValueError(f"--plan is in a folder that does not exist: {target.parent}")
    with contextlib.ExitStack() as held:
        held.enter_context(locked(out / "recommend.lock", f"--out {out}"))
        try:
            found = run(asked, out / "recommend.jsonl")
        except NoPlan as why:
            target.unlink(missing_ok=True)
            write_atomic(out / PAGE, f"# No plan\n\n{why}\n".encode())
            raise
        if asked.vllm:
            Settings.of_plan(found.plan)
        found.plan.save(target)
        write_atomic(out / PAGE, page(found).encode())
        if json:
            typer.echo(json_module.dumps(found.plan.record()))
        else:
            say(found, target, out / PAGE)


def _rows(text: str) -> int:
    """`"128k"` or `"131072"` as rows."""
    number, factor = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    if not number.isdecimal():
        raise ValueError(f"--context is rows such as 32768 or 128k, got {text!r}")
    return int(number) * factor
