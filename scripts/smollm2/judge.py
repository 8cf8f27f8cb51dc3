"""What SmolLM2's artefact finds on prompts it was not trained on: ``python -m scripts.smollm2.judge``.

Needs the artefact, and for k-means of roped keys the traces of ``python -m scripts.smollm2``. Captures the prompts of
prompts.py, measures every method with `evaluate` at equal rows, and writes the record ``--out``, the tables of
docs/saap.md and its picture. What is in the work folder already is kept, so the same command goes on where it stopped;
``--draw`` only draws from the record that is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scripts.smollm2 import report
from scripts.smollm2.__main__ import RECIPE, REPOSITORY, WORK
from scripts.smollm2.prompts import kind, prompts
from scripts.smollm2.windows import MODEL, trace_of
from sparseattn.artefact import locate
from sparseattn.cli.common import open_model, progress_bar
from sparseattn.environment import machine, versions
from sparseattn.files import write_atomic
from sparseattn.metrics import Evaluation, evaluate_budgets
from sparseattn.selectors import make_selector
from sparseattn.selectors.buckets import Partitioned
from sparseattn.traces import Trace
from sparseattn.training import Progress, train

OUT = REPOSITORY / "benchmarks" / "results" / "saap-smollm2.json"
DOCUMENT = REPOSITORY / "docs" / "saap.md"
LAYERS = (2, 6, 10, 14, 18, 22, 26)  # those of the built-in traces, spread over the depth
BUDGETS = (82, 256)  # rows; the first is 1 % of the context
LAST = 16
# Name -> selector; {roped} is the artefact of roped keys. All buckets may be visited, so that the budget decides.
METHODS = {
    "exact": "exact",
    "exact, one choice a group": "exact:group=softmax",
    "true order of the buckets": "sparseattn.selectors.saap:PerfectBuckets:probes=256",
    "saap": "saap:probes=256",
    "saap, context=0.8": "saap:probes=256,context=0.8",
    "moments": "moments:probes=256",
    "kmeans": "kmeans:probes=256",
    "kmeans, roped": "kmeans:probes=256,artefact={roped}",
    "quest": "quest",
}


def roped(work: Path, progress: Callable[[str, int, int], None]) -> Path:
    """The artefact of k-means on roped keys, of the same windows; trained where it is missing."""
    path = work / "roped.safetensors"
    if not path.is_file():

        def show(at: Progress) -> None:
            progress(f"k-means of roped keys, layer {at.layer}", at.done, at.total)

        recipe = replace(RECIPE, roped=True, symmetric=True, residual=False)
        train(
            [work / "train"],
            path,
            recipe,
            held_out=[work / "held-out"],
            layers=LAYERS,
            dtype=torch.float16,
            device="cpu",
            progress=show,
        )
    return path


def identity(trace: Trace, spec: str) -> str:
    """SHA-256 of what a measurement depends on, but for the code."""
    selector = make_selector(spec)
    held = selector.for_layer(LAYERS[0], trace.ropes[LAYERS[0]]).source() if isinstance(selector, Partitioned) else ""
    known = [trace.meta["tokens_sha256"], trace.meta["config_hash"], spec.split("artefact=")[0], held]
    return hashlib.sha256(json.dumps([*known, LAYERS, BUDGETS, LAST]).encode()).hexdigest()


def measured(trace: Trace, spec: str, path: Path, progress: Callable[[int], None]) -> list[dict[str, Any]]:
    """A record for each budget, kept in `path`."""
    known = identity(trace, spec)
    if path.is_file() and (held := json.loads(path.read_text()))["identity"] == known:
        progress(LAST * len(LAYERS) * len(BUDGETS))
        return list(held["budgets"])
    found = evaluate_budgets(trace, spec, BUDGETS, last=LAST, layers=LAYERS, progress=progress)
    kept = {"identity": known, "budgets": [compact(one) for one in found]}
    write_atomic(path, json.dumps(kept).encode())
    return list(kept["budgets"])


def compact(one: Evaluation) -> dict[str, Any]:
    """By query head of every layer what was recovered and what was there, and over all of them bytes, rows, error."""
    shown = {name: round(one.mean(name), 4) for name in ("bytes_share", "distinct_rows", "relative_error")}
    kept = ("recovered", "indexed_mass")
    heads = {name: [[round(x, 4) for x in layer] for layer in one.heads[name].tolist()] for name in kept}
    return {"rows": one.budget, **shown, **heads}


def judged(traces: Mapping[str, Trace], methods: Mapping[str, str], work: Path) -> dict[str, Any]:
    """The record: prompt -> method -> budgets."""
    out: dict[str, Any] = {}
    work.mkdir(parents=True, exist_ok=True)
    with progress_bar() as bar:
        task = bar.add_task("judge", total=len(traces) * len(methods) * LAST * len(LAYERS) * len(BUDGETS))
        for name, trace in traces.items():
            by_method: dict[str, Any] = {}
            for method, spec in methods.items():
                bar.update(task, description=f"{name}: {method}")
                path = work / f"{name}.{method.replace(' ', '-').replace(',', '')}.json"
                by_method[method] = measured(trace, spec, path, lambda done: bar.advance(task, done))
            mass = by_method["exact"][0]["indexed_mass"]  # of the heads, whatever the method
            for one in (one for budgets in by_method.values() for one in budgets):
                del one["indexed_mass"]
            out[name] = {
                "kind": kind(name),
                "tokens": trace.tokens,
                "text": trace.meta["text"],
                "indexed_mass": mass,
                "methods": by_method,
            }
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.smollm2.judge", description="Judge SmolLM2's artefact.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=WORK, help="where traces and measurements are kept")
    parser.add_argument("--out", type=Path, default=OUT, help="the record to write")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="whose tables are filled")
    parser.add_argument("--draw", action="store_true", help="tables and picture of the record alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if not options.draw:
        work = options.work_dir
        model, tokenizer = open_model(MODEL, None, torch.device("cpu"))
        with progress_bar() as bar:
            task = bar.add_task("")

            def show(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            traces = {
                one.name: trace_of(
                    model,
                    one,
                    work / "judge" / f"{one.name}.safetensors",
                    lambda done, total, name=one.name: show(f"capture {name}", done, total),
                    LAYERS,
                )
                for one in prompts(tokenizer)
            }
            methods = {name: spec.format(roped=roped(work, show)) for name, spec in METHODS.items()}
        del model
        found = judged(traces, methods, work / "judge")
        record = {
            "model": MODEL,
            "artefact": hashlib.sha256(locate(MODEL).read_bytes()).hexdigest(),
            "layers": LAYERS,
            "heads": next(iter(traces.values())).shapes[LAYERS[0]].heads,
            "last": LAST,
            "sink": 4,
            "window": 64,
            "prompts": found,
            "machine": machine(),
            "versions": versions(),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out, (json.dumps(record) + "\n").encode())
    record = json.loads(options.out.read_text())
    write_atomic(options.document, report.filled(options.document.read_text(), report.tables(record)).encode())
    report.picture(record, options.document.with_name("saap-smollm2.png"))
    console = Console(width=160)
    for name, text in report.tables(record).items():
        console.print(f"{name}\n{text}\n", markup=False)


if __name__ == "__main__":
    main()
