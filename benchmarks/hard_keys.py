"""Where product codes find less: outliers, far positions, repeated text, key-value records, short prompts.

``python -m benchmarks.hard_keys --model smollm2 --layers 2,10,18,26`` from the repository root captures the model's
keys and queries on each text and writes ``benchmarks/results/hard_keys.json``. Methods that learn from the prompt's
queries are given them. The last tokens are decoded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import records, replayed
from sparseattn.cli.inputs import open_text
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.tasks.registry import example
from sparseattn.models.capture import capture
from sparseattn.models.load import encode, load_model
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace, TraceLayer

NAME = "hard_keys.json"
FAR = 1_000_000  # positions that keys and queries are moved on by
SHORT = 2048  # tokens of a short prompt
PARAGRAPH = 1500  # letters of the text that is repeated
OUTLIER = 20  # standard deviations of the mean of an outlier channel
ORDER = "exact:group=softmax"
SELECTORS = (
    ORDER,
    "quest",
    "lowbit",
    "querypq:mean=plain",
    "querypq",
    "querypq:missed=0",
    "querypq:bits=8",
    "querypq:subspaces=16",
    "querypq:additive=True",
)


def texts(name: str, tokens: int, count: Any) -> dict[str, str]:
    """Return each text to capture: `name` itself, its first letters again and again, and key-value records.

    `count` says how many tokens a text has.
    """
    plain = open_text(name)[1]
    asked = example("kv", tokens, depth=0.5, count=count)
    once = plain[:PARAGRAPH]
    return {
        "the text": plain,
        "a paragraph again and again": once * (tokens // count(once) + 2),
        "key-value records": asked.context + asked.question + asked.target,
    }


def changed(layer: TraceLayer) -> dict[str, TraceLayer]:
    """Return a layer's keys with outlier channels, with a scale of channels that differs, and far positions.

    Outlier channels have a large mean, which is the same for all keys. Their queries are as they were, so logits shift.
    """
    keys, query = layer.keys.float(), layer.query.float()
    size = keys.shape[-1]
    mean = torch.zeros(size)
    mean[[1, size // 2]] = OUTLIER * keys.std()
    scale = torch.ones(size)
    scale[[3, size // 2 + 3]] = OUTLIER
    found = {
        "two channels with a large mean": replace(layer, keys=keys + mean, query=query, values=layer.values.float()),
        # Products stay as they are. Codes that know keys alone spend themselves on these two channels.
        "two channels 20 times as large, queries as much smaller": replace(
            layer, keys=keys * scale, query=query / scale, values=layer.values.float(), rope=None
        ),
    }
    if layer.rope is not None:
        by = torch.full((1,), FAR)
        found["a million positions on"] = replace(
            layer,
            keys=layer.rope.rotate(keys, by),
            query=layer.rope.rotate(query, by),
            values=layer.values.float(),
        )
    return found


def cases(trace: Trace) -> dict[str, Trace]:
    """Return traces made of one: its first tokens, and each of `changed`."""
    found = {f"its first {SHORT:,} tokens": trace.first(SHORT)}
    layers = {index: changed(trace.layer(index)) for index in trace.layers}
    for name in dict.fromkeys(name for kinds in layers.values() for name in kinds):
        built = [kinds[name] for kinds in layers.values() if name in kinds]
        positions = trace.positions + (FAR if name.endswith("positions on") else 0)
        found[name] = Trace.build(built, positions, trace.meta, trace.name)
    return found


def measured(trace: Trace, keys: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return of each method the recovered share of the attention, its mean and its worst head."""
    settings = replayed.settings(options)
    rows = []
    for spec in options.selector or SELECTORS:
        found = evaluate(trace, make_selector(spec), options.budget, **settings)
        shares = {"recovered": found.mean("recovered"), "worst": found.worst("recovered")}
        rows.append({"keys": keys, "tokens": trace.tokens, "selector": spec, **shares})
    return rows


def run(options: argparse.Namespace, layers: Sequence[int]) -> list[dict[str, Any]]:
    """Capture each text and measure it, and what is made of the first."""
    model, tokenizer = load_model(options.model, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for keys, text in texts(
            options.text, options.tokens, lambda some: encode(tokenizer, some.encode()).shape[1]
        ).items():
            ids = encode(tokenizer, text.encode())
            ids = ids[:, -options.tokens :] if keys == "key-value records" else ids[:, : options.tokens]
            path = Path(folder) / "text.safetensors"
            trace = capture(model, ids, path, layers=layers, model_id=options.model)
            rows += measured(trace, keys, options)
            if keys == "the text":
                for name, made in cases(trace).items():
                    rows += measured(made, name, options)
            path.unlink()
    return rows


def table(record: Any) -> Iterable[Table]:
    specs = list(dict.fromkeys(row["selector"] for row in record["results"]))
    out = Table("recovered", *specs)
    for keys in dict.fromkeys(row["keys"] for row in record["results"]):
        shares = {row["selector"]: row["recovered"] for row in record["results"] if row["keys"] == keys}
        out.add_row(keys, *(f"{shares[spec]:.2f}" for spec in specs))
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.hard_keys", description="Where product codes find less.")
    out.add_argument("--model", required=True)
    out.add_argument("--text", default="workshop")
    out.add_argument("--tokens", type=int, default=8192, help=f"of each text, {SHORT} or more")
    out.add_argument("--layers", required=True, help="of the model, with commas")
    out.add_argument("--selector", action="append", help="repeat for more")
    out.add_argument("--budget", type=int, default=256)
    replayed.add_options(out)
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    if options.tokens < SHORT:
        command.error(f"--tokens is {SHORT} or more, got {options.tokens}")
    layers = [int(text) for text in options.layers.split(",")]
    results = run(options, layers)
    record = {
        "question": "where product codes of keys find less",
        "layers": layers,
        **{name: getattr(options, name) for name in ("model", "text", "budget", *replayed.SETTINGS)},
        "versions": versions(),
        "machine": machine(),
        "results": results,
    }
    records.end(record, NAME, table, options)


if __name__ == "__main__":
    main()
