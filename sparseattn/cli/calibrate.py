"""`sparseattn calibrate`: what Loki and Double Sparsity take from traces, as a file that their selectors read."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.calibration import METHODS, Calibration
from sparseattn.cli.common import Screen, in_a_sentence, integers, progress_bar
from sparseattn.devices import usable_device
from sparseattn.training.calibrate import calibrate as fit

QUARTER = 4  # the methods' default: a quarter of the dimensions


@in_a_sentence
def calibrate(
    traces: Annotated[list[Path], typer.Argument(help="Traces of one model, or folders of them.")],
    method: Annotated[str, typer.Option(help=f"{' or '.join(METHODS)}.")],
    out: Annotated[Path, typer.Option(help="Calibration to write, a .safetensors file.")],
    layers: Annotated[str | None, typer.Option(help="Layers to calibrate, such as 1,2,5; default all.")] = None,
    before_rope: Annotated[
        bool, typer.Option("--before-rope", help="loki: directions of keys before RoPE, for loki:before=True.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Calibrate Loki or Double Sparsity on traces; `loki:artefact=FILE` uses the result."""
    place, indices = usable_device(device), integers(layers, "--layers")
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


def figure(made: Calibration, layer: int) -> float:
    """The share of a layer's statistic that the best quarter of the dimensions has, mean over KV heads."""
    held = made.layers[layer]
    sizes = (held["variance"] if made.method == "loki" else held["importance"]).sort(-1, descending=True).values
    best = sizes[:, : max(sizes.shape[1] // QUARTER, 1)].sum(-1)
    return float((best / sizes.sum(-1).clamp(min=1e-30)).mean())
