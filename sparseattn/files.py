"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place when the block ends; when the block raises, the old file stays.

    Nothing else is left in either case. What a killed process left is removed by the next one that replaces the same
    file on the same host (not on Windows, and not where the file system has no locks). Of a symbolic link, the file it
    leads to is replaced.

    Raises:
        OSError: the file cannot be made or its bytes cannot be kept; it may name the new file instead of `path`.
    """
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)  # a loop of symbolic links is an error here, where `realpath` returns it as it is
    target = Path(os.path.realpath(path))
    _remove_abandoned(target)
    temporary, file = _begun(target)
    lock = os.dup(file.fileno())  # held until the file has its name: without it another process would remove it
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):  # a full disk fails once more when buffered bytes are flushed
            file.close()
        temporary.unlink(missing_ok=True)
        os.close(lock)
    if hasattr(os, "O_DIRECTORY"):  # make the rename itself last; Windows neither can nor need
        with contextlib.suppress(OSError):  # nor can some file systems; the file is there either way
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole or not at all (see `replacing`).

    Raises:
        OSError: naming `path`.
    """
    with naming(path), replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """An OSError of the block names `path`, where it named a temporary file, as a rule, or none (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's own sentence
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


# A process holds a lock on the file that it writes. The system lets go of it however the process ends, which no process
# number tells: numbers are given again, and mean others in another container. The name says the host all the same,
# since on some network file systems locks are known to one host alone.
def _prefix(target: Path) -> str:
    return f".{target.name}.{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"


def _begun(target: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `target`, and its lock if there are locks."""
    while True:
        path = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}.part")
        file = open(path, "xb")  # noqa: SIM115 (a `with` would let a failing close hide the first error)
        _locked(file, wait=True)
        if path.exists():  # not taken for abandoned between the two lines above
            return path, file
        file.close()


def _remove_abandoned(target: Path) -> None:
    """Removes the unfinished files beside `target` that no process holds."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):  # no such folder, or one that may not be listed
        for path in target.parent.iterdir():
            if path.name.startswith(_prefix(target)) and path.name.endswith(".part"):
                with contextlib.suppress(OSError), path.open("r+b") as file:
                    if _locked(file, wait=False):
                        path.unlink()


def _locked(file: BinaryIO, wait: bool) -> bool:
    """Whether this process has the file's lock now; False where another has it, or the file system has none."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
