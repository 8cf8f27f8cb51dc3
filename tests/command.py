"""Runs the console command in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from sparseattn.cli.app import app


def run(line: str, *words: object) -> Result:
    """`sparseattn` with the words of a line and with more words, which may hold spaces."""
    return CliRunner().invoke(app, [*line.split(), *map(str, words)])
