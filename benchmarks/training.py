"""What SAAP's training takes: seconds per head, what batching the heads is worth, memory against prompts.

``python -m benchmarks.training [time] [heads] [memory] --json`` from the repository root makes synthetic traces in a
folder that goes away, trains on them and writes ``benchmarks/results/training-QUESTION-DEVICE.json``. The sizes are
those of Saap, https://arxiv.org/abs/2502.08246: 1,024 buckets, hidden width 1,024, D = 128, prompts of 100k tokens.
Needs Linux, whose /proc tells the peak memory of a process apart from its parent's.

* time: seconds per KV head and stage, and what they come to for the 31 sparse layers of 8 KV heads of Llama 3.1 8B.
  K-means and targets run whole; of the classifier's 2,000 steps ``--steps`` run, and the record says so.
* heads: a step of the classifiers of 1, 2, 4, 8 heads as batched products, against the same steps head after head.
* memory: the peak of a fresh process for 2, 4, 8, 16 prompts.

Letters: H KV heads, G query heads per KV head, D head size, C buckets, T tokens, Q tokens with queries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import records
from benchmarks.measure import Clock, median, peak_memory
from sparseattn.cost_model.environment import machine, versions
from sparseattn.traces.synthetic import synthetic
from sparseattn.training import Filters, Progress, Recipe, train
from sparseattn.training.examples import Pool
from sparseattn.training.fit import Fit
from sparseattn.training.validation import Held
from sparseattn.utils.devices import usable_device

RESULTS = Path(__file__).parent / "results"
THETA = 500_000.0  # Llama 3's
LAYERS, HEADS = 31, 8  # of Llama 3.1 8B that SAAP trains: all but layer 0, and their KV heads
PAPER_MINUTES = 25  # per head on one GPU (section 5.1)
TOGETHER = (1, 2, 4, 8)  # heads
MARK = 10  # steps from one progress report of the classifier to the next


@dataclass(frozen=True)
class Shape:
    """Of the synthetic traces: T, H, G and D."""

    tokens: int
    heads: int
    group: int
    size: int

    def bytes(self) -> int:
        """Of a trace's rows in 16 bits, one layer."""
        return trace_bytes(1, self.tokens, self.heads, self.group, self.size)


def trace_bytes(
    layers: int, tokens: int, heads: int, group: int, size: int, queries: int | None = None, itemsize: int = 2
) -> int:
    """Bytes of a trace's queries, keys and values; header, positions and RoPE add a per mille to large ones.

    Args:
        queries: Q, tokens whose queries it holds; all by default.
        itemsize: bytes of a number.
    """
    return layers * heads * size * itemsize * (2 * tokens + group * (queries or tokens))


def make_traces(folder: Path, shape: Shape, prompts: int) -> list[Path]:
    """Traces of one layer in fp16, each of a seed of its own.

    Without sinks, whose exact share of the attention takes a score of every pair of rows to set: 3 hours for a prompt
    of 100k tokens on two cores.
    """
    folder.mkdir(exist_ok=True)
    paths = []
    for seed in range(prompts):
        trace = synthetic(
            shape.tokens,
            shape.heads,
            shape.group,
            shape.size,
            sinks=0,
            rope=THETA,
            seed=seed,
            dtype=torch.float16,
        )
        paths.append(folder / f"prompt-{seed}.safetensors")
        trace.save(paths[-1])
    return paths


@dataclass(frozen=True)
class Run:
    """One training run of all heads of one layer.

    Attributes:
        kmeans: the sample of keys and its clusters.
        targets: queries and where their attention lies, of prompts to train on and of held-out ones.
        step: one of the classifier's, with its share of validations and saved states.
        total: from the first file opened to the artefact written.
        memory: peak resident bytes of this process so far.
        device_memory: peak bytes of tensors on the GPU, or None.
        passed: share of the queries looked at that passed the filters.
    """

    kmeans: Clock
    targets: Clock
    step: Clock
    total: Clock
    memory: int
    device_memory: int | None
    passed: float


def measured(traces: Sequence[Path], out: Path, recipe: Recipe, device: str) -> Run:
    """Trains and reads the clocks at the reports of progress.

    A step is taken from the first report (step 10) to the last but one: the first steps are slow, and the last one
    validates out of turn.
    """
    if recipe.steps < 3 * MARK:
        raise ValueError(f"a step is measured between three reports, {3 * MARK} steps or more, got {recipe.steps}")
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    marks: dict[str, list[tuple[int, Clock]]] = {}

    def note(at: Progress) -> None:
        marks.setdefault(at.stage, []).append((at.done, Clock.now(device)))

    started = Clock.now(device)
    artefact = train(traces, out, recipe, device=device, dtype=torch.float16, progress=note)
    total = Clock.now(device) - started
    kmeans, targets = marks["k-means"][0][1], marks["targets"][0][1]
    (first, begun), (last, ended) = marks["classifier"][0], marks["classifier"][-2]
    step = (ended - begun).times(1 / (last - first))
    assert artefact is not None
    return Run(
        kmeans=targets - kmeans,
        targets=begun - targets - step.times(first),
        step=step,
        total=total,
        memory=peak_memory(),
        device_memory=torch.cuda.max_memory_allocated() if on_gpu else None,
        passed=statistics.mean(one["passed"] for one in artefact.meta["validation"]),
    )


