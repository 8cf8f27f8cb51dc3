"""The options of `sparseattn calibrate`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared

CHANNELS = ("loki", "doublesparsity")  # of --method: whose channels are calibrated
KASCADE = "kascade"
MASS = "mass"
ZONES = ("sink", "window", "last")  # options of `MASS` alone


@dataclass(frozen=True)
class CalibrateOptions:
    """Calibrate Loki, Double Sparsity or Kascade on traces. `loki:artefact=FILE` uses the result.

    With --method mass, fit a selector's estimates of attention, which budgets such as mass:0.95 rely on.
    `sparseattn:Fitted:inner=SELECTOR,artefact=FILE` uses the result.
    """

    traces: Annotated[list[Path], typer.Argument(help="Trace files of one model, or folders of them.")]
    method: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(CHANNELS)}, {KASCADE} or {MASS}.",
            autocompletion=completion.one_of((*CHANNELS, KASCADE, MASS)),
        ),
    ]
    out: Annotated[Path, typer.Option(help="File to write, NAME.safetensors.")]
    layers: shared.Layers = None
    before_rope: Annotated[
        bool,
        typer.Option("--before-rope", help="With loki: find the directions of keys before RoPE, for loki:before=True."),
    ] = False
    queries: Annotated[
        int | None,
        typer.Option(help="With kascade: number of queries of each prompt to compare layers on. Default: 64."),
    ] = None
    device: shared.Device = None
    selector: Annotated[
        str | None,
        typer.Option(
            help=f"With {MASS}: the selector whose estimates are fitted, such as quest:page=32.",
            autocompletion=completion.selectors(),
        ),
    ] = None
    sink: Annotated[int, typer.Option(help=f"With {MASS}: number of first tokens that every query reads.")] = 4
    window: Annotated[int, typer.Option(help=f"With {MASS}: number of most recent tokens that every query reads.")] = 64
    last: Annotated[int, typer.Option(help=f"With {MASS}: number of tokens to decode, at the end of each trace.")] = 32
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False

    def __post_init__(self) -> None:
        values.check_one_of("--method", self.method, (*CHANNELS, KASCADE, MASS))
        if (self.method == MASS) != (self.selector is not None):
            raise ValueError(
                f"--method {MASS} needs --selector, and no other method takes it; got --method {self.method}"
            )
        if self.method == MASS and (self.before_rope or self.device is not None):
            option = "--before-rope" if self.before_rope else "--device"
            raise ValueError(f"--method {MASS} takes no {option}: it replays traces as they are, on the CPU")
        if self.method != MASS and any(getattr(self, name) != getattr(type(self), name) for name in ZONES):
            raise ValueError(f"only --method {MASS} takes --sink, --window and --last; got --method {self.method}")
        if self.method == KASCADE and self.before_rope:
            raise ValueError(f"{KASCADE} takes keys and queries after RoPE, not before it")
        if self.method != KASCADE and self.queries is not None:
            raise ValueError(f"only --method {KASCADE} takes --queries; {self.method} uses every token")

    @property
    def layer_numbers(self) -> list[int] | None:
        """The layers to calibrate; None: all."""
        return values.integers(self.layers, "--layers")
