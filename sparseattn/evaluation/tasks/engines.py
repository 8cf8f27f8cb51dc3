"""What prompts are put to, whatever runs the model: a model in this process, servers, another library's engine."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any, Protocol

from sparseattn.evaluation.tasks.compared import Compared
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import Key


class Pass(Protocol):
    """Some of what is compared, measured together: it takes every prompt once."""

    @property
    def compared(self) -> Sequence[Compared]:
        """In the order of tables."""

    def measure(self, prompts: Iterable[Prompt], known: Collection[Key]) -> Generator[dict[str, Any], None, None]:
        """Return the records of prompts that are not in `known`, as soon as each is there, in any order.

        It may read ahead in `prompts`, which are made as they are taken, but not keep all of them.
        """


class Engine(Protocol):
    """What measures prompts. The first thing that it compares is what the others are compared with.

    A new engine is a class like `local.Local` or `served.Served`, and what opens it in `cli.eval_engines`.
    """

    @property
    def protocols(self) -> Sequence[str]:
        """How it asks, in the order of its records."""

    @property
    def passes(self) -> Sequence[Pass]:
        """What it compares, one pass after the other."""

    @property
    def positions(self) -> int | None:
        """Tokens that a prompt and its answer may have; None: any number, or nobody knows."""

    def check(self, tokens: int, what: str, remedy: str = "") -> None:
        """ValueError for `what` of more tokens than that, with the `remedy` behind it."""
