"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place when the block ends; when the block raises, the old file stays.

    Nothing else is left in either case. Of a symbolic link, the file it leads to is replaced.

    Raises:
        OSError: the file cannot be made or its bytes cannot be kept; it may name the new file instead of `path`.
    """
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)  # a loop of symbolic links is an error here, where `realpath` returns it as it is
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    file = open(temporary, "xb")  # noqa: SIM115 (a `with` would let a failing close hide the first error)
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
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
