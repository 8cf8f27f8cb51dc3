"""`sparseattn serve`: vLLM's OpenAI-compatible server, whose decoding reads the cache sparsely."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli.common import (
    MODEL_HELP,
    Trust,
    errors,
    in_a_sentence,
    model_progress,
    own_selectors,
    say_terms,
    trusted,
)
from sparseattn.cli.eval import given
from sparseattn.cli.eval_plan import one_of, positive
from sparseattn.reporting.terminal import plain
from sparseattn.roles.plan import Plan
from sparseattn.serving.vllm import installed
from sparseattn.serving.vllm import server as serving
from sparseattn.serving.vllm.settings import DEFAULT, Settings, parse
from sparseattn.utils.devices import quarter_of_memory
from sparseattn.utils.dtypes import STORED

STOCK = "none"  # the --selector that leaves vLLM as it is
GIB = 1 << 30


@in_a_sentence
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="VLLM_ARGUMENT", help="Further arguments of vLLM's server, behind --."),
    ] = None,
    selector: Annotated[
        str,
        typer.Option(
            callback=own_selectors,
            help=f"NAME[:arg=value,...] of a method whose index is by page, such as quest or lowbit:bits=1,page=16; "
            f"window; package.module:Class; {STOCK} serves vLLM's own attention.",
        ),
    ] = DEFAULT,
    budget: Annotated[int, typer.Option(help="Rows beyond sink and window that a query reads.")] = 2048,
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = Settings.sink,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = Settings.window,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan, a file that `sparseattn recommend --for vllm` wrote for this model: selector and budget of "
            "every layer, sink and window."
        ),
    ] = None,
    trust: Trust = None,
    dense_layers: Annotated[int, typer.Option(help="First layers that stay dense.")] = Settings.dense_layers,
    above: Annotated[
        int, typer.Option(help="Sequences of so many rows or fewer are attended to densely.")
    ] = Settings.above,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default as MODEL is called.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    dtype: Annotated[str, typer.Option(help=f"auto (as stored), {', '.join(STORED)}.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a sequence at most; default the model's positions.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share every layer.")] = 1,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="GiB of KV cache on each device; default a quarter of the memory on a CPU, else vLLM's."),
    ] = None,
    drain: Annotated[
        int, typer.Option(help="Seconds that requests under way may still take at SIGTERM or Ctrl-C.")
    ] = 20,
) -> None:
    """Serve MODEL by vLLM's OpenAI-compatible server, with sparse attention where sequences are long.

    A second Ctrl-C, or SIGTERM, ends it at once.
    """
    settings, planned, named = None, None, trusted(trust, [selector])
    if plan is not None:
        said = {"selector", "budget", "sink", "window", "dense_layers"} & given(context)
        if said:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(said))
            raise ValueError(f"a plan says what each layer does: give --plan, or {options}")
        planned = Plan.load(plan, named)
        settings = Settings.of_plan(planned, above)
    elif selector != STOCK:
        settings = parse(
            {
                "selector": selector,
                "budget": budget,
                "sink": sink,
                "window": window,
                "dense_layers": dense_layers,
                "above": above,
            }
        )
    if settings is not None and named:
        settings = replace(settings, modules=os.getcwd())
    one_of("--dtype", dtype, ("auto", *STORED))
    positive(
        {
            "--port": port,
            "--max-model-len": max_model_len,
            "--tensor-parallel-size": tensor_parallel_size,
        }
    )
    if drain < 0:
        raise ValueError(f"--drain is 0 or more, got {drain}")
    if kv_cache_gib is not None and not 0 < kv_cache_gib < 2**20:
        raise ValueError(f"--kv-cache-gib is GiB above 0, got {kv_cache_gib}")
    cache = None if kv_cache_gib is None else int(kv_cache_gib * GIB)
    server = serving.Server(
        model=model,
        name=name or model,
        settings=settings,
        host=host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        tensor_parallel=tensor_parallel_size,
        cache_bytes=cache,
        drain=drain,
        more=tuple(more or ()),
    )
    engine = installed.engine()
    if settings is not None:
        installed.check_plugin()
        if not engine.cpu:
            server = replace(server, backend=serving.CUSTOM)
            _say("sparse attention on a GPU is experimental: it has run under Triton's interpreter, and on no GPU yet")
    if serving.key_apart(server.more)[0] is not None:
        _say(
            f"other users can read the key on this command line until the server starts, and vLLM gets it by "
            f"{serving.SECRET}: set that in the environment instead"
        )
    environment = server.environment(os.environ)
    server.check_address()
    say_terms(model)
    with model_progress() as progress:
        source, called = serving.servable(model, progress)
    if planned is not None:
        serving.check_plan(planned, source, model)
    if cache is None and engine.cpu and serving.SPACE not in environment:
        cache = quarter_of_memory()
        _say(f"KV cache: {cache / GIB:.1f} GiB, a quarter of this machine's memory (--kv-cache-gib says another size)")
    if serving.has_chat_template(source, server.more) is False:
        _say(f"{model} has no chat template: ask by /v1/completions, or name one behind -- by --chat-template")
    server = replace(server, model=source, name=name or called, cache_bytes=cache)
    how = "vLLM's own attention" if settings is None else _described(settings)
    _say(f"serving {server.name} by vLLM {engine.version} at http://{_bracketed(host)}:{port}/v1 with {how}")
    command = server.command()
    os.execve(command[0], command, server.environment(os.environ))


def _described(settings: Settings) -> str:
    zones = f"sink {settings.sink} and window {settings.window}; dense up to {settings.above} rows"
    if settings.layers is not None:
        return f"{settings.called}; {zones}"
    return f"{settings.selector}: {settings.budget} rows beyond {zones} and in the first {settings.dense_layers} layers"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say(line: str) -> None:
    errors.print(f"sparseattn: {plain(line)}", soft_wrap=True)
