"""`sparseattn serve`: vLLM's OpenAI-compatible server, whose decoding reads the cache sparsely."""

from __future__ import annotations

import os
from dataclasses import replace

from sparseattn.cli.command import say
from sparseattn.cli.inputs import say_terms
from sparseattn.cli.progress import model_progress
from sparseattn.cli.serve_options import ServeOptions
from sparseattn.core.no_effect import idle_above, idle_budget, refuse
from sparseattn.serving.vllm import installed
from sparseattn.serving.vllm import server as serving
from sparseattn.serving.vllm.engine_checks import check_requests
from sparseattn.serving.vllm.settings import Settings
from sparseattn.utils.devices import quarter_of_memory

STOCK = "none"  # the --selector that leaves vLLM as it is
GIB = 1 << 30


def run(options: ServeOptions) -> None:
    """Run `sparseattn serve`."""
    settings, server, engine = options.settings, options.server(), installed.engine()
    if settings is not None:
        installed.check_plugin()
        if newer := installed.newer_than_tried():
            say(f"{newer}: it serves if the self-test at its start passes")
        if not engine.cpu:
            check_requests(settings, "cuda")
            server = replace(server, backend=serving.CUSTOM)
            say("sparse attention on a GPU is experimental: it has run under Triton's interpreter, but never on a GPU")
    if serving.key_apart(server.more)[0] is not None:
        say(
            f"other users can read the key on this command line until the server starts; set it in the environment as "
            f"{serving.SECRET} instead"
        )
    environment = server.environment(os.environ)
    server.check_address()
    say_terms(options.model)
    with model_progress() as progress:
        source, called = serving.servable(options.model, progress)
    if options.opened_plan is not None:
        serving.check_plan(options.opened_plan, source, options.model)
    _check_effect(settings, server.max_model_len or serving.positions(source), server.max_model_len is not None)
    cache = server.cache_bytes
    if cache is None and engine.cpu and serving.SPACE not in environment:
        cache = quarter_of_memory()
        say(f"KV cache: {cache / GIB:.1f} GiB, a quarter of this machine's memory (--kv-cache-gib changes this)")
    if serving.has_chat_template(source, server.more) is False:
        say(f"{options.model} has no chat template: use /v1/completions, or add -- --chat-template FILE")
    server = replace(server, model=source, name=options.name or called, cache_bytes=cache)
    how = "vLLM's own attention" if settings is None else _described(settings)
    address = f"http://{_bracketed(server.host)}:{server.port}/v1"
    say(f"serving {server.name} with vLLM {engine.version} at {address} with {how}")
    arguments = server.command()
    os.execve(arguments[0], arguments, server.environment(os.environ))


def _check_effect(settings: Settings | None, longest: int | None, given: bool) -> None:
    """NoEffect for settings by which no sequence of up to `longest` rows would be sparse; None: nobody knows.

    given: whether the user said how long sequences are.
    """
    if settings is None or longest is None:
        return
    what = "the longest sequence (--max-model-len)" if given else "the longest sequence of the model"
    refuse(idle_above(settings.above, longest, what))
    if settings.layers is None and settings.make().uses_budget:
        refuse(idle_budget(settings.budget, longest, settings.sink, settings.window, what))


def _described(settings: Settings) -> str:
    least = "the length that the engine measures" if settings.measured else f"{settings.above:,} tokens"
    zones = f"sink {settings.sink} and window {settings.window}; dense up to {least}"
    if settings.layers is not None:
        return f"{settings.called}; {zones}"
    return f"{settings.selector}: {settings.budget} tokens, {zones} and in the first {settings.dense_layers} layers"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
