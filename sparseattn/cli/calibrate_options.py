"""The options of `sparseattn calibrate`, and what its help says; see `cli.command`.

`sparseattn train` takes the same methods with the same options: it makes these of its own, which checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared

CHANNELS = ("loki", "doublesparsity")  # of --method: whose channels are calibrated
KASCADE = "kascade"
DUO = "duo"
MASS = "mass"
METHODS = (*CHANNELS, KASCADE, DUO, MASS)
ZONES = ("sink", "window", "last")  # options of `MASS`, and all but the last of `DUO`

BeforeRope = Annotated[
    bool,
    typer.Option("--before-rope", help="With loki: find the directions of keys before RoPE, for loki:before=True."),
]
Fitted = Annotated[
    str | None,
    typer.Option(
        "--selector",
        help=f"With {MASS}: the selector whose estimates are fitted, such as quest:page=32.",
        autocompletion=completion.selectors(),
    ),
]
Window = Annotated[
    int, typer.Option(help=f"With {MASS} or {DUO}: number of most recent tokens that every query reads.")
]
Last = Annotated[int, typer.Option(help=f"With {MASS}: number of tokens to decode, at the end of each trace.")]


@dataclass(frozen=True)
class CalibrateOptions:
    """Calibrate Loki, Double Sparsity, Kascade or DuoAttention on traces. `loki:artefact=FILE` uses the result.

    This is another name of `sparseattn train` for these methods: both take the same options and write the same file.

    With --method mass, fit a selector's estimates of attention, which budgets such as mass:0.95 rely on.
    `sparseattn:Fitted:inner=SELECTOR,artefact=FILE` uses the result.
    """

    traces: Annotated[list[Path], typer.Argument(help="Trace files of one model, or folders of them.")]
    method: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(METHODS[:-1])} or {MASS}.",
            autocompletion=completion.one_of(METHODS),
        ),
    ]
    out: Annotated[Path, typer.Option(help="File to write, NAME.safetensors.")]
    layers: shared.Layers = None
    before_rope: BeforeRope = False
    queries: Annotated[
        int | None,
        typer.Option(help="With kascade or duo: number of queries of each prompt to look at. Default: 64."),
    ] = None
    device: shared.Device = None
    selector: Fitted = None
    sink: Annotated[int, typer.Option(help=f"With {MASS} or {DUO}: number of first tokens that every query reads.")] = 4
    window: Window = 64
    last: Last = 32
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False

    def __post_init__(self) -> None:
        values.check_one_of("--method", self.method, METHODS)
        if (self.method == MASS) != (self.selector is not None):
            raise ValueError(
                f"--method {MASS} needs --selector, and no other method takes it; got --method {self.method}"
            )
        if self.method == MASS and (self.before_rope or self.device is not None):
            option = "--before-rope" if self.before_rope else "--device"
            raise ValueError(f"--method {MASS} takes no {option}: it replays traces as they are, on the CPU")
        taken = {MASS: ZONES, DUO: ZONES[:2]}.get(self.method, ())
        if any(getattr(self, name) != getattr(type(self), name) for name in ZONES if name not in taken):
            raise ValueError(
                f"only --method {MASS} takes --sink, --window and --last, and {DUO} the first two; got --method "
                f"{self.method}"
            )
        if self.method in (KASCADE, DUO) and self.before_rope:
            raise ValueError(f"{self.method} takes keys and queries after RoPE, not before it")
        if self.method == DUO and self.device is not None:
            raise ValueError(f"--method {DUO} takes no --device: it works on the CPU")
        if self.method not in (KASCADE, DUO) and self.queries is not None:
            raise ValueError(f"only --method {KASCADE} and {DUO} take --queries; {self.method} uses every token")

    @property
    def layer_numbers(self) -> list[int] | None:
        """The layers to calibrate; None: all."""
        return values.integers(self.layers, "--layers")
