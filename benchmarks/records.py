"""How a benchmark ends: its record as a file, and as tables or one line of JSON on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparseattn.utils.files import write_atomic

RESULTS = Path(__file__).parent / "results"  # where records go by default
WIDE = 120  # columns of the tables, where standard output is no terminal


def save(record: Mapping[str, Any], path: Path) -> None:
    """The record as JSON, in place of what was there."""
    write_atomic(path, (json.dumps(record, indent=1) + "\n").encode())


def add_options(command: argparse.ArgumentParser) -> None:
    """The options that `end` reads."""
    command.add_argument("--json", action="store_true", help="the record on standard output")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")


def end(record: Mapping[str, Any], name: str, tables: Callable[[Any], Iterable[Table]], options: Any) -> None:
    """Save the record as a file of this name in the folder that `options` say, and show it as they say."""
    path = options.results / name
    options.results.mkdir(parents=True, exist_ok=True)
    save(record, path)
    show(record, tables, f"record: {path}", options.json)


def show(record: Mapping[str, Any], tables: Callable[[Any], Iterable[Table]], words: str, as_json: bool) -> None:
    """The record on one line, or its tables and `words` below them."""
    if as_json:
        print(json.dumps(record))
        return
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDE)
    for table in tables(record):
        console.print(table)
    console.print(words, soft_wrap=True)
