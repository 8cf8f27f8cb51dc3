"""`sparseattn recommend`: which method and budget each layer of a model should have, for an error to live with."""

from __future__ import annotations

import contextlib
import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import common
from sparseattn.cli.common import (
    MODEL_HELP,
    SELECTOR_HELP,
    TEXT_HELP,
    in_a_sentence,
    own_selectors,
    results_folder,
    row_count,
)
from sparseattn.cli.eval_plan import one_of, positive
from sparseattn.cli.recommend_asked import Asked, NoPlan
from sparseattn.cli.recommend_run import run
from sparseattn.cli.recommend_show import page, say
from sparseattn.cli.report import write_report
from sparseattn.core.budget import Budget, budget_label, parse_budget
from sparseattn.cost_model.machine import Machine
from sparseattn.recommend.bounds import MEASURES, Bound, parse_error
from sparseattn.recommend.candidates import BUDGETS, METHODS, SERVED
from sparseattn.serving.vllm.settings import Settings, servable
from sparseattn.utils.devices import usable_device
from sparseattn.utils.dtypes import STORED, stored_dtype
from sparseattn.utils.files import write_atomic
from sparseattn.utils.locks import locked

KL = "kl"
HEADS, LAYERS = BY = ("head", "layer")
REPORT = "report.html"
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
    ] = KL,
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
            callback=own_selectors,
            help=f"{SELECTOR_HELP} Default: {' '.join(METHODS)}; for vLLM {' '.join(SERVED)}. Full attention and the "
            "window are always among them.",
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Rows beyond sink and window, or shares of the context, that a layer may have.")
    ] = ",".join(map(budget_label, BUDGETS)),
    by: Annotated[
        str | None,
        typer.Option(
            help="What a method and a budget is chosen for: each KV head (head), or each layer with all its heads "
            "(layer). Default: head, but layer for vLLM, which serves no other."
        ),
    ] = None,
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
        str | None,
        typer.Option(
            help="What tables call the plan. Default: the model, the error, and what of --measure, --machine, "
            "--context, --by, --batch and --for is given."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Of the model: {', '.join(STORED)}; as stored by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per forward call of the prefill.")] = 2048,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for plan.json, plan.md, which says why, report.html, and the records, recommend.jsonl; what "
            "is there already is not measured again."
        ),
    ] = Path("recommend"),
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the plan, and beside it the page of why, as .md. Default: plan.json in --out."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The plan on standard output instead of tables.")] = False,
) -> None:
    """Choose a method and a budget for every layer of a model, and verify the whole on text that nothing was chosen by.

    Interrupt it as you like: the same command goes on.
    """
    bound = Bound(measure, parse_error(error))
    one_of("--by", by or HEADS, BY)
    one_of("--for", engine, ENGINES)
    budgets = tuple(dict.fromkeys(_budget(part) for part in budget.split(",")))
    if engine == VLLM:
        if by == HEADS:
            raise ValueError("--by head is not for vLLM, where the KV heads of a layer agree: leave it out")
        if wrong := [one for one in budgets if not isinstance(one, int)]:
            raise ValueError(f"in vLLM a budget is rows, got {budget_label(wrong[0])}: give such as --budget 64,256")
        for method in selector or ():
            servable(method)
    context = None if at is None else row_count(at, "--context")
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
        budgets=budgets,
        by_head=by in (None, HEADS) and engine != VLLM,
        length=length,
        last=last,
        search=windows,
        held_out=held_out,
        draws=draws,
        sink=sink,
        window=window,
        name=name or _name(model, error, measure, machine, at, batch, by, engine),
        dtype=None if dtype is None else stored_dtype(dtype, "--dtype"),
        device=usable_device(device),
        chunk=chunk,
        vllm=engine == VLLM,
    )
    results_folder(out)
    target = plan or out / "plan.json"
    if target.suffix != ".json":
        raise ValueError(f"--plan ends in .json, since the page of why lies beside it, got {target}")
    because = target.with_suffix(".md")
    if not target.parent.is_dir():
        raise ValueError(f"--plan is in a folder that does not exist: {target.parent}")
    with contextlib.ExitStack() as held:
        held.enter_context(locked(out / "recommend.lock", f"--out {out}"))
        try:
            found = run(asked, out / "recommend.jsonl")
        except NoPlan as why:
            if target.exists():
                raise NoPlan(f"{why}. {target} is of an earlier run") from None
            write_atomic(because, f"# No plan\n\n{why}\n".encode())
            raise
        if asked.vllm:
            Settings.of_plan(found.plan)
        found.plan.save(target)
        write_atomic(because, page(found).encode())
        drawn = write_report([out], out / REPORT)
        if json:
            typer.echo(json_module.dumps(found.plan.record()))
        else:
            say(found, target, because, drawn)


def _budget(text: str) -> Budget:
    found = parse_budget(text)
    if found is None:
        raise ValueError(
            f"--budget has rows, shares or masses, got {text!r}: full attention is always among the choices"
        )
    return found


def _name(
    model: str, error: str, measure: str, machine: str | None, at: str | None, batch: int, by: str | None, engine: str
) -> str:
    """With what makes it another plan than the one without."""
    said = [Path(model).name, error]
    said += [measure] * (measure != KL)
    said += [Path(one).stem for one in (machine,) if one is not None]
    said += [one for one in (at, by) if one is not None]
    said += [f"batch{batch}"] * (batch > 1)
    return "-".join([*said, *[engine] * (engine != ANY)])
