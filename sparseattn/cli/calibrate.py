"""`sparseattn calibrate`: what Loki, Double Sparsity, Kascade and budgets by mass take from traces, as files."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sparseattn.cli.common import in_a_sentence, integers, own_selectors, progress_bar
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.parameters.channel_calibration import METHODS, Calibration
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace
from sparseattn.training.calibrate import calibrate as fit
from sparseattn.training.fit_logits import fit as fit_estimates
from sparseattn.training.recipe import TrainingError
from sparseattn.training.similarity import similarity
from sparseattn.utils.devices import usable_device

MASS = "mass"  # of --method
ZONES = 4, 64, 32  # sink, window and decoded tokens, by default
QUARTER = 4  # the methods' default: a quarter of the dimensions
KASCADE = "kascade"
SHOWN = 8  # numbers of anchors that a report names


@in_a_sentence
def calibrate(
    traces: Annotated[list[Path], typer.Argument(help="Traces of one model, or folders of them.")],
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}, {KASCADE} or {MASS}.")],
    out: Annotated[Path, typer.Option(help="Calibration to write, a .safetensors file.")],
    layers: Annotated[str | None, typer.Option(help="Layers to calibrate, such as 1,2,5; default all.")] = None,
    before_rope: Annotated[
        bool, typer.Option("--before-rope", help="loki: directions of keys before RoPE, for loki:before=True.")
    ] = False,
    queries: Annotated[
        int | None, typer.Option(help="kascade: queries of each prompt that layers are compared on; default 64.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            callback=own_selectors, help=f"{MASS}: the selector whose estimates of what rows weigh are fitted."
        ),
    ] = None,
    sink: Annotated[int, typer.Option(help=f"{MASS}: first rows that every query reads.")] = ZONES[0],
    window: Annotated[int, typer.Option(help=f"{MASS}: last rows that every query reads.")] = ZONES[1],
    last: Annotated[int, typer.Option(help=f"{MASS}: tokens at the end of each trace that are decoded.")] = ZONES[2],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Calibrate Loki, Double Sparsity or Kascade on traces; `loki:artefact=FILE` uses the result. With --method mass,
    fit a selector's estimates for budgets by mass; `sparseattn:Fitted:inner=SELECTOR,artefact=FILE` uses them."""
    if method not in (known := (*METHODS, KASCADE, MASS)):
        raise ValueError(f"--method is one of {', '.join(known)}, got {method!r}")
    place, indices = usable_device(device), integers(layers, "--layers")
    if (method == MASS) != (selector is not None):
        raise ValueError(f"--selector is for --method {MASS}, which needs it; got --method {method}")
    if method == MASS and (before_rope or device is not None):
        option = "--before-rope" if before_rope else "--device"
        raise ValueError(f"{option} is not for --method {MASS}, which replays traces as they are, on the CPU")
    if method != MASS and (sink, window, last) != ZONES:
        raise ValueError(f"--sink, --window and --last are for --method {MASS}; got --method {method}")
    if method == KASCADE:
        if before_rope:
            raise TrainingError(f"{KASCADE} takes keys and queries after RoPE, not before it")
        return _compare(traces, out, indices, 64 if queries is None else queries, place, json)
    if queries is not None:
        raise TrainingError(f"--queries is for {KASCADE}, and {method} takes every token")
    if selector is not None:
        _fit(traces, selector, out, indices, (sink, window, last), json)
        return
    started = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task(f"calibrate {method}", total=None)
        made = fit(
            traces,
            method,
            out,
            layers=indices,
            roped=not before_rope,
            device=place,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = time.monotonic() - started
    found = {index: figure(made, index) for index in made.layers}
    if json:
        report: dict[str, Any] = {"calibration": str(out), "method": method, "bytes": out.stat().st_size}
        report |= {"seconds": round(seconds, 3), "layers": {str(i): round(one, 4) for i, one in found.items()}}
        typer.echo(json_module.dumps({**report, **made.meta}))
        return
    what = "share of the keys' variance" if method == "loki" else "share of the products' size"
    console = Screen()
    console.print(f"{what} in a quarter of the dimensions, mean over heads:")
    console.print("  ".join(f"layer {index} {one:.2f}" for index, one in found.items()))
    console.print(
        f"{out}: {len(made.layers)} layers, {len(made.meta['prompts'])} prompts, {seconds:.0f} s", soft_wrap=True
    )


def _fit(
    paths: Sequence[Path], spec: str, out: Path, layers: list[int] | None, zones: tuple[int, int, int], json: bool
) -> None:
    """`--method mass`: writes `out` and says what was found."""
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise ValueError(f"fitted estimates are a .safetensors file in a folder that is there, got {out}")
    selector, opened = make_selector(spec), [Trace.open(path) for path in paths]
    sink, window, last = zones
    with progress_bar() as bar:
        task = bar.add_task(f"fit {spec}", total=None)
        made = fit_estimates(
            opened,
            selector,
            sink=sink,
            window=window,
            last=last,
            layers=layers,
            progress=lambda n: bar.advance(task, n),
        )
    made.save(out)
    means = {index: (float(scale.mean()), float(offset.mean())) for index, (scale, offset) in made.layers.items()}
    if json:
        report = {"estimates": str(out), "selector": made.selector, "bytes": out.stat().st_size}
        by_layer = {str(i): {"scale": round(a, 4), "offset": round(c, 4)} for i, (a, c) in means.items()}
        typer.echo(json_module.dumps({**report, "layers": by_layer, **made.meta}))
        return
    console = Screen()
    console.print("scale and offset, mean over heads:")
    console.print("  ".join(f"layer {index} {a:.2f} {c:+.2f}" for index, (a, c) in means.items()))
    console.print(f"{out}: {made.selector}, {len(means)} layers", soft_wrap=True)


def figure(made: Calibration, layer: int) -> float:
    """The share of a layer's statistic that the best quarter of the dimensions has, mean over KV heads."""
    held = made.layers[layer]
    sizes = (held["variance"] if made.method == "loki" else held["importance"]).sort(-1, descending=True).values
    best = sizes[:, : max(sizes.shape[1] // QUARTER, 1)].sum(-1)
    return float((best / sizes.sum(-1).clamp(min=1e-30)).mean())


def _compare(
    traces: list[Path], out: Path, layers: list[int] | None, queries: int, place: torch.device, json: bool
) -> None:
    """The command for Kascade."""
    started = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task(f"calibrate {KASCADE}", total=None)
        made = similarity(
            traces,
            out,
            layers=layers,
            queries=queries,
            device=place,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = time.monotonic() - started
    found = {count: made.anchors(count) for count in range(1, min(len(made.layers), SHOWN) + 1)}
    if json:
        report: dict[str, Any] = {"similarity": str(out), "method": KASCADE, "bytes": out.stat().st_size}
        served = {str(k): {"layers": one, "served": round(made.score(one), 4)} for k, one in found.items()}
        typer.echo(json_module.dumps({**report, "seconds": round(seconds, 3), "anchors": served, **made.meta}))
        return
    console = Screen()
    console.print("anchors, and the weight of a layer's own choice that its anchor's has, mean over layers and heads:")
    for count, anchors in found.items():
        console.print(f"{count}: {', '.join(map(str, anchors))} ({made.score(anchors):.2f})")
    layers_of = f"{len(made.layers)} layers, {len(made.meta['prompts'])} prompts"
    console.print(f"{out}: {layers_of}, {seconds:.0f} s", soft_wrap=True)
