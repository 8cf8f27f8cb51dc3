"""What `eval` can put prompts to: opened, with its tokenizer and with the settings that its records depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparseattn.cli.common import errors, leading_model, open_model, open_tokenizer
from sparseattn.cli.eval_plan import Wanted
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
from sparseattn.serving.openai_client import Address, ServedTokenizer, Server, counts_alike
from sparseattn.serving.vllm.offline import Offline, check_offline
from sparseattn.serving.vllm.server import check_plan, servable
from sparseattn.serving.vllm.settings import Settings, parse
from sparseattn.utils.devices import quarter_of_memory

INSIDE = (  # options, as the function has them, that need the model's inside
    *(
        "selector",
        "roles",
        "plan",
        "budget",
        "protocol",
        "dense_layers",
        "sparse_layers",
        "sink",
        "window",
        "seal",
        "kv_bits",
        "text",
        "last",
    ),
    *("dtype", "device", "chunk"),
)


@dataclass(frozen=True, eq=False)
class Opened:
    """An engine that is ready.

    Args:
        engine: as said.
        tokens: what prompts are counted in.
        settings: what its records depend on beyond their keys.
    """

    engine: Engine
    tokens: Tokens
    settings: Mapping[str, Any]


def local(
    plan: Wanted,
    name: str | None,
    chat: bool,
    stored: torch.dtype | None,
    place: torch.device,
    rows: Mapping[str, int],
    seal: int | None,
    chunk: int,
) -> Opened:
    """A model in this process.

    Args:
        plan: what to measure.
        name: of the model; None: the one that leads.
        chat: put prompts into its chat template.
        stored: dtype of its weights; None: as they are stored.
        place: the device.
        rows: sink, window and dense_layers, as `ModelDecoder` takes them.
        seal, chunk: as of `ModelDecoder`.

    Raises:
        ValueError: no such model, or layers that it does not have.
    """
    name = leading_model() if name is None else name
    loaded, tokenizer = open_model(name, stored, place)
    tokens = Tokens(tokenizer, chat)
    wide = stored is torch.float32  # computed so on purpose, of a model that keeps 16 bits
    decoder = ModelDecoder(loaded, **rows, seal=seal, chunk=chunk, queries=plan.queries)
    for method in plan.methods:
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
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "bytes_of": 2 if wide else None,
        **rows,
        "seal": seal,
    }
    return Opened(Local(decoder, tokens, plan.methods, plan.protocols), tokens, settings)


@contextlib.contextmanager
def switched(
    plan: Wanted,
    name: str | None,
    chat: bool,
    dtype: str | None,
    settings: Sequence[Settings],
    concurrency: int,
) -> Iterator[Opened]:
    """vLLM in this process, as long as the block.

    Args:
        plan: what to measure; its methods, full attention first, are served.
        name: of the model; None: the one that leads.
        chat: put prompts into its chat template.
        dtype: of its weights; None: as they are stored.
        settings: of each method but the first.
        concurrency: prompts at once.

    Raises:
        ValueError: no such model, no vLLM, or a method that it cannot serve.
    """
    name = leading_model() if name is None else name
    folder, _ = servable(name)
    for method in plan.methods:
        if isinstance(method.selector, Plan):
            check_plan(method.selector, folder, name)
    tokens = Tokens(open_tokenizer(name), chat)
    first = settings[0] if settings else None
    with Offline(folder, first, dtype or "auto", concurrency, quarter_of_memory()) as engine:
        for one in settings:
            engine.check(one)
        rows = {field: getattr(first, field) for field in ("sink", "window", "dense_layers", "above")} if first else {}
        told = {"model": name, "engine": "vllm", "dtype": dtype, **rows}
        methods = list(zip(plan.methods, (None, *settings), strict=True))
        yield Opened(Switched(engine, tokens, methods), tokens, told)


def settings_of_methods(
    plan: Wanted, specs: Sequence[str], rows: Mapping[str, int], given: Collection[str]
) -> list[Settings]:
    """How vLLM is to serve each method but full attention, checked before any work.

    Args:
        plan: what to measure.
        specs: the selectors, as texts.
        rows: sink, window and dense_layers.
        given: parameters of the command that the user gave.

    Raises:
        ValueError: an option or a task that needs a model's inside, a budget that is not in rows, a method that vLLM
            cannot serve, or no vLLM that can be switched.
    """
    inside = ("roles", "protocol", "sparse_layers", "seal", "kv_bits", "text", "last", "device", "chunk")
    if named := [f"--{name.replace('_', '-')}" for name in inside if name in given]:
        raise ValueError(f"vLLM reads prompts whole and decodes: {', '.join(named)} cannot be had of --engine vllm")
    if AGREEMENT in plan.tasks:
        raise ValueError(f"--task {AGREEMENT} needs a model's inside: it cannot be had of --engine vllm")
    texts = {make_selector(spec).label(): spec for spec in specs}
    found = []
    for method in plan.methods[1:]:
        if method.written is not None and not isinstance(method.budget, int):
            raise ValueError(f"with --engine vllm a --budget is rows, got {method.written}")
        if isinstance(method.selector, Plan):
            method.selector.check_rows(rows["sink"], rows["window"])
            found.append(Settings.of_plan(method.selector, above=0))
            continue
        budget = method.budget if isinstance(method.budget, int) else 1
        found.append(parse({"selector": texts[method.label], "budget": budget, "above": 0, **rows}))
    check_offline()
    return found


def addresses(endpoints: Sequence[str], given: Collection[str], tasks: Collection[str]) -> list[Address]:
    """Where the servers are, checked before any work.

    Args:
        endpoints: as `--endpoint` gives them.
        given: parameters of the command that the user gave.
        tasks: those that are asked.

    Raises:
        ValueError: no URL, two of a name, or an option or a task that needs a model's inside.
    """
    if inside := [f"--{name.replace('_', '-')}" for name in INSIDE if name in given]:
        raise ValueError(
            f"a server reads prompts whole, by its own attention: {', '.join(inside)} cannot be had of --endpoint; "
            f"start a server for each method, and name each with an --endpoint of its own"
        )
    if AGREEMENT in tasks:
        raise ValueError(
            f"a server does not give its predictions of a text: --task {AGREEMENT} cannot be had of --endpoint"
        )
    found: dict[str, Address] = {}
    for one in map(Address.of, endpoints):
        if found.setdefault(one.name, one) != one:
            raise ValueError(f"two endpoints are called {one.name}: {found[one.name].url} and {one.url}")
    return list(found.values())


@contextlib.contextmanager
def served(where: Sequence[Address], model: str | None, chat: bool, concurrency: int) -> Iterator[Opened]:
    """Servers, as long as the block.

    Args:
        where: they are; the others are compared with the first.
        model: whose tokenizer makes the prompts; None: the first server's own.
        chat: ask them as chats.
        concurrency: requests at a server at once.

    Raises:
        ImportError: `openai` is missing.
        ValueError: a server out of reach, or a tokenizer that cannot be had.
    """
    with contextlib.ExitStack() as opened:
        servers = [opened.enter_context(Server(one)) for one in where]
        tokenizer = ServedTokenizer(servers[0]) if model is None else open_tokenizer(model)
        tokens = Tokens(tokenizer, chat)
        for server in servers:
            if (counts := counts_alike(server, tokens.count)) is not None:
                said = (
                    f"sparseattn: the server {server.name} ({server.model}) counts {counts[1]} tokens where the "
                    f"tokenizer of {model or servers[0].name} counts {counts[0]}: lengths are in tokens of the latter"
                )
                errors.print(said, style="yellow", soft_wrap=True)
        settings = {"model": model or servers[0].model}
        yield Opened(Served(servers, tokens, chat, concurrency), tokens, settings)
