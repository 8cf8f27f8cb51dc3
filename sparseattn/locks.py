"""One process at a time: a lock file that names its holder, and a lock on it that ends when its process does."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeAlias

from sparseattn.files import naming

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

File: TypeAlias = "IO[bytes]"

FAR = 1 << 30  # Windows locks bytes, and a locked one cannot be read: this one lies behind the holder's facts


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Holds the lock of the file `path` within the block; the file is there only as long.

    The operating system keeps the lock, so that a process that is killed leaves none behind, whatever file it leaves.

    Args:
        path: a file that is nothing but the lock; its folder exists.
        what: what the lock keeps for one process, in the sentence of the error.

    Raises:
        ValueError: another process has it; names that process, its host and since when.
        OSError: the file cannot be made, or its file system knows no locks; naming `path`.
    """
    path = Path(path)
    with naming(path):
        file = _taken(path)
    if file is None:
        raise ValueError(f"{what} is in use by {_holder(path)}: wait until it ends")
    try:
        with naming(path):
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file; an unlocked one that stays is harmless
            path.unlink()
        file.close()


def _taken(path: Path) -> File | None:
    """The locked file, or None where another process holds the lock."""
    while True:
        # Not "w": what the holder wrote stays until the lock is ours. Not "a": facts are written at the beginning.
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)  # noqa: SIM115
        try:
            if not _lock(file):
                file.close()
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
            file.close()  # its last holder removed the file between our opening and locking it
        except BaseException:
            file.close()
            raise


def _lock(file: File) -> bool:
    try:
        if sys.platform == "win32":
            file.seek(FAR)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Linux and macOS say the one, Windows the other
        return False
    return True


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_bytes())
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # it has not written its facts yet
        return "another process"
