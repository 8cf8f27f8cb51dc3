"""`sparseattn calibrate`: what Loki, Double Sparsity, Kascade and budgets by mass take from traces, as files."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.cli.command import command
from sparseattn.cli.progress import progress_bar, progress_of
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.parameters.channel_calibration import METHODS, Calibration
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace
from sparseattn.training.calibrate import calibrate
from sparseattn.training.fit_logits import fit
from sparseattn.training.recipe import TrainingError
from sparseattn.training.similarity import similarity
from sparseattn.utils.devices import usable_device

MASS = "mass"  # of --method
ZONES = ("sink", "window", "last")  # options of it
QUARTER = 4  # the methods' default: a quarter of the dimensions
KASCADE = "kascade"
QUERIES = 64  # of each prompt, that Kascade compares layers on by default
SHOWN = 8  # numbers of anchors that a report names


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of `calibrate`."""

    traces: Annotated[list[Path], typer.Argument(help="Traces of one model, or folders of them.")]
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}, {KASCADE} or {MASS}.")]
    out: Annotated[Path, typer.Option(help="Calibration to write, a .safetensors file.")]
    layers: shared.Layers = None
    before_rope: Annotated[
        bool, typer.Option("--before-rope", help="loki: directions of keys before RoPE, for loki:before=True.")
    ] = False
    queries: Annotated[
        int | None, typer.Option(help="kascade: queries of each prompt that layers are compared on; default 64.")
    ] = None
    device: shared.Device = None
    selector: Annotated[
        str | None,
        typer.Option(
            help=f"{MASS}: the selector whose estimates of what rows weigh are fitted.",
        ),
    ] = None
    sink: Annotated[int, typer.Option(help=f"{MASS}: first rows that every query reads.")] = 4
    window: Annotated[int, typer.Option(help=f"{MASS}: last rows that every query reads.")] = 64
    last: Annotated[int, typer.Option(help=f"{MASS}: tokens at the end of each trace that are decoded.")] = 32
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False

    def __post_init__(self) -> None:
        values.check_one_of("--method", self.method, (*METHODS, KASCADE, MASS))
        if (self.method == MASS) != (self.selector is not None):
            raise ValueError(f"--selector is for --method {MASS}, which needs it; got --method {self.method}")
        if self.method == MASS and (self.before_rope or self.device is not None):
            option = "--before-rope" if self.before_rope else "--device"
            raise ValueError(f"{option} is not for --method {MASS}, which replays traces as they are, on the CPU")
        if self.method != MASS and any(getattr(self, name) != getattr(type(self), name) for name in ZONES):
            raise ValueError(f"--sink, --window and --last are for --method {MASS}; got --method {self.method}")
        if self.method == KASCADE and self.before_rope:
            raise TrainingError(f"{KASCADE} takes keys and queries after RoPE, not before it")
        if self.method != KASCADE and self.queries is not None:
            raise TrainingError(f"--queries is for {KASCADE}, and {self.method} takes every token")

    @property
    def layer_numbers(self) -> list[int] | None:
        """The layers to calibrate; None: all."""
        return values.integers(self.layers, "--layers")


@command(CalibrateOptions)
def run(options: CalibrateOptions) -> None:
    """Calibrate Loki, Double Sparsity or Kascade on traces; `loki:artefact=FILE` uses the result. With --method mass,
    fit a selector's estimates for budgets by mass; `sparseattn:Fitted:inner=SELECTOR,artefact=FILE` uses them."""
    place = usable_device(options.device)
    if options.method == KASCADE:
        _compare_layers(options, place)
    elif options.selector is not None:
        _fit_estimates(options, options.selector)
    else:
        _calibrate_channels(options, place)


def _calibrate_channels(options: CalibrateOptions, place: torch.device) -> None:
    """Write Loki's or Double Sparsity's calibration and say what a quarter of the dimensions has."""
    started, out = time.monotonic(), options.out
    with progress_of(f"calibrate {options.method}") as progress:
        calibration = calibrate(
            options.traces,
            options.method,
            out,
            layers=options.layer_numbers,
            roped=not options.before_rope,
            device=place,
            progress=progress,
        )
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


def _fit_estimates(options: CalibrateOptions, spec: str) -> None:
    """Write what fits a selector's estimates to full attention's weights, for `--method mass`, and say what it is."""
    out = options.out
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise ValueError(f"fitted estimates are a .safetensors file in a folder that is there, got {out}")
    selector, traces = make_selector(spec), [Trace.open(path) for path in options.traces]
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
