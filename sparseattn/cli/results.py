"""What commands leave in the folder of `--out`: records as JSON lines, and figures."""

from __future__ import annotations

import contextlib
import datetime
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from sparseattn.cli.command import errors
from sparseattn.cost_model.environment import machine, versions
from sparseattn.utils.files import naming, write_atomic
from sparseattn.utils.locks import locked
from sparseattn.utils.ranks import JobRanks


def results_folder(out: Path) -> None:
    """Make the folder `out`; one that cannot be written fails here, not after the work."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, and {out} is a file")
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def check_tensor_file(out: Path) -> None:
    """Refuse what is no .safetensors file as `--out`."""
    if out.suffix != ".safetensors" or (out.exists() and not out.is_file()):
        raise ValueError(f"--out must be a .safetensors file, got {out}")


@contextlib.contextmanager
def own_folder(out: Path, command: str, ranks: JobRanks | None = None) -> Iterator[None]:
    """Make the folder `out`, and keep a command's files in it for this process within the block.

    Of a job's processes, `ranks`, the first keeps them for all.

    Raises:
        ValueError: another run of the command has them; or what `results_folder` refuses.
    """
    results_folder(out)
    if ranks and not ranks.first:
        yield
        return
    with locked(out / f"{command}.lock", f"--out {out}"):
        yield


def check_figures(wanted: bool) -> None:
    """Raise ImportError where figures are wanted and matplotlib is missing, before any work."""
    if wanted:
        from sparseattn.reporting import plots  # noqa: F401


def origin() -> dict[str, Any]:
    """Return what every record says of its making: date, versions and machine."""
    return {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}


def say_figure(path: Path) -> None:
    """Say where a figure lies."""
    errors.print(f"figure: {path}", soft_wrap=True)


def say_records(path: Path) -> None:
    """Say where records lie."""
    errors.print(f"records: {path}", soft_wrap=True)


class RecordFile:
    """JSON lines that take the place of an earlier run's once all are there; until then they lie in NAME.partial.jsonl.

    Args:
        path: the file, NAME.jsonl, in a folder that is there.
        echo: print every line on standard output too.

    Raises:
        ValueError: what lies there already is no file.
    """

    def __init__(self, path: Path, echo: bool) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"records are written to {path}, which is no file: remove it, or name another --out")
        self.path, self.echo = path, echo
        self.partial = path.with_suffix(".partial.jsonl")
        self.origin = origin()
        self.lines: list[str] = []

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records, each with where it is from; they are on the disk then."""
        lines = [json.dumps({**record, **self.origin}) for record in records]
        self.lines += lines
        write_atomic(self.partial, ("\n".join(self.lines) + "\n").encode())
        if self.echo:
            typer.echo("\n".join(lines))

    def finish(self) -> None:
        """Put the lines in the earlier run's place."""
        self.partial.replace(self.path)
