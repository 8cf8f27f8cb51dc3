"""Decoding and prefill in vLLM with the plug-in against stock vLLM, in one engine and by turns.

``.venv-vllm/bin/python -m benchmarks.vllm --model random --contexts 32768,131072`` from the repository root writes
``benchmarks/results/vllm-MODEL-DTYPE.json``. Needs vLLM for CPUs (`make vllm`).

The engine keeps the blocks of stock vLLM. A stock step takes vLLM's own metadata and its own attention in every layer:
what the plug-in adds to it is a comparison and a count a layer, under a microsecond. Steps of the two kinds alternate
on the same sequences, so both are timed on the same contexts and on an equally busy machine. Several selectors
(``--selector`` again) take turns too, ``--rounds`` times each; every one has pairs with stock of its own. Every step is
checked by the plug-in's counters.

Prompts of decoding are not computed: the cache is filled with random numbers and the index made of them, which no time
depends on, but for which pages are chosen, and those are scattered as widely as can be. Prefill is timed as it is, on
prompts of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import records
from benchmarks.measure import spread
from benchmarks.records import RESULTS
from benchmarks.vllm_parts import PARTED, clocked_parts, parts_table
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.values import integers
from sparseattn.cost_model.environment import machine, versions
from sparseattn.serving.vllm.defaults import SELECTOR
from sparseattn.utils.devices import features

CHUNK = 2048  # tokens of a step, at most
WARM = 4  # steps of each kind that do not count
SHORT = 64  # tokens of the sequences whose attention takes next to nothing
SHAPE: dict[str, Any] = {  # of the random model
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1 << 18,
}


class Turns:
    """Lets one engine take steps of either kind: `stock`, `sparse`, or `fill`, without the model."""

    def __init__(self) -> None:
        self.kind = "sparse"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        from sparseattn.serving.vllm.cpu import SparseCPUBuilder

        build, forward = SparseCPUBuilder.build, CPUModelRunner._model_forward

        def built(builder: Any, *given: Any, **named: Any) -> Any:
            if self.kind != "sparse":
                return CPUAttentionMetadataBuilder.build(builder, *given, **named)
            return build(builder, *given, **named)

        def forwarded(runner: Any, input_ids: Any = None, positions: Any = None, *given: Any, **named: Any) -> Any:
            if self.kind != "fill":
                return forward(runner, input_ids, positions, *given, **named)
            return torch.zeros(len(positions), runner.model_config.get_hidden_size(), dtype=runner.dtype)

        SparseCPUBuilder.build = built  # type: ignore[method-assign,assignment]
        CPUModelRunner._model_forward = forwarded
        try:
            yield
        finally:
            SparseCPUBuilder.build = build  # type: ignore[method-assign]
            CPUModelRunner._model_forward = forward


def model_folder(name: str, into: Path) -> tuple[str, int]:
    """Where the model is, and the size of its vocabulary."""
    if name == "random":
        from transformers import LlamaConfig

        config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=None)
        config.save_pretrained(into)
        return str(into), int(SHAPE["vocab_size"])
    from sparseattn.models.load import folder_of

    folder = str(folder_of(name))
    return folder, int(json.loads(Path(folder, "config.json").read_text())["vocab_size"])


def fill(config: Any) -> None:
    """Random numbers in every block of the engine's cache."""
    from sparseattn.serving.vllm.adapters import byte_floats

    draw = torch.Generator().manual_seed(0)
    for layer in config.compilation_config.static_forward_context.values():
        if (kept := byte_floats(layer)) is None:
            layer.kv_cache.normal_(generator=draw)
        else:
            for block in layer.kv_cache.view(kept):
                block.copy_(torch.randn(block.shape, generator=draw))


