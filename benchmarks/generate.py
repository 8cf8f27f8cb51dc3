"""Tokens a second: decoding with each selector against dense attention, by turns, behind one prefill.

``python -m benchmarks.generate --tokens 16384,32768`` from the repository root writes
``benchmarks/results/generate-MODEL-DTYPE-DEVICE.json``. Needs Linux, whose /proc tells the peak memory of a process.

The model without attention is measured too: of the time that dense attention takes, `removed` is the share that a way
does not. Dense is the fastest of transformers' own ways here: `sdpa` and `eager` over a cache that is concatenated at
every step, and `static`, sdpa over one that is written in place. How ways take turns, and what counts, is in
`decoding.py`. What is fed behind a prompt stays within the model's positions if the steps do (`beyond`). A
longer prompt may be timed too, as speed needs no positions that the model was trained for; what its answers are worth
there is another matter.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from benchmarks import records
from benchmarks.decoding import (
    DENSE,
    LOOKED_INTO,
    WARM,
    WITHOUT,
    cache_settings,
    dense_ways,
    figures,
    parts,
    sealing,
    sparse_way,
    take_turns,
    time_of,
    way_without_attention,
)
from benchmarks.measure import Clock, peak_memory
from benchmarks.models import SHAPES, prompt, random_model, with_attention, without_attention
from benchmarks.records import RESULTS
from sparseattn.cli.options import MODEL_HELP
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.values import integers
from sparseattn.core.budget import budget_record, parse_budget
from sparseattn.cost_model.environment import idle_threads, machine, versions
from sparseattn.models.load import load_model
from sparseattn.models.packaged import REFERENCE
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_cache import SparseCache, restore
from sparseattn.selectors.abilities import HostOnly
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.utils.devices import features, usable_device
from sparseattn.utils.tensors import STORED

SELECTED = ("exact", "quest", "saap", "moments", "retrieval:share=0.25", "window")


def measure(
    model: Any,
    models: Mapping[str, Any],
    ids: Tensor,
    tokens: int,
    options: argparse.Namespace,
    say: Callable[[str, int], None],
) -> dict[str, Any]:
    """All ways at one length.

    Args:
        model: with sdpa attention; is prepared for sparse attention while it runs.
        models: others of the same weights, by attention implementation.
        ids: `[1,n]`, n at least `tokens` and what is fed behind them (`beyond`).
        tokens: of the prompt.
        say: told what comes and how many units of work that is, then, with "", when one of them is done.
    """
    selectors = [make_selector(spec) for spec in options.selector]
    more = beyond(tokens, positions(model), options)
    room = tokens + more + max(selector.unit for selector in selectors)
    say(f"{tokens} tokens: prefill", 1)
    started = Clock.now(ids.device)
    queries = any(selector.learns for selector in selectors)
    prefill = Prefill(model, ids[:, :tokens], chunk=options.chunk, queries=queries)
    read = Clock.now(ids.device) - started
    say("", 1)
    try:
        ways = dense_ways(prefill, models, room)
        say(f"{tokens} tokens: indexes", len(options.selector))
        ways.append(bare := way_without_attention(models[WITHOUT]))
        for spec in options.selector:
            ways.append(sparse_way(prefill, model, spec, options, room))
            say("", 1)
        del prefill
        at = tokens + WARM
        for way in ways:
            for t in range(tokens, at):
                way.step(ids[:, t : t + 1])
        say(f"{tokens} tokens: steps", len(ways) * options.steps // options.block)
        take_turns(ways, ids[:, at : at + options.steps], options.block, lambda: say("", 1))
        at += options.steps
        last = tokens + more
        sparse = [way for way in ways if isinstance(way.cache, SparseCache)]
        rows = {way.name: way.cache.stats().rows for way in sparse}
        say(f"{tokens} tokens: parts and seals", len(sparse))
        inside, seals = {}, {}
        for way in sparse:
            inside[way.name] = parts(way, ids[:, at : at + LOOKED_INTO])
            seals[way.name] = sealing(way, ids[:, at + LOOKED_INTO : last])
            say("", 1)
    finally:
        restore(model)
    dense = min((way for way in ways if way.name in DENSE), key=lambda way: time_of(way).wall)
    return {
        "tokens": tokens,
        "tokens_beyond": more,
        "prefill_seconds": read.as_dict(),
        "dense": dense.name,
        "without_attention_seconds": time_of(bare).as_dict(),
        "ways": [
            figures(way, dense, bare, seals.get(way.name), inside.get(way.name), rows.get(way.name))
            for way in ways
            if way is not bare
        ],
    }


def beyond(tokens: int, most: int, options: argparse.Namespace) -> int:
    """Tokens fed behind a prompt: the steps, and rows for a seal: as many as the cache waits for, or as fit into the
    model's `most` positions where the prompt and the steps do."""
    steps = WARM + options.steps + LOOKED_INTO
    left = most - tokens - steps
    return int(steps + (min(options.seal + options.window, left) if left > 0 else options.seal + options.window))


