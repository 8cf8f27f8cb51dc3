"""What SmolLM2's artefact finds on prompts it was not trained on: ``python -m scripts.smollm2.judge``.

Needs the artefact, and for its like of de-roped keys the traces of ``python -m scripts.smollm2``. Measures every method
with `evaluate` at equal rows, as ``sparseattn bench --per-head`` does, and writes the record ``--out``. What is in the
work folder already is kept, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console

from scripts.evidence import documents, tables
from scripts.smollm2.__main__ import RECIPE, REPOSITORY, WORK
from scripts.smollm2.windows import MODEL, TOKENS, Window, trace_of
from sparseattn.cli.progress import model_progress, progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.builtin_traces import BUILTIN, SPREAD, builtin_trace
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.evaluation.result import Evaluation
from sparseattn.models.load import encode, load_model
from sparseattn.selectors.parameters.saap_artefact import locate
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.texts import TEXTS, read_named
from sparseattn.traces.trace import Trace
from sparseattn.training import Progress, train
from sparseattn.utils.files import write_atomic

OUT = REPOSITORY / "benchmarks" / "results" / "saap-smollm2.json"
LAYERS = SPREAD  # those of the built-in traces
BUDGETS = (82, 256)  # rows; the first is 1 % of the context
# Prompt -> tokens decoded at its end: built-in traces, of whose needles the last tokens are both answers, and the first
# tokens of a text. Nothing was trained on any of them, nor on texts of their kinds.
PROMPTS = {"prose": 16, "code": 16, "needles": 33, "workshop": 16}
# Name -> selector; {plain} is the artefact of de-roped keys. All buckets may be visited, so that the budget decides.
METHODS = {
    "exact": "exact",
    "exact, one choice a group": "exact:group=softmax",
    "true order of the buckets": "sparseattn:PerfectBuckets:probes=256",
    "saap": "saap:probes=256",
    "moments": "moments:probes=256",
    "kmeans": "kmeans:probes=256",
    "saap, no RoPE": "saap:probes=256,artefact={plain}",
    "moments, no RoPE": "moments:probes=256,artefact={plain}",
    "kmeans, no RoPE": "kmeans:probes=256,artefact={plain}",
    "quest": "quest",
}
Shown: TypeAlias = "Callable[[str, int, int], None]"


def traces(work: Path, show: Shown) -> dict[str, Trace]:
    """The prompts' traces, of `LAYERS`; made where they are missing."""
    found = {name: builtin_trace(name, show) for name in PROMPTS if name in BUILTIN}
    for name in PROMPTS:
        if name in found:
            continue
        path = work / "judge" / f"{name}.safetensors"
        if path.is_file():
            found[name] = Trace.open(path)
            continue
        model, tokenizer = load_model(MODEL, device="cpu", progress=show)
        ids = encode(tokenizer, read_named(name, show).encode())[:, :TOKENS]
        window = Window(name, True, ids, {"name": name, "sha256": TEXTS[name].sha256})
        found[name] = trace_of(model, window, path, functools.partial(show, f"capture {name}"), LAYERS)
    return {name: found[name] for name in PROMPTS}


def de_roped(work: Path, show: Shown) -> Path:
    """The same artefact of de-roped keys and queries, as in the paper, of `LAYERS`; trained where it is missing."""
    path = work / "de-roped.safetensors"
    if not path.is_file():

        def told(at: Progress) -> None:
            show(f"de-roped, layer {at.layer} {at.stage}", at.done, at.total)

        prompts, held_out, recipe = work / "train", work / "held-out", replace(RECIPE, roped=False)
        train(
            [prompts],
            path,
            recipe,
            held_out=[held_out],
            layers=LAYERS,
            dtype=torch.float16,
            device="cpu",
            progress=told,
        )
    return path


def measured(trace: Trace, last: int, spec: str, path: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """A record for each budget, kept in `path` with what it depends on, but for the code."""
    source = make_selector(spec).source()  # with the hash of its artefact
    known = [trace.meta["tokens_sha256"], trace.meta["config_hash"], source, spec.split("artefact=")[0]]
    identity = hashlib.sha256(json.dumps([*known, last, LAYERS, BUDGETS]).encode()).hexdigest()
    if path.is_file() and (held := json.loads(path.read_text()))["identity"] == identity:
        advance(last * len(LAYERS) * len(BUDGETS))
        return list(held["budgets"])
    found = evaluate_budgets(trace, spec, BUDGETS, Replay(last=last, layers=LAYERS), progress=advance)
    budgets = [compact(one) for one in found]
    write_atomic(path, json.dumps({"identity": identity, "budgets": budgets}).encode())
    return budgets


def compact(one: Evaluation) -> dict[str, Any]:
    """By query head of every layer what was recovered and what was there, and over all of them bytes, rows, error."""
    shown = {name: round(one.mean(name), 4) for name in ("bytes_share", "distinct_rows", "relative_error")}
    heads = {
        name: [[round(x, 4) for x in layer] for layer in one.heads[name].tolist()]
        for name in ("recovered", "indexed_mass")
    }
    return {"rows": one.budget, **shown, **heads}


def judged(opened: Mapping[str, Trace], methods: Mapping[str, str], work: Path) -> dict[str, Any]:
    """Prompt -> what it is, its heads' indexed mass, and method -> budgets."""
    out: dict[str, Any] = {}
    work.mkdir(parents=True, exist_ok=True)
    with progress_bar() as bar:
        steps = sum(PROMPTS[name] for name in opened) * len(methods) * len(LAYERS) * len(BUDGETS)
        task = bar.add_task("judge", total=steps)
        for name, trace in opened.items():
            by_method: dict[str, Any] = {}
            for method, spec in methods.items():
                bar.update(task, description=f"{name}: {method}")
                path = work / f"{name}.{method.replace(' ', '-').replace(',', '')}.json"
                by_method[method] = measured(trace, PROMPTS[name], spec, path, lambda done: bar.advance(task, done))
            mass = next(iter(by_method.values()))[0]["indexed_mass"]  # of the heads, whatever the method
            for one in (one for budgets in by_method.values() for one in budgets):
                del one["indexed_mass"]
            facts = {"text": trace.meta["text"], "tokens": trace.tokens, "last": PROMPTS[name]}
            out[name] = {**facts, "indexed_mass": mass, "methods": by_method}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.smollm2.judge", description="Judge SmolLM2's artefact.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=WORK, help="where traces and measurements are kept")
    parser.add_argument("--out", type=Path, default=OUT, help="the record to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not any((options.work_dir / "held-out").glob("*.safetensors")):
        parser.error(f"{options.work_dir} holds no prompts to train on: run `python -m scripts.smollm2` first")
    with model_progress() as show:
        opened = traces(options.work_dir, show)
        plain = de_roped(options.work_dir, show)
    methods = {name: spec.format(plain=plain) for name, spec in METHODS.items()}
    record = {
        "model": MODEL,
        "artefact": hashlib.sha256(locate(MODEL).read_bytes()).hexdigest(),
        "layers": LAYERS,
        "heads": opened["prose"].shapes[LAYERS[0]].heads,
        "sink": 4,
        "window": 64,
        "prompts": judged(opened, methods, options.work_dir / "judge"),
        "machine": machine(),
        "versions": versions(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out, (json.dumps(record) + "\n").encode())
    console = Console(width=200)
    for name in ("saap-prompts", "saap-layers", "saap-order"):
        shown = documents.table(tables.defined()[name], MODEL, "", lambda _: record)
        console.print(f"{shown}\n", markup=False, highlight=False)
    console.print(str(options.out), soft_wrap=True)


if __name__ == "__main__":
    main()