def memory_of(run: Run) -> dict[str, float | None]:
    """Its peaks in MiB."""
    device = None if run.device_memory is None else round(run.device_memory / 2**20, 1)
    return {"memory_mib": round(run.memory / 2**20, 1), "device_memory_mib": device}


def fresh(threads: int, traces: Sequence[Path], out: Path, recipe: Recipe, device: str) -> Run:
    """`measured` in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        return pool.submit(measured, traces, out, recipe, device).result()


def time_per_head(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds per head by stage, and for a whole model."""
    shape = Shape(options.tokens, options.heads, options.group, options.size)
    say(f"{options.prompts} prompts, {options.prompts * shape.bytes() / 1e9:.1f} GB of traces")
    traces = make_traces(folder, shape, options.prompts)
    full = recipe_of(options)
    steps = full.steps if options.steps is None else min(options.steps, full.steps)
    say(f"training {shape.heads} heads, {steps} of {full.steps} steps")
    run = fresh(options.threads, traces, folder / "out.safetensors", replace(full, steps=steps), options.device)
    stages = {
        "kmeans": run.kmeans.times(1 / shape.heads),
        "targets": run.targets.times(1 / shape.heads),
        "classifier": run.step.times(full.steps / shape.heads),
    }
    head = Clock(sum(c.wall for c in stages.values()), sum(c.processor for c in stages.values()))
    return {
        "traces": asdict(shape) | {"prompts": options.prompts},
        "recipe": asdict(full),
        "steps_measured": steps,
        "classifier_extrapolated": steps < full.steps,
        "seconds_per_head": {name: clock.as_dict() for name, clock in stages.items()},
        "seconds_per_step_and_head": run.step.times(1 / shape.heads).as_dict(),
        "minutes_per_head": head.times(1 / 60).as_dict(),
        "paper_gpu_minutes_per_head": PAPER_MINUTES,
        "model": {
            "layers": LAYERS,
            "heads": HEADS,
            "hours": head.times(LAYERS * HEADS / 3600).as_dict(),
            "paper_gpu_hours": round(LAYERS * HEADS * PAPER_MINUTES / 60, 1),
        },
        "passed": run.passed,
        **memory_of(run),
    }


