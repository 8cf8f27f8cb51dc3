"""Options that commands share, each an `Annotated` type with its help; a command's dataclass gives them defaults."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseattn.models.packaged import PACKAGED, REFERENCE
from sparseattn.traces.texts import TEXTS

if TYPE_CHECKING:
    import torch

LEAD = "smollm2"  # the model that is asked where none is named
ALL_LAYERS = "all"  # of `eval --sparse-layers`: every one that attends to the whole context

SELECTOR_HELP = (
    "NAME[:arg=value,...], such as quest:page=32; `sparseattn info` lists the names. package.module:Class is a class "
    "of your own, which runs the code of that module. Repeat for more."
)
MODEL_HELP = (
    f"{', '.join((REFERENCE, *PACKAGED))} (see `sparseattn models`); or the folder, the GGUF file or the name on the "
    f"Hugging Face hub of a transformers causal LM."
)
TEXT_HELP = f"a UTF-8 file, or a text by name: {', '.join(TEXTS)} (a file of such a name is meant by ./NAME)."


class Dtype(str, Enum):
    """What numbers are stored in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """The dtype of torch."""
        from sparseattn.utils.tensors import STORED

        return STORED[self.value]


def torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    """Return the dtype of torch; None stays None, for a model that is loaded as it is stored."""
    return None if dtype is None else dtype.torch


def allow_own_modules(selectors: str | Iterable[str] | None, modules: Iterable[str] | None) -> None:
    """Search the current folder for modules, behind all folders of Python's, where the user named one.

    In texts of selectors, or by `--trust`. Nothing else makes it do so: in a folder of somebody else's a file may have
    the name of any module.
    """
    from sparseattn.selectors.trust import named_modules

    if modules or named_modules([selectors] if isinstance(selectors, str) else selectors or ()):
        with contextlib.suppress(FileNotFoundError):  # it is gone, and holds no module
            if (here := os.getcwd()) not in sys.path:
                sys.path.append(here)


def trusted(modules: Iterable[str] | None, selectors: Iterable[str] | None) -> frozenset[str]:
    """Return the modules that the user named, by `--trust` or in selectors; ValueError for what is no name of one."""
    from sparseattn.selectors.trust import named_modules, trusted_modules

    return trusted_modules(list(modules or ())).union(named_modules(selectors or ()))


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the user gave, and that are not there by default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def spelled(parameters: Iterable[str]) -> str:
    """Return parameters as the options that users write: `--dense-layers, --sink`."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in parameters)


def selector_option(more: str) -> Any:
    """Return an option of selectors; its help ends in `more`, such as what the default is."""
    return typer.Option("--selector", help=f"{SELECTOR_HELP} {more}")


Roles = Annotated[
    list[Path] | None,
    typer.Option(
        "--roles",
        help="File of roles: a selector for each layer, or for each KV head of it, compared as one method; repeat for "
        "more.",
    ),
]
Plans = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        help="Plan, a file that `sparseattn recommend` wrote for this model, compared as one method; repeat for more.",
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        help="Module whose classes a file of roles or a plan may name, as MODULE:Class; it is imported, which runs its "
        "code. A file that names another one is refused. Repeat for more.",
    ),
]
Budgets = Annotated[
    str,
    typer.Option(
        "--budget",
        help="Rows beyond sink and window: numbers, shares of the context, a mass of the attention (mass:0.95, or with "
        "2048 rows at most mass:0.95:2048), or all.",
    ),
]
Sink = Annotated[int, typer.Option("--sink", help="First rows that every query reads.")]
Window = Annotated[int, typer.Option("--window", help="Last rows that every query reads.")]
Seal = Annotated[
    int | None,
    typer.Option(
        "--seal",
        help="Rows that wait, all of them read, before sealing; default the selector's span, since more flatters.",
    ),
]
DenseLayers = Annotated[int, typer.Option("--dense-layers", help="First layers that stay dense (Quest's paper: 2).")]
KvRows = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-rows",
        help="How sealed rows are kept: exact, as they come, or a row codec NAME[:arg=value,...] such as kivi:bits=4, "
        "which methods that score stored keys refuse; repeat to compare. Default exact.",
    ),
]
Layers = Annotated[str | None, typer.Option("--layers", help="Layers to take, such as 0,5,17; default all.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...; default a GPU if there is one.")]
ReplayDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="To replay on; default a CUDA device if there is one, for selectors that can work there.",
    ),
]
ModelDtype = Annotated[
    Dtype | None,
    typer.Option("--dtype", metavar="DTYPE", help=f"Of the model: {', '.join(Dtype)}; default as stored."),
]
Chunk = Annotated[int, typer.Option("--chunk", help="Tokens run through the model at a time.")]
JsonLines = Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")]
Figures = Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNGs into --out.")]
