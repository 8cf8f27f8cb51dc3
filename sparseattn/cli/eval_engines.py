"""What `eval` can put prompts to: opened, with its tokenizer and with the settings that its records depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparseattn.cli import options as shared
from sparseattn.cli.command import say
from sparseattn.cli.eval_options import EvalOptions
from sparseattn.cli.inputs import open_model, open_tokenizer
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.local import Local
from sparseattn.evaluation.tasks.served import Served
from sparseattn.evaluation.tasks.switched import Switched
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.roles.plan import Plan
from sparseattn.roles.roles import Roles
from sparseattn.selectors.registry import make_selector
from sparseattn.serving.openai_client import Server
from sparseattn.serving.questions import Address
from sparseattn.serving.served_tokenizer import ServedTokenizer, counts_alike
from sparseattn.serving.vllm.offline import Offline, check_offline
from sparseattn.serving.vllm.server import check_plan, servable
from sparseattn.serving.vllm.settings import Settings, parse
from sparseattn.utils.devices import quarter_of_memory

AT_ONCE = 4  # requests at a server, or prompts in vLLM
# Options, as the command has them, that need the model's inside; and those among them that vLLM here takes.
INSIDE = (
    *("selector", "roles", "plan", "trust", "budget", "protocol", "dense_layers", "sparse_layers", "sink", "window"),
    *("seal", "kv_rows", "text", "last", "dtype", "device", "tensor_parallel", "chunk"),
)
IN_VLLM = ("selector", "plan", "trust", "budget", "dense_layers", "sink", "window", "dtype")


@dataclass(frozen=True, eq=False)
class Opened:
    """An engine that is ready.

    Args:
        engine: what answers prompts.
        tokens: what prompts are counted in.
        settings: what its records depend on beyond their keys.
    """

    engine: Engine
    tokens: Tokens
    settings: Mapping[str, Any]


def local(options: EvalOptions, place: torch.device, processes: int = 1) -> Opened:
    """Return a model in this process.

    Args:
        options: of the command.
        place: the device.
        processes: that share the model.

    Raises:
        ValueError: no such model, or layers that it does not have.
    """
    name = options.model_name
    stored = shared.torch_dtype(options.dtype)
    model, tokenizer = open_model(name, stored, place, processes)
    tokens = Tokens(tokenizer, options.chat)
    wide = stored is torch.float32  # computed so on purpose, of a model that keeps 16 bits
    decoder = ModelDecoder(model, **options.zones, seal=options.seal, chunk=options.chunk, queries=options.learns)
    for method in options.methods:
        if isinstance(method.selector, Roles):
            decoder.check_roles(method.selector)
            if wide:
                method.selector.count_in(2)
        elif method.selector is not None and wide:
            method.selector.count_in(2)
        decoder.check_layers(method.layers or [], "--sparse-layers")
    settings = {
        "model": name,
        "weights": decoder.fingerprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes_of": 2 if wide else None,
        **options.zones,
        "seal": options.seal,
    }
    return Opened(Local(decoder, tokens, options.methods, options.protocols), tokens, settings)


@contextlib.contextmanager
def switched(options: EvalOptions, settings: Sequence[Settings]) -> Iterator[Opened]:
    """Run vLLM in this process, as long as the block.

    Args:
        options: of the command; its methods, full attention first, are served.
        settings: of each method but the first.

    Raises:
        ValueError: no such model, no vLLM, or a method that it cannot serve.
    """
    name = options.model_name
    folder, _ = servable(name)
    for method in options.methods:
        if isinstance(method.selector, Plan):
            check_plan(method.selector, folder, name)
    tokens = Tokens(open_tokenizer(name), options.chat)
    first = settings[0] if settings else None
    dtype = None if options.dtype is None else options.dtype.value
    with Offline(folder, first, dtype or "auto", options.concurrency or AT_ONCE, quarter_of_memory()) as engine:
        for of_method in settings:
            engine.check(of_method)
        zones = {field: getattr(first, field) for field in ("sink", "window", "dense_layers", "above")} if first else {}
        methods = list(zip(options.methods, (None, *settings), strict=True))
        facts = {"model": name, "engine": "vllm", "dtype": dtype, **zones}
        yield Opened(Switched(engine, tokens, methods), tokens, facts)


def settings_of_methods(options: EvalOptions) -> list[Settings]:
    """Return how vLLM is to serve each method but full attention, checked before any work.

    Raises:
        ValueError: an option or a task that needs a model's inside, a budget that is not in rows, a method that vLLM
            cannot serve, or no vLLM that can be switched.
    """
    if inside := shared.spelled(name for name in INSIDE if name in options.given and name not in IN_VLLM):
        raise ValueError(f"--engine vllm cannot run {inside}: vLLM reads whole prompts and then decodes")
    if AGREEMENT in options.tasks:
        raise ValueError(
            f"--engine vllm cannot run --task {AGREEMENT}, which needs the next-token distributions of the model"
        )
    specs = {make_selector(spec).label(): spec for spec in options.specs}
    settings = []
    for method in options.methods[1:]:
        if method.written is not None and not isinstance(method.budget, int):
            raise ValueError(f"--engine vllm needs a --budget in tokens, such as 1024, got {method.written}")
        if isinstance(method.selector, Plan):
            method.selector.check_rows(options.sink, options.window)
            settings.append(Settings.of_plan(method.selector, above=0))
            continue
        budget = method.budget if isinstance(method.budget, int) else 1
        settings.append(parse({"selector": specs[method.label], "budget": budget, "above": 0, **options.zones}))
    check_offline()
    return settings


def addresses(options: EvalOptions) -> list[Address]:
    """Return where the servers of `--endpoint` are, checked before any work.

    Raises:
        ValueError: no URL, two of a name, or an option or a task that needs a model's inside.
    """
    if inside := shared.spelled(name for name in INSIDE if name in options.given):
        raise ValueError(
            f"--endpoint cannot run {inside}: a server reads whole prompts with its own attention; "
            f"start one server per method, and give one --endpoint for each"
        )
    if AGREEMENT in options.tasks:
        raise ValueError(
            f"--endpoint cannot run --task {AGREEMENT}: a server does not return its next-token distributions"
        )
    by_name: dict[str, Address] = {}
    for address in map(Address.of, options.endpoint or ()):
        if by_name.setdefault(address.name, address) != address:
            raise ValueError(
                f"two endpoints have the name {address.name}: {by_name[address.name].url} and {address.url}"
            )
    return list(by_name.values())


@contextlib.contextmanager
def served(options: EvalOptions, servers_at: Sequence[Address]) -> Iterator[Opened]:
    """Ask servers, as long as the block.

    Args:
        options: of the command; its model is whose tokenizer makes the prompts, None: the first server's own.
        servers_at: where they are; the others are compared with the first.

    Raises:
        ImportError: `openai` is missing.
        ValueError: a server out of reach, or a tokenizer that cannot be had.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(address)) for address in servers_at]
        tokenizer = ServedTokenizer(servers[0]) if options.model is None else open_tokenizer(options.model)
        tokens = Tokens(tokenizer, options.chat)
        for server in servers:
            if (counts := counts_alike(server, tokens.count)) is not None:
                say(
                    f"the server {server.name} ({server.model}) counts {counts[1]} tokens where the tokenizer of "
                    f"{options.model or servers[0].name} counts {counts[0]}: lengths are in tokens of that tokenizer",
                    "yellow",
                )
        engine = Served(servers, tokens, options.chat, options.concurrency or AT_ONCE)
        yield Opened(engine, tokens, {"model": options.model or servers[0].model})
