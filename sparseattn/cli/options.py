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

from sparseattn.cli import completion
from sparseattn.models.packaged import PACKAGED, REFERENCE
from sparseattn.traces.texts import TEXTS

if TYPE_CHECKING:
    import torch

LEAD = "smollm2"  # the model that is asked where none is named
ALL_LAYERS = "all"  # of `eval --sparse-layers`: every one that attends to the whole context

SELECTOR_HELP = (
    "A method, NAME or NAME:arg=value,..., such as quest:page=32; `sparseattn info` lists the names. Or a class of "
    "your own, package.module:Class, which runs the code of that module. Repeat the option for several."
)
MODEL_HELP = (
    f"{', '.join((REFERENCE, *PACKAGED))} (see `sparseattn models`), or a causal language model of transformers: its "
    f"folder, its GGUF file or its name on the Hugging Face hub."
)
TEXT_HELP = f"a UTF-8 file, or a text by name: {', '.join(TEXTS)} (write ./NAME for a file with such a name)."


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


def trusted(modules: Iterable[str] | None, selectors: Iterable[str] | None, *files: object) -> frozenset[str]:
    """Return the modules that the user named, by `--trust` or in selectors.

    Args:
        modules: of `--trust`.
        selectors: as texts.
        files: what options of files of roles and of plans have, whose classes `modules` are for.

    Raises:
        ValueError: what is no name of a module, or modules without any file.
    """
    from sparseattn.selectors.trust import named_modules, trusted_modules

    by_name = trusted_modules(list(modules or ()))
    if by_name and not any(files):
        raise ValueError(
            f"--trust {', '.join(sorted(by_name))} is for a file of roles or a plan that names classes of that module, "
            f"and none is given: leave --trust out, or name a file"
        )
    return by_name.union(named_modules(selectors or ()))


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the user gave, and that are not there by default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def spelled(parameters: Iterable[str]) -> str:
    """Return parameters as the options that users write: `--dense-layers, --sink`."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in parameters)


def selector_option(more: str, *words: str) -> Any:
    """Return an option of selectors; its help ends in `more`, such as what the default is; it takes `words` too."""
    return typer.Option("--selector", help=f"{SELECTOR_HELP} {more}", autocompletion=completion.selectors(*words))


Roles = Annotated[
    list[Path] | None,
    typer.Option(
        "--roles",
        help="Roles file: one selector per layer, or per KV head of a layer. It is compared as one method. Repeat the "
        "option for several.",
    ),
]
Plans = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        help="Plan that `sparseattn recommend` wrote for this model. It is compared as one method. Repeat the option "
        "for several.",
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        help="Module whose classes a roles file or a plan may use, as MODULE:Class. Its code is run. A file that names "
        "any other module is refused. Repeat the option for several.",
    ),
]
Budgets = Annotated[
    str,
    typer.Option(
        "--budget",
        help="Tokens that a query reads besides sink and window, several with commas: a number (256), a share of the "
        "context (5%), a share of the attention (mass:0.95, or mass:0.95:2048 for at most 2,048 tokens), or all.",
    ),
]
Sink = Annotated[int, typer.Option("--sink", help="Number of first tokens that every query reads.")]
Window = Annotated[int, typer.Option("--window", help="Number of most recent tokens that every query reads.")]
Seal = Annotated[
    int | None,
    typer.Option(
        "--seal",
        help="Number of new tokens that wait until the selector indexes them; every query reads all of them. Default: "
        "the selector's span, such as its page. More makes a method look better than it is.",
    ),
]
DenseLayers = Annotated[
    int, typer.Option("--dense-layers", help="Number of first layers that keep full attention; Quest's paper has 2.")
]
KvRows = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-rows",
        help="How stored keys and values are kept: exact (as the model computes them) or a row codec "
        "NAME[:arg=value,...] such as kivi:bits=4; methods that score stored keys refuse codecs. Repeat to compare. "
        "Default: exact.",
    ),
]
Layers = Annotated[str | None, typer.Option("--layers", help="Layers to use, such as 0,5,17. Default: all.")]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Where torch computes, such as cpu or cuda. Default: a GPU if there is one."),
]
TensorParallel = Annotated[
    bool,
    typer.Option(
        "--tensor-parallel",
        help="The processes of torchrun share the model, each with its heads of every layer, where no device holds all "
        "of it. Without it each has the whole model and takes its part of the prompts.",
    ),
]
ReplayDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Where torch computes, such as cpu or cuda. Default: a GPU if there is one and the selector can use it.",
    ),
]
ModelDtype = Annotated[
    Dtype | None,
    typer.Option("--dtype", metavar="DTYPE", help=f"Dtype of the model: {', '.join(Dtype)}. Default: as stored."),
]
Chunk = Annotated[int, typer.Option("--chunk", help="Number of tokens that the model reads at a time in prefill.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]
Figures = Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures (PNG) into --out.")]
