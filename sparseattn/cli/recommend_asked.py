"""What `recommend` was asked for, and the texts that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparseattn.cli.common import named_text, open_text
from sparseattn.cli.eval_sources import OWN_KIND
from sparseattn.core.budget import Budget
from sparseattn.cost_model.machine import Machine
from sparseattn.recommend.bounds import Bound
from sparseattn.traces.texts import TEXTS


class NoPlan(ValueError):
    """No configuration keeps the bound, in a sentence."""


@dataclass(frozen=True, eq=False)
class Asked:
    """The options of the command, checked."""

    model: str
    texts: tuple[str, ...]
    bound: Bound
    machine: Machine | None
    context: int | None
    batch: int
    methods: tuple[str, ...]
    budgets: tuple[Budget, ...]
    by_head: bool
    length: int
    last: int
    search: int
    held_out: int
    draws: int
    sink: int
    window: int
    name: str
    dtype: torch.dtype | None
    device: torch.device
    chunk: int
    vllm: bool

    @property
    def predicted(self) -> bool:
        """Whether costs are predicted by formula, not measured on the windows."""
        return self.machine is not None or self.context is not None or self.batch > 1


def texts_of(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, kind and words of each text; a folder stands for its files.

    Raises:
        ValueError: no such text, a folder without files, or two texts of one name.
    """
    every: list[str] = []
    for name in names:
        source = named_text(name)
        if isinstance(source, Path) and source.is_dir():
            files = [str(path) for path in sorted(source.iterdir()) if path.is_file()]
            if not files:
                raise ValueError(f"the folder {name} holds no text file")
            every += files
        else:
            every.append(name)
    found: dict[str, tuple[str, str, str]] = {}
    for one in dict.fromkeys(every):
        name, words = open_text(one)
        if name in found:
            raise ValueError(f"two texts are called {name}: rename a file")
        found[name] = name, TEXTS[one].kind if one in TEXTS else OWN_KIND, words
    return list(found.values())
