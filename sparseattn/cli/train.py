"""`sparseattn train`: SAAP's centroids and query classifiers from traces of many prompts, as an artefact file."""

from __future__ import annotations

import contextlib
import datetime
import json as json_module
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli.common import decimals, in_a_sentence, integers, progress_bar
from sparseattn.reporting import training_tables
from sparseattn.reporting.terminal import Screen
from sparseattn.training import Filters, Progress, Recipe
from sparseattn.training import train as fit
from sparseattn.utils.devices import usable_device
from sparseattn.utils.dtypes import stored_dtype


@in_a_sentence
def train(
    traces: Annotated[list[Path], typer.Argument(help="Traces of many prompts of one model, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Artefact to write, a .safetensors file.")],
    held_out: Annotated[
        list[Path] | None, typer.Option(help="Traces to validate on; by default 1 prompt in 5 of TRACES.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to train, such as 1,2,5; default all.")] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Buckets of a head; default 1024, or fewer: 32 rows of a prompt to each.")
    ] = None,
    sample: Annotated[int | None, typer.Option(help="Keys that k-means sees; default 256 a bucket.")] = None,
    iterations: Annotated[int, typer.Option(help="Iterations of k-means.")] = 25,
    hidden: Annotated[int, typer.Option(help="Hidden width of the classifier.")] = 1024,
    steps: Annotated[int, typer.Option(help="Most steps of the classifier.")] = 2000,
    batch: Annotated[int, typer.Option(help="Queries of a step, all from one prompt.")] = 1024,
    queries: Annotated[int, typer.Option(help="Distinct queries of a classifier, over all prompts.")] = 65536,
    keys: Annotated[int | None, typer.Option(help="Keys of a prompt that targets are taken over; default all.")] = None,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.01,
    gap: Annotated[
        int | None, typer.Option(help="Keys count for queries more than GAP behind them; default 2047.")
    ] = None,
    near: Annotated[
        int | None,
        typer.Option(help="Leave out queries whose best key is less than NEAR before them; default 1024."),
    ] = None,
    sink: Annotated[int, typer.Option(help="First rows of a prompt that do not count.")] = 1,
    shares: Annotated[str, typer.Option(help="Budgets of validation, as shares of the context.")] = "0.01,0.05",
    validate: Annotated[int, typer.Option(help="Steps between validations.")] = 100,
    patience: Annotated[int, typer.Option(help="Validations without progress after which a head stops.")] = 10,
    seed: Annotated[int, typer.Option(help="Of everything drawn at random.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16, what tensors are stored in.")] = "float16",
    roped: Annotated[bool, typer.Option("--roped", help="Ablation: vectors as attention sees them.")] = False,
    short_range: Annotated[
        bool, typer.Option("--short-range", help="Ablation: no long-range filter (gap 0, near 0).")
    ] = False,
    residual: Annotated[
        bool, typer.Option("--residual", help="A linear path beside the classifier's layers, begun at mean keys.")
    ] = False,
    per_query_head: Annotated[
        bool, typer.Option("--per-query-head", help="Ablation: a classifier for each query head.")
    ] = False,
    two_sided: Annotated[bool, typer.Option("--two-sided", help="Ablation: later keys count as well.")] = False,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Ablation: no classifier, k-means alone.")] = False,
    reverse: Annotated[bool, typer.Option("--reverse", help="Ablation: the other direction of the KL loss.")] = False,
    save_every: Annotated[int, typer.Option(help="Steps between two states to resume from.")] = 100,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Train SAAP on traces of many prompts; the same command resumes a run that was killed.

    Under `torchrun --nproc-per-node N -m sparseattn train ...` the KV heads are split over N processes.
    """
    if save_every < 1:
        raise ValueError(f"--save-every is at least 1, got {save_every}")
    if short_range and (gap is not None or near is not None):
        raise ValueError("--short-range is --gap 0 --near 0, so give it or these")
    standard = Filters(0, 0) if short_range else Filters()
    kind, place = stored_dtype(dtype, "--dtype"), usable_device(device)
    recipe = Recipe(
        clusters=clusters,
        iterations=iterations,
        sample=sample,
        hidden=hidden,
        steps=steps,
        batch=batch,
        queries=queries,
        keys=keys,
        rate=rate,
        decay=decay,
        validate=validate,
        patience=patience,
        shares=tuple(decimals(shares, "--shares")),
        filters=Filters(standard.gap if gap is None else gap, standard.near if near is None else near, sink, two_sided),
        roped=roped,
        residual=residual,
        per_query_head=per_query_head,
        symmetric=symmetric,
        reverse=reverse,
        seed=seed,
    )
    indices = integers(layers, "--layers")
    started = time.monotonic()
    with _ranks() as (rank, ranks, barrier), _shown(rank) as progress:
        artefact = fit(
            traces,
            out,
            recipe,
            held_out=held_out or (),
            layers=indices,
            device=place,
            dtype=kind,
            rank=rank,
            ranks=ranks,
            barrier=barrier,
            save_every=save_every,
            progress=progress,
        )
    if artefact is None:
        return
    seconds = time.monotonic() - started
    if json:
        report = {"artefact": str(out), "bytes": out.stat().st_size, "seconds": round(seconds, 3), **artefact.meta}
        typer.echo(json_module.dumps(report))
        return
    console = Screen()
    console.print(training_tables.validation(artefact))
    held = len(artefact.meta["held_out"])
    console.print(
        f"{out}: layers {', '.join(map(str, artefact.layers))}, {artefact.meta['recipe']['clusters']} "
        f"buckets, {out.stat().st_size / 2**20:.1f} MiB, {len(artefact.meta['train'])} prompts and {held} held out, "
        f"{seconds:.0f} s",
        soft_wrap=True,
    )


@contextlib.contextmanager
def _ranks() -> Iterator[tuple[int, int, Callable[[], None]]]:
    """Rank, number of ranks and a barrier: those of `torchrun`, or this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, 1, lambda: None
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))  # a rank may wait long for another's heads
    try:
        yield dist.get_rank(), dist.get_world_size(), dist.barrier
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _shown(rank: int) -> Iterator[Callable[[Progress], None]]:
    """What the first rank shows of its progress."""
    if rank:
        yield lambda _: None
        return
    with progress_bar() as bar:
        task = bar.add_task("train", total=None)

        def show(at: Progress) -> None:
            words = f"layer {at.layer} {at.stage}"
            if at.loss is not None:
                words += f", loss {at.loss:.3f}"
            if at.recovered is not None:
                words += f", recovered {at.recovered:.3f}"
            bar.update(task, description=words, completed=at.done, total=at.total)

        yield show
