"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import platform
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FAR = 1 << 30  # Windows locks bytes, and a locked one cannot be read: this one lies behind what a lock file says


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file beside `path`, which takes its place when the block ends; when it raises, the old file stays.

    Nothing else is left in either case. What a killed process left is removed by the next one that replaces any file
    of the folder on the same host (not on Windows, and not where the file system has no locks). Of a symbolic link, the
    file it leads to is replaced.

    Raises:
        OSError: the file cannot be made or its bytes cannot be kept; it may name the new file instead of `path`. What
            lies at `path` is no file: a folder, a pipe, a device.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode  # a loop of symbolic links is an error here, where `realpath` returns it as it is
        if not stat.S_ISREG(mode):  # a device or a pipe would be replaced by a file
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
            raise OSError(errno.EINVAL, "it is no file", os.fspath(path))
    target = Path(os.path.realpath(path))
    _remove_abandoned(target.parent)
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


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a UTF-8 file.

    Raises:
        OSError: no such file.
        ValueError: it is not UTF-8.
    """
    data = Path(path).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all (see `replacing`).

    Raises:
        OSError: naming `path`.
    """
    with naming(path), replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an OSError of the block name `path`, where it named a temporary file, as a rule, or none (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's own sentence
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


# A process holds a lock on the file that it writes. The system lets go of it however the process ends, which no process
# number tells: numbers are given again, and mean others in another container. The name says the host all the same,
# since on some network file systems locks are known to one host alone.
def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _begun(target: Path) -> tuple[Path, BinaryIO]:
    """Open a new file beside `target`, and take its lock if there are locks."""
    while True:
        path = target.with_name(f".{target.name}.{_host()}-{secrets.token_hex(4)}.part")
        file = open(path, "xb")  # noqa: SIM115 (a `with` would let a failing close hide the first error)
        if sys.platform == "win32":  # where nothing is taken for abandoned
            return path, file
        take_lock(file, wait=True)
        if path.exists():  # not taken for abandoned between the two lines above
            return path, file
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files of this host in a folder that no process holds."""
    if sys.platform == "win32":
        return
    ours = re.compile(rf"\..+\.{_host()}-[0-9a-f]{{8}}\.part", re.DOTALL)
    with contextlib.suppress(OSError):  # no such folder, or one that may not be listed
        for path in folder.iterdir():
            if ours.fullmatch(path.name):
                with contextlib.suppress(OSError, ValueError), open_lock(path) as file:
                    if take_lock(file) is Lock.OURS:
                        path.unlink()


def open_lock(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open the file at `path` to be locked, and make it where there is none; nothing of it is changed.

    What lies there may have been laid by others, and a lock's holder writes into it. So no symbolic link is followed,
    and what is no file, or one of several names, is not taken.

    Raises:
        ValueError: a link, or no file.
        OSError: it cannot be opened or made.
    """
    path = Path(path)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, and a lock is a file of its own: remove it")
    flags = os.O_RDWR | os.O_CREAT  # not O_TRUNC: it may be the holder's, or not a lock at all
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # of one system or the other
        flags |= getattr(os, name, 0)
    file = open(os.open(path, flags, 0o644), "r+b", buffering=0)  # noqa: SIM115
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: its holder removed it just now
        return file
    file.close()
    what = f"is a file of {status.st_nlink} names" if stat.S_ISREG(status.st_mode) else "is no file"
    raise ValueError(f"{path} {what}, and a lock is a file of its own: remove it")


class Lock(enum.Enum):
    """What came of asking for a file's lock: this process has it, another one has, or the file system has no locks."""

    OURS = enum.auto()
    OTHERS = enum.auto()
    NONE = enum.auto()


def take_lock(file: IO[bytes], wait: bool = False) -> Lock:
    """Ask for the lock of an open file, which ends with the file's last descriptor; `wait` for it, not on Windows."""
    try:
        if sys.platform == "win32":
            file.seek(FAR)
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            finally:
                file.seek(0)
        else:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Linux and macOS say the one, Windows the other
        return Lock.OTHERS
    except OSError:
        return Lock.NONE
    return Lock.OURS
