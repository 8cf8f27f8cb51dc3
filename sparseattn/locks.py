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

from sparseattn.files import Lock, naming, take_lock


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Holds the lock of the file `path` within the block; the file is there only as long.

    The operating system keeps the lock, so that a process that is killed leaves none behind, whatever file it leaves.
    Where the file system has no locks, it warns and goes on without.

    Args:
        path: a file that is nothing but the lock; its folder exists.
        what: what the lock keeps for one process, in the sentence of the error.

    Raises:
        ValueError: another process has it; names that process, its host and since when.
        OSError: the file cannot be made; naming `path`.
    """
    path = Path(path)
    with naming(path):
        file, lock = _opened(path)
    if lock is Lock.OTHERS:
        file.close()
        raise ValueError(f"{what} is in use by {_holder(path)}: wait until it ends")
    try:
        if lock is Lock.NONE:
            warnings.warn(
                f"nothing keeps {what} for one process, as the file system of {path} has no locks: two runs there at "
                f"once would write every record twice",
                stacklevel=3,
            )
        with naming(path):
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file; an unlocked one that stays is harmless
            path.unlink()
        file.close()


def _opened(path: Path) -> tuple[IO[bytes], Lock]:
    """The file, and whose its lock is now."""
    while True:
        # Not "w": what the holder wrote stays until the lock is ours. Not "a": facts are written at the beginning.
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)  # noqa: SIM115
        try:
            lock = take_lock(file)
            if lock is not Lock.OURS:
                return file, lock
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file, lock
            file.close()  # its last holder removed the file between our opening and locking it
        except BaseException:
            file.close()
            raise


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_bytes())
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # it has not written its facts yet
        return "another process"
