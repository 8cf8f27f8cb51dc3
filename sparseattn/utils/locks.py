"""One process at a time: a lock file that names its holder, and a lock on it that ends when its process does."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sparseattn.utils.files import Lock, naming, open_lock, take_lock

MOST = 10_000  # bytes that are read of what a holder wrote


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Hold the lock of the file `path` within the block; the file is there only as long.

    The operating system keeps the lock, so that a process that is killed leaves none behind, whatever file it leaves.
    Where the file system has no locks, it warns and goes on without.

    Args:
        path: a file that is nothing but the lock; its folder exists.
        what: what the lock keeps for one process, in the sentence of the error.

    Raises:
        ValueError: another process has it; names that process, its host and since when. Or what lies there is no file
            of its own, such as a link, see `open_lock`.
        OSError: the file cannot be made; naming `path`.
    """
    path = Path(path)
    with naming(path):
        file, lock = _opened(path)
    if lock is Lock.OTHERS:
        with file:
            raise ValueError(f"{what} is in use by {_holder(file)}: wait until it ends")
    try:
        if lock is Lock.NONE:
            warnings.warn(
                f"nothing keeps {what} for one process, as the file system of {path} has no locks: two runs there at "
                f"once would spoil each other's records",
                stacklevel=3,
            )
        with naming(path):
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file; an unlocked one that stays is harmless
            if _is_at(file, path):
                path.unlink()
        file.close()


def _opened(path: Path) -> tuple[IO[bytes], Lock]:
    """Return the file, and whose its lock is now."""
    while True:
        file = open_lock(path)
        try:
            lock = take_lock(file)
            if lock is not Lock.OURS or _is_at(file, path):
                return file, lock
            file.close()  # its last holder removed the file between our opening and locking it
        except BaseException:
            file.close()
            raise


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether the open file is the one at `path`, and not one that was removed since."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    return False


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _holder(file: IO[bytes]) -> str:
    try:
        facts = json.loads(file.read(MOST))
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # it has not written its facts yet
        return "another process"
