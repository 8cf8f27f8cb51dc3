"""`sparseattn calibrate`: what Loki, Double Sparsity, Kascade, DuoAttention and budgets by mass take from traces, as
files. `sparseattn train` runs this for the same methods."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
import typer

from sparseattn.cli.calibrate_options import CalibrateOptions
from sparseattn.cli.done_items import DoneItems
from sparseattn.cli.progress import progress_bar, progress_of
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace
from sparseattn.training.calibrate import calibrate, of_layer, output_file, prompts_of
from sparseattn.training.fit_logits import fit
from sparseattn.training.head_errors import head_errors
from sparseattn.training.prompts import Prompts, trace_files
from sparseattn.training.similarity import similarity
from sparseattn.utils.devices import usable_device
from sparseattn.utils.ranks import JobRanks, of_job

MASS = "mass"  # of --method
ZONES = ("sink", "window", "last")  # options of it
QUARTER = 4  # the methods' default: a quarter of the dimensions
KASCADE, DUO = "kascade", "duo"
QUERIES = 64  # of each prompt, that Kascade and DuoAttention look at by default
SHOWN = 8  # numbers of anchors that a report names


def run(options: CalibrateOptions) -> None:
    """Run `sparseattn calibrate`, or `train` with one of its methods."""
    place, ranks = usable_device(options.device), of_job()
    if ranks and (options.method in (KASCADE, DUO) or options.selector is not None):
        raise ValueError(
            f"--method {options.method} compares layers or fits one selector in one process, and torchrun has started "
            f"{ranks.count}: start it without torchrun"
        )
    if options.method == KASCADE:
        _compare_layers(options, place)
    elif options.method == DUO:
        _profile_heads(options)
    elif options.selector is not None:
        _fit_estimates(options, options.selector)
    else:
        _calibrate_channels(options, place, ranks)


def _calibrate_channels(options: CalibrateOptions, place: torch.device, ranks: JobRanks | None) -> None:
    """Write Loki's or Double Sparsity's calibration and say what a quarter of the dimensions has."""
    started, out = time.monotonic(), options.out
    done = DoneItems(Path(f"{output_file(out)}.items"))
    if ranks:
        _share_layers(ranks, options, place, done)
        if not ranks.first:
            return
    known = _known_layers(options, place, done) if done.folder.is_dir() else {}
    with progress_of(f"calibrate {options.method}") as progress:
        calibration = calibrate(
            options.traces,
            options.method,
            out,
            layers=options.layer_numbers,
            roped=not options.before_rope,
            device=place,
            progress=progress,
            known=known.get,
        )
    done.remove()
    seconds = time.monotonic() - started
    figures = {index: figure(calibration, index) for index in calibration.layers}
    if options.json:
        report: dict[str, Any] = {"calibration": str(out), "method": options.method, "bytes": out.stat().st_size}
        report |= {"seconds": round(seconds, 3), "layers": {str(i): round(share, 4) for i, share in figures.items()}}
        typer.echo(json.dumps({**report, **calibration.meta}))
        return
    what = "share of the keys' variance" if options.method == "loki" else "share of the products' size"
    console = Screen()
    console.print(f"{what} in a quarter of the dimensions, mean over heads:")
    console.print("  ".join(f"layer {index} {share:.2f}" for index, share in figures.items()))
    prompts = len(calibration.meta["prompts"])
    console.print(f"{out}: {len(calibration.layers)} layers, {prompts} prompts, {seconds:.0f} s", soft_wrap=True)


def _layer_files(options: CalibrateOptions, place: torch.device, done: DoneItems) -> tuple[Prompts, dict[int, Path]]:
    """Return the prompts, and the file of each layer's statistics."""
    roped = not options.before_rope
    prompts = prompts_of(options.traces, options.method, options.layer_numbers, roped)
    each = [prompt.sha256 for prompt in prompts.train]
    return prompts, {i: done.path(options.method, i, roped, each, str(place)) for i in prompts.shapes}


def _share_layers(ranks: JobRanks, options: CalibrateOptions, place: torch.device, done: DoneItems) -> None:
    """Measure the layers that this process takes, and return once all are measured."""
    prompts, files = _layer_files(options, place, done)
    layers = list(files)
    costs = [float(prompts.shapes[layer].heads) for layer in layers]

    def measure(number: int) -> tuple[Any, dict[str, torch.Tensor]]:
        return None, of_layer(prompts, options.method, layers[number], not options.before_rope, place)

    done.share(ranks, list(files.values()), costs, measure)


