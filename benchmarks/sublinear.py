"""Codes within buckets: what is found against the bytes read where neither stage looks at all tokens.

``python -m benchmarks.sublinear --keys 131072 --results OUT`` from the repository root makes a synthetic trace of so
many tokens and replays its last ones; ``--trace FILE --learn FILE`` takes captured ones. Buckets propose several times
the tokens that may be read, and product codes rank these alone, as in an inverted file. Beside them stand each stage
alone, the true order and Quest. Buckets and codes are learned from other tokens than those that ask: of a synthetic
trace from its first ones, else from the traces to learn from.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import records, replayed
from sparseattn.cli.inputs import open_traces
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.full_attention import FullAttentions
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import CodesRecipe, Recipe, train, train_codes

NAME = "sublinear.json"
BUCKETS_FILE, CODES_FILE = "buckets.safetensors", "codes.safetensors"
BUCKETS = ("kmeans", "moments", "saap")
TIMES = (4, 16)  # tokens proposed for each that may be read
HIDDEN = 512  # width of SAAP's classifier
QUERIES = 8192  # distinct ones that a classifier sees, and that a synthetic trace has
AHEAD = 32_768  # tokens that codes are made for too, where there is RoPE
PROBES = 512  # buckets that may be visited; the tokens asked for are fewer


def methods(folder: Path) -> dict[str, str]:
    """Return what is compared: name -> the selector, which reads the files of a folder."""
    codes = f"querypq:artefact={folder / CODES_FILE}"
    buckets = {name: f"{name}:artefact={folder / BUCKETS_FILE},probes={PROBES}" for name in BUCKETS}
    both = {
        f"{name} x{times} + querypq": f"twostage:pages=[{spec}],times={times},second=[{codes}]"
        for name, spec in buckets.items()
        for times in TIMES
    }
    return {"exact:group=softmax": "exact:group=softmax", "quest": "quest", "querypq": codes, **buckets, **both}


def measured(trace: Trace, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return of each method and budget what it recovers, its worst head, and the share of the cache's bytes read."""
    how = Replay(**replayed.settings(options))
    rows, full_attentions = [], FullAttentions()
    with progress_bar() as bar:
        for name, spec in bar.track(methods(folder).items(), description=trace.name):
            started, method = time.monotonic(), make_selector(spec)
            for found in evaluate_budgets(trace, method, options.budgets, how, full_attentions=full_attentions):
                shares = {"recovered": found.mean("recovered"), "worst": found.worst("recovered")}
                shares["bytes_share"] = found.mean("bytes_share")
                rows.append({"method": name, "budget": found.budget, **shares})
            bar.console.print(f"{name}: {time.monotonic() - started:.0f} s")
    return rows


def made(tokens: int, queries: int) -> Trace:
    """Return a synthetic trace, with queries of its last tokens; a longer one begins with the same keys and values."""
    return synthetic(tokens, heads=2, group=2, dtype=torch.bfloat16, queries=min(tokens, queries))


def learn(trace: Trace, folder: Path, options: argparse.Namespace) -> None:
    """Write the files of buckets and of codes."""
    sources, validated = [Path(path) for path in options.learn], Path(options.validate or "")
    if options.keys is not None:  # no second text can be had, so half of the first one validates
        sources, validated = [folder / "first.safetensors"], folder / "half.safetensors"
        made(options.learn_tokens, QUERIES).save(sources[0])
        made(options.learn_tokens // 2, QUERIES).save(validated)
    roped = trace.ropes[trace.layers[0]] is None
    recipe = Recipe(options.clusters, hidden=HIDDEN, steps=options.steps, queries=QUERIES, roped=roped)
    started = time.monotonic()
    train(sources, folder / BUCKETS_FILE, recipe, held_out=[validated], layers=trace.layers)
    train_codes(
        sources, folder / CODES_FILE, CodesRecipe(ahead=0 if roped else AHEAD, mean="plain"), layers=trace.layers
    )
    print(f"learning: {time.monotonic() - started:.0f} s", flush=True)


def table(record: Any) -> Iterable[Table]:
    out = Table("recovered (bytes)", *(f"{budget:,} tokens" for budget in record["budgets"]))
    for name in dict.fromkeys(row["method"] for row in record["results"]):
        rows = [row for row in record["results"] if row["method"] == name]
        out.add_row(name, *(f"{row['recovered']:.2f} ({row['bytes_share']:.2%})" for row in rows))
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.sublinear", description="Codes within buckets.")
    source = out.add_mutually_exclusive_group(required=True)
    source.add_argument("--keys", type=int, help="tokens of a synthetic trace")
    source.add_argument("--trace", help="a trace file")
    learn_from = "trace to learn buckets and codes from; repeat for more"
    out.add_argument("--learn", action="append", default=[], help=learn_from)
    out.add_argument("--validate", help="trace that the buckets' query classifier is validated on")
    out.add_argument("--learn-tokens", type=int, default=65_536, help="of a synthetic trace, the first ones")
    out.add_argument("--clusters", type=int, default=1024, help="buckets of a head")
    out.add_argument("--steps", type=int, default=500, help="of the buckets' query classifier")
    out.add_argument("--budgets", type=int, nargs="+", default=[256, 1024])
    replayed.add_options(out)
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    if options.trace is not None and not (options.learn and options.validate):
        command.error("what a captured trace is read by is learned from others: give --learn FILE and --validate FILE")
    if options.keys is not None and (options.learn or options.validate):
        command.error("a synthetic trace is read by what its first tokens teach: leave out --learn and --validate")
    if options.keys is not None and options.learn_tokens + options.last > options.keys:
        command.error(f"--learn-tokens {options.learn_tokens} leaves none of {options.keys} tokens to ask")
    if options.keys is not None:
        trace = made(options.keys, max(64, options.last))  # the last 64 say how large queries are
    else:
        (trace,) = open_traces([options.trace])
    with tempfile.TemporaryDirectory() as folder:
        learn(trace, Path(folder), options)
        results = measured(trace, Path(folder), options)
    names = ("budgets", *replayed.SETTINGS, "clusters", "steps")
    record = {
        "question": "what codes within buckets find, and the bytes they read",
        "model": trace.meta.get("model"),
        "trace": trace.name,
        "tokens": trace.tokens,
        "layers": list(trace.layers),
        "learned_from": [Path(path).stem for path in options.learn] or f"first {options.learn_tokens} tokens",
        "validated_on": Path(options.validate).stem
        if options.validate
        else f"first {options.learn_tokens // 2} tokens",
        **{name: getattr(options, name) for name in names},
        "versions": versions(),
        "machine": machine(),
        "results": results,
    }
    records.end(record, NAME, table, options)


if __name__ == "__main__":
    main()
