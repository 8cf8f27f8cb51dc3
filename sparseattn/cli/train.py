"""`sparseattn train`: SAAP's centroids and query classifiers from traces of many prompts, as an artefact file."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator

import typer

from sparseattn.cli import values
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.train_options import TrainOptions
from sparseattn.reporting import training_tables
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.training import Progress, train
from sparseattn.utils.devices import usable_device

MADE = ("shares", "filters")  # fields of a recipe that are made of several options


def run(options: TrainOptions) -> None:
    """Run `sparseattn train`."""
    recipe, layers = options.recipe, values.integers(options.layers, "--layers")
    place = usable_device(options.device)
    started = time.monotonic()
    with _ranks() as (rank, ranks, barrier), _shown(rank) as progress:
        artefact = train(
            options.traces,
            options.out,
            recipe,
            held_out=options.held_out or (),
            layers=layers,
            device=place,
            dtype=options.dtype.torch,
            rank=rank,
            ranks=ranks,
            barrier=barrier,
            save_every=options.save_every,
            progress=progress,
        )
    if artefact is not None:
        _show(artefact, options, time.monotonic() - started)


def _show(artefact: Artefact, options: TrainOptions, seconds: float) -> None:
    out = options.out
    if options.json:
        report = {"artefact": str(out), "bytes": out.stat().st_size, "seconds": round(seconds, 3), **artefact.meta}
        typer.echo(json.dumps(report))
        return
    console = Screen()
    console.print(training_tables.validation(artefact))
    held_out = len(artefact.meta["held_out"])
    console.print(
        f"{out}: layers {', '.join(map(str, artefact.layers))}, {artefact.meta['recipe']['clusters']} "
        f"buckets, {out.stat().st_size / 2**20:.1f} MiB, {len(artefact.meta['train'])} prompts and {held_out} held "
        f"out, {seconds:.0f} s",
        soft_wrap=True,
    )


@contextlib.contextmanager
def _ranks() -> Iterator[tuple[int, int, Callable[[], None]]]:
    """Yield rank, number of ranks and a barrier: those of `torchrun`, or this process alone."""
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
    """Yield what the first rank shows its progress by."""
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
