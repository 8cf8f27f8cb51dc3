"""How benchmarks that replay the end of a trace let it be said, and read what was said."""

from __future__ import annotations

import argparse
from typing import Any

SETTINGS = ("sink", "window", "seal", "last")  # of `sparseattn.evaluation.replay.evaluate`


def add_options(
    command: argparse.ArgumentParser, window: int = 92, last: int = 32, words: str = "tokens decoded"
) -> None:
    """The options that `settings` reads, with the defaults of window and last; `words` say what the last ones are."""
    command.add_argument("--sink", type=int, default=4)
    command.add_argument("--window", type=int, default=window)
    command.add_argument("--seal", type=int, default=64)
    command.add_argument("--last", type=int, default=last, help=words)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return sink, window, seal and last, as `evaluate` and `Replay` take them."""
    return {name: getattr(options, name) for name in SETTINGS}
