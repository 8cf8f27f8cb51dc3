"""The options of `sparseattn serve`, and what its help says; see `cli.command`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.serving.vllm.above import AUTO
from sparseattn.serving.vllm.defaults import ABOVE, BUDGET, DENSE_LAYERS, REFUSE, SELECTOR, SINK, WINDOW
from sparseattn.serving.vllm.defaults import STOCK as STOCK_VLLM

if TYPE_CHECKING:
    from sparseattn.roles.plan import Plan
    from sparseattn.serving.vllm.server import ServedModel
    from sparseattn.serving.vllm.settings import Settings

GROUPS = {  # of options, in help
    "What is read": ("selector", "budget", "sink", "window", "plan", "trust", "dense_layers", "above"),
    "What requests may ask": ("per_request", "max_budget"),
    "Where it listens": ("name", "host", "port", "drain"),
    "The engine": ("dtype", "max_model_len", "tensor_parallel_size", "kv_cache_gib", "on_mismatch"),
}
STOCK = "none"  # the --selector that leaves vLLM as it is
GIB = 1 << 30


@dataclass(frozen=True, eq=False)
class ServeOptions:
    """Serve MODEL with vLLM's OpenAI-compatible server, with sparse attention in long sequences.

    Ctrl-C or SIGTERM lets running requests finish; a second one stops the server at once.
    """

    context: typer.Context
    model: Annotated[str, typer.Argument(metavar="MODEL", help=shared.MODEL_HELP, autocompletion=completion.models)]
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="VLLM_ARGUMENT", help="Further arguments for vLLM's server, after --."),
    ] = None
    selector: Annotated[
        str,
        typer.Option(
            help="A method that indexes pages, such as quest:page=32 or lowbit:bits=1,page=16; window; a class of "
            f"your own, package.module:Class; or {STOCK} for vLLM's own attention.",
            autocompletion=completion.selectors(STOCK),
        ),
    ] = SELECTOR
    budget: Annotated[int, typer.Option(help="Tokens that a query reads besides sink and window.")] = BUDGET
    sink: shared.Sink = SINK
    window: shared.Window = WINDOW
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan that `sparseattn recommend --for vllm` wrote for this model. It sets the selector and the "
            "budget of every layer, sink and window."
        ),
    ] = None
    trust: shared.Trust = None
    dense_layers: shared.DenseLayers = DENSE_LAYERS
    above: Annotated[
        str | None,
        typer.Option(
            metavar=f"<int|{AUTO}>",
            help=f"Sequences of at most this many tokens get full attention. {AUTO}: the engine measures at its start "
            f"from which length it gains. Default: {AUTO} on CPUs, {ABOVE} on GPUs and with --tensor-parallel-size; "
            "`sparseattn machine` predicts from which length a GPU gains.",
        ),
    ] = None
    on_mismatch: Annotated[
        str,
        typer.Option(
            help=f"What to do if vLLM's cache does not pass the self-test: {REFUSE} to start, or serve as {STOCK_VLLM}."
        ),
    ] = REFUSE
    per_request: Annotated[
        bool, typer.Option(help="Let a request ask for a budget of its own, or for dense decoding.")
    ] = True
    max_budget: Annotated[
        int | None,
        typer.Option(
            help="Largest budget that a request may ask for; then none may ask for dense decoding. Default: requests "
            "may ask for any budget."
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Model name for clients. Default: MODEL.")] = None
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: auto (as stored), {', '.join(shared.Dtype)}.")] = (
        "auto"
    )
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens. Default: as many as the model supports.")
    ] = None
    tensor_parallel_size: Annotated[int, typer.Option(help="Number of devices that each layer is split over.")] = 1
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(
            help="KV cache on each device, in GiB. Default: a quarter of the memory on a CPU, vLLM's choice on a GPU."
        ),
    ] = None
    drain: Annotated[int, typer.Option(help="Seconds that running requests get to finish after Ctrl-C or SIGTERM.")] = (
        20
    )

    def __post_init__(self) -> None:
        values.check_one_of("--dtype", self.dtype, ("auto", *shared.Dtype))
        values.check_one_of("--on-mismatch", self.on_mismatch, (REFUSE, STOCK_VLLM))
        values.check_positive(
            {
                "--port": self.port,
                "--max-budget": self.max_budget,
                "--max-model-len": self.max_model_len,
                "--tensor-parallel-size": self.tensor_parallel_size,
            }
        )
        if self.drain < 0:
            raise ValueError(f"--drain must be 0 or more, got {self.drain}")
        if self.max_budget is not None and not self.per_request:
            raise ValueError(
                "--max-budget limits what requests ask for, and --no-per-request lets them ask for nothing: leave one "
                "of them out"
            )
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < 2**20:
            raise ValueError(f"--kv-cache-gib must be above 0, got {self.kv_cache_gib}")
        planned = {"selector", "budget", "sink", "window", "dense_layers"} & shared.given_options(self.context)
        if self.plan is not None and planned:
            spelled = shared.spelled(sorted(planned))
            raise ValueError(f"--plan sets what each layer does: leave out --plan, or {spelled}")

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that the user named."""
        return shared.trusted(self.trust, [self.selector], self.plan)

    @cached_property
    def opened_plan(self) -> Plan | None:
        """The plan of `--plan`."""
        from sparseattn.roles.plan import Plan

        return None if self.plan is None else Plan.load(self.plan, self.modules)

    @property
    def dense_up_to(self) -> int | str:
        """Tokens of a sequence that stays dense, or `AUTO`."""
        from sparseattn.serving.vllm.installed import engine

        if self.above is None:
            return AUTO if engine().cpu and self.tensor_parallel_size == 1 else ABOVE
        if self.above == AUTO:
            return AUTO
        try:
            return values.row_count(self.above, "--above")
        except ValueError:
            raise ValueError(f'--above takes tokens, such as {ABOVE}, or {AUTO}, got "{self.above}"') from None

    @cached_property
    def settings(self) -> Settings | None:
        """How decoding reads the cache; None: by vLLM's own attention."""
        from sparseattn.serving.vllm.settings import Settings, parse

        if self.opened_plan is not None:
            settings = Settings.of_plan(self.opened_plan, self.dense_up_to)
        elif self.selector == STOCK:
            return None
        else:
            names = ("selector", "budget", "sink", "window", "dense_layers")
            settings = parse({**{name: getattr(self, name) for name in names}, "above": self.dense_up_to})
        settings = replace(
            settings, on_mismatch=self.on_mismatch, per_request=self.per_request, max_budget=self.max_budget
        )
        return replace(settings, modules=os.getcwd()) if self.modules else settings

    def server(self) -> ServedModel:
        """Return the server that is wanted, its model by name still."""
        from sparseattn.serving.vllm.server import ServedModel

        return ServedModel(
            model=self.model,
            name=self.name or self.model,
            settings=self.settings,
            host=self.host,
            port=self.port,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            tensor_parallel=self.tensor_parallel_size,
            cache_bytes=None if self.kv_cache_gib is None else int(self.kv_cache_gib * GIB),
            drain=self.drain,
            more=tuple(self.more or ()),
        )
