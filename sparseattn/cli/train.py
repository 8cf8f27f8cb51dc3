"""`sparseattn train`: what methods learn from traces of prompts, as an artefact file; `calibrate` calibrates."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator

import typer

from sparseattn.cli import calibrate, values
from sparseattn.cli.progress import progress_bar, progress_of
from sparseattn.cli.results import check_tensor_file
from sparseattn.cli.train_options import A2ATS, INDEXES, LOCRET, QUERYPQ, SAAP, TrainOptions
from sparseattn.reporting import training_tables
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.training import Progress, train, train_codes, train_index, train_retaining, train_window
from sparseattn.training.query_codes import kept
from sparseattn.utils.devices import usable_device
from sparseattn.utils.locks import locked

LAST_STEPS = "mean loss of the last tenth of the steps:"
MADE = ("shares", "filters")  # fields of a recipe that are made of several options


def run(options: TrainOptions) -> None:
    """Run `sparseattn train`."""
    if (calibration := options.calibration) is not None:
        calibrate.run(calibration)
        return
    if options.method != SAAP and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--method {options.method} takes one process, got {os.environ['WORLD_SIZE']} of torchrun")
    out = options.out
    check_tensor_file(out)
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0" and out.parent.is_dir():  # else what runs says so
            stack.enter_context(locked(out.with_name(f".{out.name}.lock"), f"--out {out}"))
        _run(options)


def _run(options: TrainOptions) -> None:
    if options.method in INDEXES:
        _train_index(options)
        return
    if options.method == QUERYPQ:
        _train_codes(options)
        return
    if options.method == A2ATS:
        _train_window(options)
        return
    if options.method == LOCRET:
        _train_retaining(options)
        return
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


def _train_codes(options: TrainOptions) -> None:
    """Write what querypq codes keys by, and say how much of the logits' variance its codes keep."""
    started, out, layers = time.monotonic(), options.out, values.integers(options.layers, "--layers")
    with progress_of(f"train {QUERYPQ}") as progress:
        calibration = train_codes(
            options.traces, out, options.codes_recipe, layers=layers, device=options.device, progress=progress
        )
    seconds, size, shares = time.monotonic() - started, out.stat().st_size, kept(calibration)
    if options.json:
        report = {"artefact": str(out), "method": QUERYPQ, "bytes": size, "seconds": round(seconds, 3)}
        typer.echo(json.dumps({**report, **calibration.meta}))
        return
    console = Screen()
    console.print("share of the logits' variance that codes keep, mean over heads:")
    console.print("  ".join(f"layer {index} {share:.2f}" for index, share in shares.items()))
    parts, centroids = next(iter(calibration.layers.values()))["centroids"].shape[1:3]
    prompts = len(calibration.meta["prompts"])
    console.print(
        f"{out}: {len(shares)} layers, {parts} subspaces of {centroids} centroids, {size / 2**20:.1f} MiB, {prompts} "
        f"prompts, {seconds:.0f} s",
        soft_wrap=True,
    )


def _train_window(options: TrainOptions) -> None:
    """Write what a2ats codes keys by, and say how far its codes are off."""
    started, out, layers = time.monotonic(), options.out, values.integers(options.layers, "--layers")
    with progress_of(f"train {A2ATS}") as progress:
        calibration = train_window(
            options.traces, out, options.window_recipe, layers=layers, device=options.device, progress=progress
        )
    _say_losses(calibration, options, "error", "mean squared error of codes, as a share:", time.monotonic() - started)


def _train_retaining(options: TrainOptions) -> None:
    """Write Locret's heads, and say what the loss of each layer came to."""
    started, out, layers = time.monotonic(), options.out, values.integers(options.layers, "--layers")
    with progress_of(f"train {LOCRET}") as progress:
        calibration = train_retaining(
            options.traces, out, options.retaining_recipe, layers=layers, device=options.device, progress=progress
        )
    _say_losses(calibration, options, "loss", LAST_STEPS, time.monotonic() - started)


def _train_index(options: TrainOptions) -> None:
    """Write the maps of a learned index, and say what the loss of each layer came to."""
    started, out, layers = time.monotonic(), options.out, values.integers(options.layers, "--layers")
    with progress_of(f"train {options.method}") as progress:
        calibration = train_index(
            options.traces, out, options.index_recipe, layers=layers, device=options.device, progress=progress
        )
    _say_losses(calibration, options, "loss", LAST_STEPS, time.monotonic() - started)


def _say_losses(calibration: Calibration, options: TrainOptions, fact: str, words: str, seconds: float) -> None:
    """Say what the calibration's meta has of each layer by the name `fact`."""
    out = options.out
    size = out.stat().st_size
    if options.json:
        report = {"artefact": str(out), "method": options.method, "bytes": size, "seconds": round(seconds, 3)}
        typer.echo(json.dumps({**report, **calibration.meta}))
        return
    console, losses = Screen(), calibration.meta[fact]
    console.print(words)
    console.print("  ".join(f"layer {index} {loss:.2f}" for index, loss in losses.items()))
    console.print(
        f"{out}: {len(losses)} layers, {size / 2**20:.1f} MiB, {len(calibration.meta['prompts'])} prompts, "
        f"{seconds:.0f} s",
        soft_wrap=True,
    )


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
