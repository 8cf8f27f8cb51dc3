"""A limit of memory for one process: a control group of Linux's (cgroup v1 or v2), made for it and removed behind it.

What the process has of its own and the pages of files that it was the first to touch count. Above the limit the system
gives up pages of files before it ends the process. Making a group needs root, and a machine that allows it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OLD, NEW = ROOT / "memory", ROOT  # where groups of v1 and of v2 that limit memory lie


class NoLimit(RuntimeError):
    """No group can be made here."""


@contextlib.contextmanager
def group(limit: int) -> Iterator[Path]:
    """The folder of a group whose processes may have `limit` bytes; NoLimit where none can be made."""
    old = OLD.is_dir()
    folder = (OLD if old else NEW) / f"sparseattn-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise NoLimit(f"no memory limit can be set here: {error}") from error
    try:
        yield folder
    finally:
        folder.rmdir()


def run_within(folder: Path, arguments: Sequence[str]) -> str:
    """What a Python process prints that is in a group from its start on.

    Raises:
        RuntimeError: it failed, or the system ended it for want of memory.
    """

    def enter() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    if done.returncode:
        raise RuntimeError(f"the process within the memory limit ended with status {done.returncode}")
    return done.stdout


def most_used(folder: Path) -> int:
    """The most bytes that the group's processes had at once, pages of files included."""
    name = "memory.max_usage_in_bytes" if (folder / "memory.max_usage_in_bytes").exists() else "memory.peak"
    return int((folder / name).read_text())