def decode(
    engine: Any,
    turns: Turns,
    context: int,
    batch: int,
    methods: list[dict[str, Any]],
    rounds: int,
    steps: int,
    vocabulary: int,
    say: Callable[[], None],
    parted: bool,
) -> list[dict[str, Any]]:
    """Steps of both kinds behind prompts of so many tokens, for each of the settings `methods`; `parted`: with steps
    whose parts are clocked behind them."""
    from sparseattn.serving.vllm import cpu
    from sparseattn.serving.vllm.counters import stats
    from sparseattn.serving.vllm.settings import parse

    draw = random.Random(0)
    turns.kind = "fill"
    above, each = methods[0]["above"], 2 * (WARM + steps)
    most = rounds * len(methods) * each + len(methods) * parted * 2 * PARTED
    most += 2 + batch * (context // CHUNK + 1)  # the first decodes while the last is filled in
    start_requests(engine, f"{context}-{batch}", context - most, batch, most, draw, vocabulary)
    parts: list[dict[str, Any]] = [{} for _ in methods]
    every: list[dict[str, list[float]]] = [{"stock": [], "sparse": []} for _ in methods]
    read: list[tuple[int, float]] = [(0, 0.0)] * len(methods)
    for turn in range(rounds * len(methods)):
        which = turn % len(methods)
        if len(methods) > 1:  # the index is made anew, in steps that do not count
            turns.kind = "sparse"  # as the engine tries itself by
            cpu.switch(parse(methods[which]))
        for number in range(each):
            turns.kind = ("stock", "sparse")[number % 2]
            before, start = stats(), time.perf_counter()
            out = engine.step()
            seconds = time.perf_counter() - start
            ran = stats() - before
            if len(out) != batch:
                raise RuntimeError(
                    f"a step of {batch} sequences gave {len(out)} tokens: is the cache large enough (--gib)?"
                )
            if turns.kind == "stock" and ran.sparse_steps:
                raise RuntimeError(f"a stock step ran sparsely: {ran}")
            if turns.kind == "sparse":
                if bool(ran.sparse_steps) != (context - most > above) or ran.sparse_steps % batch:
                    rows = f"{context - most} to {context} rows"
                    raise RuntimeError(f"a step of {batch} sequences of {rows}, sparse above {above}: {ran}")
                read[which] = ran.sparse_steps // batch, ran.share
            if number >= 2 * WARM:
                every[which][turns.kind].append(seconds)
            say()
        if parted and turn // len(methods) == rounds - 1:
            parts[which] = clocked_parts(engine, turns, read[which][0])
    end_requests(engine, f"{context}-{batch}", batch)
    return [
        {
            "selector": shown(told["selector"]),
            "budget": told["budget"],
            "context": context,
            "batch": batch,
            "seconds": {kind: spread(seconds) for kind, seconds in taken.items()},
            "tokens_a_second": {kind: round(batch / spread(seconds)["median"], 2) for kind, seconds in taken.items()},
            "speed_up": spread([a / b for a, b in zip(taken["stock"], taken["sparse"], strict=True)]),
            "sparse_layers": layers,
            "rows_read_share": round(share, 4),
            **({"parts": clocked} if parted else {}),
        }
        for told, taken, (layers, share), clocked in zip(methods, every, read, parts, strict=True)
    ]


def asked(given: str, budget: int) -> tuple[str, int]:
    """Return a selector's text, and its budget: its own behind an @, or `budget`."""
    selector, mark, own = given.rpartition("@")
    return (selector, int(own)) if mark and own.isdecimal() else (given, budget)


def shown(selector: str) -> str:
    """Return a selector's text with files by their names, without folders."""
    return re.sub(r"artefact=[^,\]]*/", "artefact=", selector)


def start_requests(
    engine: Any, name: str, tokens: int, batch: int, answer: int, draw: random.Random, vocabulary: int
) -> None:
    """Add requests of random tokens, and take steps until all of them decode."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    for number in range(batch):
        ids = [draw.randrange(vocabulary) for _ in range(tokens)]
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": ids}, options)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {one.request_id for one in engine.step()}


def end_requests(engine: Any, name: str, batch: int) -> None:
    """Abort the requests of `start_requests`."""
    engine.abort_request([f"{name}-{number}" for number in range(batch)])
    while engine.has_unfinished_requests():
        engine.step()


def short_steps(engine: Any, turns: Turns, batch: int, steps: int, vocabulary: int) -> dict[str, Any]:
    """Steps of stock with sequences so short that attention takes next to nothing: what no attention can save."""
    turns.kind = "stock"
    start_requests(engine, f"short-{batch}", SHORT, batch, 2 * batch + WARM + steps, random.Random(2), vocabulary)
    seconds = []
    for number in range(WARM + steps):
        start = time.perf_counter()
        engine.step()
        if number >= WARM:
            seconds.append(time.perf_counter() - start)
    end_requests(engine, f"short-{batch}", batch)
    return {"tokens": SHORT, "batch": batch, "seconds": spread(seconds)}


def removed(one: dict[str, Any], short: dict[str, Any]) -> float | None:
    """Return the share of the time of stock's attention that sparse attention saves, by medians; None
    where stock's steps take no longer than those of short sequences."""
    base, stock, sparse = (
        seconds["median"] for seconds in (short["seconds"], one["seconds"]["stock"], one["seconds"]["sparse"])
    )
    return round((stock - sparse) / (stock - base), 4) if stock > base else None


def prefill(engine: Any, turns: Turns, tokens: int, times: int, vocabulary: int, say: Callable[[], None]) -> Any:
    """Seconds to the first token of prompts of so many tokens, by turns."""
    from vllm import SamplingParams

    draw = random.Random(1)
    taken: dict[str, list[float]] = {"stock": [], "sparse": []}
    for number in range(-2, 2 * times):
        turns.kind = ("stock", "sparse")[number % 2]
        ids = [draw.randrange(vocabulary) for _ in range(tokens)]
        options = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.add_request(f"prefill-{tokens}-{number}", {"prompt_token_ids": ids}, options)
        while engine.has_unfinished_requests():
            engine.step()
        if number >= 0:
            taken[turns.kind].append(time.perf_counter() - start)
        say()
    pairs = [b / a for a, b in zip(taken["stock"], taken["sparse"], strict=True)]
    return {
        "tokens": tokens,
        "pairs": times,
        "seconds": {kind: spread(seconds) for kind, seconds in taken.items()},
        "slower": spread(pairs),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.gib)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    from vllm import LLM

    methods: list[dict[str, Any]] = [
        {
            "selector": selector,
            "budget": budget,
            "sink": 4,
            "window": 64,
            "dense_layers": options.dense_layers,
            "above": options.above,
        }
        for selector, budget in (asked(given, options.budget) for given in options.selector or [SELECTOR])
    ]
    contexts, batches = integers(options.contexts, "--contexts") or [], integers(options.batches, "--batches") or []
    prompts = integers(options.prefill or None, "--prefill") or []
    if (least := min([*contexts, *batches, *prompts, options.rounds])) < 1:
        raise ValueError(f"--contexts, --batches, --prefill and --rounds are 1 or more, got {least}")
    if options.steps % options.rounds:
        raise ValueError(f"--steps are as many in each of --rounds, got {options.steps} and {options.rounds}")
    turns = Turns()
    with tempfile.TemporaryDirectory() as into, turns.installed():
        folder, vocabulary = model_folder(options.model, Path(into))
        llm = LLM(
            model=folder,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            load_format="dummy" if options.model == "random" else "auto",
            skip_tokenizer_init=options.model == "random",
            max_model_len=max([*contexts, *prompts]) + 1,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=max(batches),
            enforce_eager=not options.compiled,
            enable_prefix_caching=False,
            additional_config={"sparseattn": methods[0]},
        )
        engine = llm.llm_engine
        once = options.steps // options.rounds
        turned = options.rounds * len(methods) * 2 * (WARM + once)
        total = len(contexts) * len(batches) * turned + len(prompts) * (2 * options.times + 2)
        with progress_bar() as bar:
            task = bar.add_task(f"vLLM, {options.model}", total=total)

            def say() -> None:
                bar.advance(task)

            read = [prefill(engine, turns, tokens, options.times, vocabulary, say) for tokens in prompts]
            fill(engine.vllm_config)
            decoded = [
                one
                for context in contexts
                for batch in batches
                for one in decode(
                    engine, turns, context, batch, methods, options.rounds, once, vocabulary, say, options.parts
                )
            ]
            short = [short_steps(engine, turns, batch, 2 * options.steps, vocabulary) for batch in batches]
    for one in decoded:
        one["attention_removed"] = removed(one, next(base for base in short if base["batch"] == one["batch"]))
    return {
        "model": options.model,
        "shape": SHAPE if options.model == "random" else None,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "compiled": options.compiled,
        "settings": methods[0] | {"selector": shown(methods[0]["selector"])},
        "decode": decoded,
        "short": short,
        "prefill": read,
        "machine": machine(),
        "features": features(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def tables(record: dict[str, Any]) -> Iterator[Table]:
    """The record as tables."""
    told = record["settings"]
    table = Table(
        title=f"{record['model']}, {record['dtype']}, against stock vLLM",
        box=SIMPLE_HEAD,
    )
    table.add_column("selector")
    compared = ("stock ms", "sparse ms", "times stock", "attention removed")
    for column in ("budget", "context", "batch", *compared, "tokens/s stock", "tokens/s sparse"):
        table.add_column(column, justify="right")
    for one in record["decode"]:
        medians = [1000 * one["seconds"][kind]["median"] for kind in ("stock", "sparse")]
        table.add_row(
            one["selector"],
            str(one.get("budget", told["budget"])),
            f"{one['context']:,}",
            str(one["batch"]),
            *(f"{ms:.1f}" for ms in medians),
            f"{one['speed_up']['median']:.2f}",
            "-" if one["attention_removed"] is None else f"{one['attention_removed']:.0%}",
            *(f"{one['tokens_a_second'][kind]:.1f}" for kind in ("stock", "sparse")),
        )
    yield table
    if any("parts" in one for one in record["decode"]):
        yield parts_table(record["decode"])
    if record["prefill"]:
        table = Table(title="prefill", box=SIMPLE_HEAD)
        for column in ("tokens", "stock s", "sparse s", "times as long"):
            table.add_column(column, justify="right")
        for one in record["prefill"]:
            medians = [one["seconds"][kind]["median"] for kind in ("stock", "sparse")]
            table.add_row(f"{one['tokens']:,}", *(f"{s:.2f}" for s in medians), f"{one['slower']['median']:.3f}")
        yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="random, or a name or folder of a model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the cache, as vLLM calls it, such as fp8")
    parser.add_argument("--contexts", default="32768,131072", help="rows of a sequence when its last token is decoded")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prefill", default="", help="tokens of prompts whose prefill is timed")
    parser.add_argument("--times", type=int, default=5, help="prompts of each kind")
    parser.add_argument("--steps", type=int, default=40, help="of each kind, for each selector")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each selector, in which the steps are taken")
    parser.add_argument(
        "--selector",
        action="append",
        help=f"default {SELECTOR}; several take turns; SELECTOR@512 has a budget of its own",
    )
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--dense-layers", type=int, default=0)
    parser.add_argument("--above", type=int, default=4096)
    parser.add_argument("--gib", type=int, default=10, help="of the cache")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, as vLLM does by default")
    parser.add_argument("--parts", action="store_true", help="clock the parts of a sparse layer, in steps of their own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    record = measure(options)
    name = Path(options.model).name
    out = options.out or RESULTS / f"vllm-{name}-{options.dtype}.json"
    records.save(record, out)
    records.show(record, tables, f"{record['machine']}\n{' '.join(record['features'])}\n{out}", options.json)


if __name__ == "__main__":
    main()
