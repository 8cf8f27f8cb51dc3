"""What is compared on the same prompts, and how these are put: the names that records are told apart by."""

from __future__ import annotations

from typing import Protocol

PROTOCOLS = ("question", "prefill", "generate")
FORCED = "forced"  # the protocol of agreement: tokens of a text are fed whatever was expected
FULL = "full"  # the label of full attention


class Compared(Protocol):
    """One of the things that answer the same prompts, such as a method or a server. Its names are part of the keys of
    its records (see `records.KEY`)."""

    @property
    def label(self) -> str:
        """As tables call it."""

    @property
    def written(self) -> str | None:
        """The budget, where it has one."""

    @property
    def source(self) -> str | None:
        """What tells it from others of its label: what it is made of."""

    @property
    def where(self) -> str | None:
        """The layers in which it differs from full attention; None: all that can, or nobody knows."""