def _known_layers(
    options: CalibrateOptions, place: torch.device, done: DoneItems
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the statistics of layers that several processes have measured."""
    read = {layer: done.read(path) for layer, path in _layer_files(options, place, done)[1].items()}
    return {layer: entry[1] for layer, entry in read.items() if entry is not None}


def _fit_estimates(options: CalibrateOptions, spec: str) -> None:
    """Write what fits a selector's estimates to full attention's weights, for `--method mass`, and say what it is."""
    out = options.out
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise ValueError(f"--out must be a .safetensors file in an existing folder, got {out}")
    selector, traces = make_selector(spec), [Trace.open(path) for path in trace_files(options.traces)]
    with progress_bar() as bar:
        advance = functools.partial(bar.advance, bar.add_task(f"fit {spec}", total=None))
        zones = {name: getattr(options, name) for name in ZONES}
        estimates = fit(traces, selector, layers=options.layer_numbers, progress=advance, **zones)
    estimates.save(out)
    means = {index: (float(scale.mean()), float(offset.mean())) for index, (scale, offset) in estimates.layers.items()}
    if options.json:
        report = {"estimates": str(out), "selector": estimates.selector, "bytes": out.stat().st_size}
        by_layer = {str(i): {"scale": round(a, 4), "offset": round(c, 4)} for i, (a, c) in means.items()}
        typer.echo(json.dumps({**report, "layers": by_layer, **estimates.meta}))
        return
    console = Screen()
    console.print("scale and offset, mean over heads:")
    console.print("  ".join(f"layer {index} {a:.2f} {c:+.2f}" for index, (a, c) in means.items()))
    console.print(f"{out}: {estimates.selector}, {len(means)} layers", soft_wrap=True)


def figure(calibration: Calibration, layer: int) -> float:
    """Return the share of a layer's statistic that the best quarter of the dimensions has, mean over KV heads."""
    statistics = calibration.layers[layer]
    name = "variance" if calibration.method == "loki" else "importance"
    sizes = statistics[name].sort(-1, descending=True).values
    best = sizes[:, : max(sizes.shape[1] // QUARTER, 1)].sum(-1)
    return float((best / sizes.sum(-1).clamp(min=1e-30)).mean())


def _compare_layers(options: CalibrateOptions, place: torch.device) -> None:
    """Write how well one layer's choice serves another, for Kascade, and say which layers to choose by."""
    started, out = time.monotonic(), options.out
    with progress_of(f"calibrate {KASCADE}") as progress:
        similarities = similarity(
            options.traces,
            out,
            layers=options.layer_numbers,
            queries=QUERIES if options.queries is None else options.queries,
            device=place,
            progress=progress,
        )
    seconds = time.monotonic() - started
    anchors = {count: similarities.anchors(count) for count in range(1, min(len(similarities.layers), SHOWN) + 1)}
    if options.json:
        report: dict[str, Any] = {"similarity": str(out), "method": KASCADE, "bytes": out.stat().st_size}
        served = {
            str(k): {"layers": layers, "served": round(similarities.score(layers), 4)} for k, layers in anchors.items()
        }
        typer.echo(json.dumps({**report, "seconds": round(seconds, 3), "anchors": served, **similarities.meta}))
        return
    console = Screen()
    console.print("anchors, and the weight of a layer's own choice that its anchor's has, mean over layers and heads:")
    for count, layers in anchors.items():
        console.print(f"{count}: {', '.join(map(str, layers))} ({similarities.score(layers):.2f})")
    prompts = len(similarities.meta["prompts"])
    console.print(f"{out}: {len(similarities.layers)} layers, {prompts} prompts, {seconds:.0f} s", soft_wrap=True)


def _profile_heads(options: CalibrateOptions) -> None:
    """Write how much streaming changes each head, for DuoAttention's roles, and say which heads retrieve."""
    started, out = time.monotonic(), options.out
    with progress_of(f"calibrate {DUO}") as progress:
        profile = head_errors(
            options.traces,
            out,
            layers=options.layer_numbers,
            queries=QUERIES if options.queries is None else options.queries,
            sink=options.sink,
            window=options.window,
            progress=progress,
        )
    seconds = time.monotonic() - started
    gates = profile.gates()
    if options.json:
        report: dict[str, Any] = {"profile": str(out), "method": DUO, "bytes": out.stat().st_size}
        by_layer = {str(index): [round(gate, 4) for gate in each] for index, each in gates.items()}
        typer.echo(json.dumps({**report, "seconds": round(seconds, 3), "gates": by_layer, **profile.meta}))
        return
    console = Screen()
    console.print("gates of KV heads, 0 streaming to 1 retrieval:")
    for index, each in gates.items():
        console.print(f"layer {index}: {' '.join(f'{gate:.2f}' for gate in each)}")
    console.print(
        f"{out}: {len(gates)} layers, {len(profile.meta['prompts'])} prompts, {seconds:.0f} s", soft_wrap=True
    )