def positions(model: Any) -> int:
    """That the model was made for."""
    return int(model.config.get_text_config(decoder=True).max_position_embeddings)


def name_of(options: argparse.Namespace) -> str:
    """What a record's file calls the model: a name, or the last part of a path."""
    name = f"random-{options.random}" if options.random else Path(options.model).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", name)


def default_selectors(options: argparse.Namespace) -> list[str]:
    """Those of `SELECTED` that there are and that can serve the model: the shipped buckets are the reference model's,
    and what searches in host memory needs the rows there."""
    known = [spec for spec in SELECTED if spec.partition(":")[0] in SELECTORS]
    kinds = {spec: SELECTORS[spec.partition(":")[0]] for spec in known}
    if options.random or options.model != REFERENCE:
        known = [spec for spec in known if not issubclass(kinds[spec], Partitioned)]
    if torch.device(options.device).type != "cpu" and options.sealed_device != "cpu":
        known = [spec for spec in known if not issubclass(kinds[spec], HostOnly)]
    return known


def check(model: Any, options: argparse.Namespace) -> None:
    """ValueError where a selector or budget does not fit the model or the machine has no room for all copies."""
    most = positions(model)
    for spec in options.selector:
        with SparseCache(model, spec, options.budget, **cache_settings(options)) as tried:
            layers = tried.prepared.layers.values()
            if not tried.sparse_layers:
                raise ValueError(f"--dense-layers {options.dense_layers} leaves no layer of the model to be sparse")
            unit = max(layer.rows.selector.unit for layer in tried.sparse_layers.values())
        for tokens in options.tokens:
            if (more := beyond(tokens, most, options)) < unit:
                raise ValueError(
                    f"behind --tokens {tokens} the model has positions for {more} more, and {spec} seals {unit} rows "
                    f"at a time: take {unit - more} tokens less"
                )
    row = sum(2 * layer.heads * layer.size * layer.dtype.itemsize for layer in layers)
    copies = 1 + len(DENSE) + len(options.selector)
    needed = row * max(tokens + beyond(tokens, most, options) for tokens in options.tokens) * copies
    on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else machine()["memory_gib"] * 2**30
    if needed > free:
        raise ValueError(
            f"{copies} copies of the keys and values of {max(options.tokens)} tokens take {needed / 2**30:.1f} GiB, "
            f"{model.device} has {free / 2**30:.1f}: name fewer --selector, --tokens or (--random) --layers"
        )


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A record in words: speed, and where the time of a sparse step goes."""
    for one in record["lengths"]:
        speed = Table(
            title=f"{one['tokens']} tokens, budget {record['budget']}; dense is transformers' {one['dense']}, and the "
            f"model without attention takes {one['without_attention_seconds']['wall'] * 1e3:.2f} ms",
            title_justify="left",
            box=SIMPLE_HEAD,
        )
        speed.add_column("way")
        for title in (
            "ms a step",
            "sealing",
            "tokens/s",
            "to dense",
            "rounds",
            "processor",
            "removed",
            "rows",
            "index s",
            "same",
        ):
            speed.add_column(title, justify="right", no_wrap=True)
        inside = Table(title="ms of a step in its parts", title_justify="left", box=SIMPLE_HEAD)
        inside.add_column("way")
        for way in one["ways"]:
            seal, build, low_high = way["sealing_seconds_per_token"], way["index_seconds"], way["speed_up_range"]
            speed.add_row(
                way["name"],
                f"{way['seconds_per_step']['wall'] * 1e3:.2f}",
                "" if seal is None else f"{seal['wall'] * 1e3:.2f}",
                f"{way['tokens_per_second']:.1f}",
                f"{way['speed_up']:.2f}",
                "{:.2f}-{:.2f}".format(*low_high),
                f"{way['speed_up_processor']:.2f}",
                "" if way["attention_removed"] is None else f"{way['attention_removed']:.0%}",
                "" if way["rows"] is None else f"{way['rows']:.0f}",
                "" if build is None else f"{build['wall']:.2f}",
                f"{way['same_token_as_dense']:.0%}",
            )
            if way["parts_seconds"] is not None:
                if len(inside.columns) == 1:
                    for name in way["parts_seconds"]:
                        inside.add_column(name, justify="right")
                inside.add_row(way["name"], *(f"{seconds * 1e3:.2f}" for seconds in way["parts_seconds"].values()))
        yield speed
        yield inside


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.generate", description="Tokens a second with each selector and with dense attention."
    )
    out.add_argument("--tokens", default="16384,32768", help="of a prompt; several with commas")
    out.add_argument(
        "--selector", action="append", help=f"repeat for more; default, as far as they fit: {' '.join(SELECTED)}"
    )
    out.add_argument("--budget", default="256", help="rows, a share of the context (1%%) or all")
    out.add_argument("--steps", type=int, default=64, help="that count, of every way")
    out.add_argument("--block", type=int, default=8, help="steps of a way before the next one's turn")
    out.add_argument("--model", default=REFERENCE, help=MODEL_HELP)
    out.add_argument("--random", choices=SHAPES, help="instead of --model: a Llama of random weights")
    out.add_argument("--layers", type=int, help="of a --random model; default all of its shape")
    out.add_argument("--dtype", choices=STORED, help="default: the model's; random: bfloat16")
    out.add_argument("--sink", type=int, default=4)
    out.add_argument("--window", type=int, default=64)
    out.add_argument("--seal", type=int, default=1024, help="rows that wait before they are sealed")
    out.add_argument("--dense-layers", type=int, default=0, help="first layers that stay dense")
    out.add_argument("--sealed-device", choices=("cpu",), help="keep sealed rows in host memory")
    out.add_argument("--kv-rows", help="a row codec of sealed rows, such as kivi:bits=8; default as they come")
    out.add_argument("--chunk", type=int, default=2048, help="tokens a forward pass of the prefill")
    out.add_argument("--device", help="default a CUDA device where there is one, else cpu")
    out.add_argument("--threads", type=int, default=torch.get_num_threads())
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    out.add_argument("--json", action="store_true", help="print the record, on one line")
    return out


def settle(options: argparse.Namespace) -> None:
    """Turns texts into values; ValueError for what cannot be."""
    options.device = str(usable_device(options.device))
    options.tokens = sorted(set(integers(options.tokens, "--tokens") or []))
    options.budget = parse_budget(options.budget)
    least = {"tokens": options.tokens[0], "steps": options.steps, "block": options.block, "chunk": options.chunk}
    least |= {"threads": options.threads, "seal": options.seal}
    for name, number in least.items():
        if number < 1:
            raise ValueError(f"--{name} is 1 or more, got {number}")
    if options.steps % options.block:
        raise ValueError(f"--steps is a multiple of --block {options.block}, got {options.steps}")
    if options.random and options.model != REFERENCE:
        raise ValueError(f"--model {options.model} and --random {options.random} exclude each other")
    if options.layers is not None and (not options.random or options.layers < 1):
        raise ValueError(f"--layers is 1 or more, of a --random model, got {options.layers}")
    options.selector = list(dict.fromkeys(options.selector or default_selectors(options)))


def load(options: argparse.Namespace) -> tuple[Any, Any, int | None]:
    """The model, its tokenizer, and the size of a random model's vocabulary."""
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.random:
        model = random_model(options.random, options.layers, dtype or torch.bfloat16, options.device)
        return model, None, model.config.vocab_size
    return *load_model(options.model, dtype, options.device), None


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    try:
        settle(options)
        torch.set_num_threads(options.threads)
        model, tokenizer, vocabulary = load(options)
        model.set_attn_implementation("sdpa")
        check(model, options)
    except (ValueError, ImportError, RuntimeError) as error:
        command.error(str(error))
    options.results.mkdir(parents=True, exist_ok=True)
    models = {name: with_attention(model, name) for name in ("sdpa", "eager")}
    models[WITHOUT] = without_attention(model)
    longest = max(tokens + beyond(tokens, positions(model), options) for tokens in options.tokens)
    ids = prompt(tokenizer, vocabulary, longest).to(model.device)
    load_before, begun = os.getloadavg(), time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("")

        def say(words: str, amount: int) -> None:
            if words:
                bar.reset(task, description=words, total=amount)
            else:
                bar.advance(task, amount)

        lengths = [measure(model, models, ids, tokens, options, say) for tokens in options.tokens]
    on_gpu = model.device.type == "cuda"
    config = model.config.get_text_config(decoder=True)
    record = {
        "question": "tokens per second of decoding",
        "model": f"random {options.random}" if options.random else options.model,
        "shape": {name: getattr(config, name) for name in SHAPES["tiny"]}
        | {"parameters": sum(tensor.numel() for tensor in model.parameters())},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": options.device,
        "threads": options.threads,
        "budget": budget_record(options.budget),
        **cache_settings(options),
        "steps": options.steps,
        "block": options.block,
        "lengths": lengths,
        "seconds": round(time.perf_counter() - begun, 1),
        "memory_mib": round(peak_memory() / 2**20, 1),
        "device_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1) if on_gpu else None,
        "load": {"before": load_before, "after": os.getloadavg()},
        "versions": versions(),
        "machine": machine(),
        "features": features(),
        "idle_threads": idle_threads(),
    }
    path = options.results / f"generate-{name_of(options)}-{record['dtype']}-{model.device.type}.json"
    records.save(record, path)
    records.show(record, tables, f"peak memory {record['memory_mib']:.0f} MiB; record: {path}", options.json)


if __name__ == "__main__":
    main()