def heads_together(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of a step of several heads' classifiers: as one batched product each, and head after head, by turns."""
    paper = recipe_of(options)
    small = replace(paper, clusters=64, hidden=96, batch=256)
    table = []
    for name, recipe, size in (("small", small, 64), ("paper", paper, options.size)):
        for heads in TOGETHER:
            together = fit_of(range(heads), recipe, size, options.device)
            each = [fit_of([head], recipe, size, options.device) for head in range(heads)]
            times: tuple[list[Clock], list[Clock]] = ([], [])
            for _ in range(options.repeats + 1):
                for fits, clocks in zip(([together], each), times, strict=True):
                    started = Clock.now(options.device)
                    for fit in fits:
                        fit.advance()
                    clocks.append(Clock.now(options.device) - started)
            one, many = (median(clocks[1:]) for clocks in times)  # the first step makes the optimizer's state
            table.append(
                {
                    "sizes": name,
                    "clusters": recipe.clusters,
                    "hidden": recipe.hidden,
                    "size": size,
                    "batch": recipe.batch,
                    "heads": heads,
                    "seconds_per_step_together": one.as_dict(),
                    "seconds_per_step_apart": many.as_dict(),
                    "speed_up": round(many.wall / one.wall, 2),
                    "speed_up_processor": round(many.processor / one.processor, 2),
                }
            )
            say(f"{name} sizes, {heads} heads: {one.wall:.4f} s a step together, {many.wall:.4f} s apart")
    return {"repeats": options.repeats, "table": table}


def fit_of(heads: Sequence[int], recipe: Recipe, size: int, device: str) -> Fit:
    """The classifiers of `heads`, with two batches of random queries and targets for each."""
    assert recipe.clusters is not None
    rows = 2 * recipe.batch
    drawn = [torch.Generator().manual_seed(head) for head in heads]
    queries = torch.stack([torch.randn(rows, size, generator=one) for one in drawn])
    target = torch.stack([torch.randn(rows, recipe.clusters, generator=one) for one in drawn]).mul(3).softmax(-1)
    pool = Pool(
        queries.to(device),
        target.half().to(device),
        torch.special.entr(target).sum(-1).to(device),
        [[0, recipe.batch, rows]] * len(drawn),
        [1.0] * len(drawn),
    )
    unused = torch.empty(0, device=device)
    linear = torch.zeros(len(drawn), recipe.clusters, size, device=device)
    return Fit(0, heads, 1, linear, recipe, pool, Held(*[unused] * 6))


def memory_flat(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Peak memory of a fresh process against the number of prompts, all else being equal."""
    shape = Shape(options.tokens, options.heads, options.group, options.size)
    most = max(options.counts)
    say(f"{most} prompts, {most * shape.bytes() / 1e9:.1f} GB of traces")
    traces = make_traces(folder, shape, most)
    recipe = replace(recipe_of(options), iterations=1, steps=3 * MARK, queries=options.pool)  # time alone is saved
    table = []
    for prompts in options.counts:
        say(f"training on {prompts} prompts")
        run = fresh(options.threads, traces[:prompts], folder / "out.safetensors", recipe, options.device)
        table.append(
            {
                "prompts": prompts,
                **memory_of(run),
                "seconds": run.total.as_dict(),
            }
        )
    return {
        "traces": asdict(shape),
        "trace_mib": round(shape.bytes() / 2**20, 1),
        "recipe": asdict(recipe),
        "table": table,
    }


QUESTIONS = {"time": time_per_head, "heads": heads_together, "memory": memory_flat}


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The paper's sizes, where it gives them; no head stops early, so that all of them do equal work."""
    recipe = Recipe(clusters=options.clusters, hidden=options.hidden, queries=options.queries, batch=options.batch)
    return replace(recipe, patience=recipe.steps, filters=Filters(options.gap, options.near))


def lines(question: str, result: dict[str, Any]) -> list[str]:
    """A result in words."""
    if question == "time":
        stages = ", ".join(f"{name} {c['wall']:.1f} s" for name, c in result["seconds_per_head"].items())
        words = "extrapolated from" if result["classifier_extrapolated"] else "all of"
        model = result["model"]
        return [
            f"per head: {stages} (classifier: {words} {result['steps_measured']} steps)",
            f"{result['minutes_per_head']['wall']:.1f} min a head ({result['minutes_per_head']['processor']:.1f} of "
            f"processor time), the paper's GPU {PAPER_MINUTES}",
            f"{model['layers']} layers of {model['heads']} heads: {model['hours']['wall']:.1f} h, the paper's "
            f"{model['paper_gpu_hours']} GPU-hours; peak memory {result['memory_mib']:.0f} MiB",
        ]
    if question == "heads":
        return [
            f"{one['sizes']}, {one['heads']} heads: {one['seconds_per_step_together']['wall'] * 1e3:.1f} ms a step "
            f"together, {one['seconds_per_step_apart']['wall'] * 1e3:.1f} ms apart, {one['speed_up']:.2f} times"
            for one in result["table"]
        ]
    return [f"{one['prompts']} prompts: {one['memory_mib']:.0f} MiB" for one in result["table"]]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description="What SAAP's training takes, on synthetic traces."
    )
    out.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{', '.join(QUESTIONS)}; default all")
    out.add_argument("--tokens", type=int, default=100_000, help="of a prompt")
    out.add_argument("--prompts", type=int, default=5, help="time: prompts, 1 in 5 of which is held out")
    out.add_argument("--heads", type=int, default=2, help="time, memory: KV heads of a prompt's layer")
    out.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    out.add_argument("--size", type=int, default=128, help="of a head")
    out.add_argument("--clusters", type=int, default=1024)
    out.add_argument("--hidden", type=int, default=1024)
    out.add_argument("--batch", type=int, default=1024)
    out.add_argument("--queries", type=int, default=65536, help="time: distinct queries of a head")
    out.add_argument("--gap", type=int, default=2047)
    out.add_argument("--near", type=int, default=1024)
    out.add_argument("--steps", type=int, help="time: steps measured; default all on a GPU and 110 on a CPU")
    out.add_argument("--repeats", type=int, default=15, help="heads: steps either way, of which the median counts")
    out.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16], help="memory: numbers of prompts")
    out.add_argument("--pool", type=int, default=8192, help="memory: distinct queries of a head")
    out.add_argument("--device", help="cpu, cuda, ...; default a CUDA device if there is one")
    out.add_argument("--threads", type=int, default=torch.get_num_threads())
    out.add_argument("--folder", type=Path, help="where traces are put while it runs; default the system's")
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    out.add_argument("--json", action="store_true", help="print the records, a line each")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    if unknown := [name for name in options.questions if name not in QUESTIONS]:
        command.error(f"a question is one of {', '.join(QUESTIONS)}, got {unknown[0]!r}")
    try:
        options.device = str(usable_device(options.device))
    except ValueError as error:
        command.error(str(error))
    if options.steps is None and options.device == "cpu":
        options.steps = 110
    torch.set_num_threads(options.threads)
    options.results.mkdir(parents=True, exist_ok=True)
    console, progress = Console(highlight=False, markup=False), Console(stderr=True, highlight=False, markup=False)
    for question in options.questions or QUESTIONS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            result = QUESTIONS[question](options, Path(folder), lambda words: progress.print(words, soft_wrap=True))
        record = {"question": question, "device": options.device, "threads": options.threads}
        record |= result | {"versions": versions(), "machine": machine()}
        path = options.results / f"training-{question}-{torch.device(options.device).type}.json"
        records.save(record, path)
        if options.json:
            print(json.dumps(record))
        else:
            console.print(*lines(question, result), sep="\n", soft_wrap=True)


if __name__ == "__main__":
    main()
