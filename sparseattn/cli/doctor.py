"""`sparseattn doctor`: what settings make of every layer of a model, before anything is run with them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer

from sparseattn.cli import options as shared
from sparseattn.cli.command import say
from sparseattn.cli.doctor_options import SELECTOR, DoctorOptions
from sparseattn.cli.inputs import open_model
from sparseattn.core.diagnosis import LayerDiagnosis, nothing_active
from sparseattn.core.no_effect import idle_above, idle_budget, idle_layers
from sparseattn.cost_model import known_models
from sparseattn.models.load import NAMED
from sparseattn.reporting.doctor_tables import layers_table
from sparseattn.reporting.terminal import table_screen
from sparseattn.roles.plan import Plan

IDLE = 1  # the exit status where no layer would leave a row out


def run(options: DoctorOptions) -> None:
    """Run `sparseattn doctor`."""
    _ = options.file
    model = _opened(options)
    config = model.config.get_text_config(decoder=True)
    length = options.length or getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"{options.model} does not say how many tokens it supports: give --length")
    lines, most = _lines(options, model, length)
    if options.json:
        typer.echo(
            "\n".join(json.dumps({"model": options.model, "for": options.engine.value, **asdict(x)}) for x in lines)
        )
    else:
        how = "vLLM" if options.vllm else "a SparseCache"
        table_screen().print(layers_table(f"{options.model} in {how}, a sequence of {length:,} rows", lines))
    for sentence in _without_effect(options, length, most):
        say(sentence, "yellow")
    if nothing_active(lines):
        say(f"no layer would skip a token at {length:,} tokens", "red")
        raise typer.Exit(IDLE)


def _opened(options: DoctorOptions) -> Any:
    """Return the model, or one of its attention's shape where that is known by name and nothing asks for weights."""
    from sparseattn.models.skeleton import skeleton

    known, name = known_models.named(), options.model
    if name not in known or name in NAMED or Path(name).exists():
        return open_model(name, None, torch.device("cpu"))[0]
    if options.plan is not None:
        raise ValueError(f"a plan is for the weights of one model: name the folder or hub name of {name} for --plan")
    say(f"{name}: the shape that the package knows by this name; no weights are read")
    return skeleton(known[name]["config"])


def _lines(options: DoctorOptions, model: Any, length: int) -> tuple[list[LayerDiagnosis], int]:
    """Return a line for each layer, and how many of the first may stay dense so that one is sparse."""
    from sparseattn.models.diagnosis import diagnosed
    from sparseattn.models.sparse_cache import SparseCache
    from sparseattn.serving.vllm.diagnosis import diagnosed_for_vllm

    whole = SparseCache(model, "window", None, sink=0, window=1)
    if options.vllm:
        return diagnosed_for_vllm(whole, options.settings, length), len(whole.sparse_layers) - 1
    zones: dict[str, Any] = {"sink": options.sink, "window": options.window, "seal": None}
    file, most = options.file, max(whole.sparse_layers)
    if isinstance(file, Plan):
        return diagnosed(SparseCache(model, plan=file, seal=None), length), most
    zones["dense_layers"] = min(options.first_dense, len(whole.layers))
    if file is not None:
        return diagnosed(SparseCache(model, budget=options.rows, roles=file, **zones), length), most
    return diagnosed(SparseCache(model, options.selector or SELECTOR, options.rows, **zones), length), most


def _without_effect(options: DoctorOptions, length: int, most: int) -> list[str]:
    """Return a sentence for each setting that changes nothing at a length."""
    reasons: list[str | None] = []
    if options.vllm:
        reasons.append(idle_above(options.above, length, "the sequence"))
    elif "above" in options.given:
        reasons.append(
            "--above is of vLLM (--for vllm): a SparseCache is sparse from the first row on that it can leave"
        )
    of_plan = shared.spelled(sorted({"budget", "sink", "window", "dense_layers"} & options.given))
    if options.file is None:
        reasons.append(idle_budget(options.rows, length, options.sink, options.window, "the sequence"))
        reasons.append(idle_layers(options.first_dense, most))
    elif isinstance(options.file, Plan) and of_plan:
        reasons.append(f"a plan says what each layer reads: {of_plan} change nothing")
    return [sentence for sentence in reasons if sentence is not None]
