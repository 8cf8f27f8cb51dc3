"""Ctrl-C at any moment."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class Interrupt:
    """Ctrl-C at the `moment`-th call of a Python function within the block; at None it counts them."""

    def __init__(self, moment: int | None = None) -> None:
        self.moment, self.calls = moment, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls += 1
            if self.calls == self.moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
