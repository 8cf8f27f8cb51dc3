"""A lock keeps a second process out, says who holds it, and ends with its process however that ends."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from sparseattn import files, locks
from sparseattn.locks import locked

HOLD = """
import sys
from sparseattn.locks import locked
with locked(sys.argv[1], "the folder"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_kept_out_until_the_holder_ends_even_killed(tmp_path: Path) -> None:
    path = tmp_path / "eval.lock"
    arguments = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        sentence = (
            f"the folder is in use by process {holder.pid} on {socket.gethostname()} since 20.*: wait until it ends"
        )
        with pytest.raises(ValueError, match=sentence), locked(path, "the folder"):
            pass
        assert path.exists(), "who was kept out leaves the holder's file alone"
        holder.kill()
    assert path.exists(), "a killed process cleans nothing up"
    with locked(path, "the folder"):
        assert str(os.getpid()) in path.read_text()
    assert not path.exists()


def test_a_lock_ends_with_its_block_and_with_an_error_in_it(tmp_path: Path) -> None:
    path = tmp_path / "eval.lock"
    with pytest.raises(KeyError), locked(path, "it"):
        raise KeyError
    with locked(path, "it"):
        path.write_text("[" * 100_000)
        with pytest.raises(ValueError, match="it is in use by another process: wait until it ends"), locked(path, "it"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_removed_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "eval.lock"
    real, calls = locks.take_lock, []

    def late(file: IO[bytes]) -> files.Lock:
        if not calls:
            path.unlink()  # as the holder does when it ends, between our opening and locking the file
        calls.append(file)
        return real(file)

    monkeypatch.setattr(locks, "take_lock", late)
    with locked(path, "it"):
        monkeypatch.undo()
        assert len(calls) == 2
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"), locked(path, "it"):
            pass


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_used(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*asked: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", none)
    path, done = tmp_path / "eval.lock", []
    sentence = "nothing keeps the folder for one process, .* no locks: two runs there at once would write every record"
    with pytest.warns(UserWarning, match=sentence) as said, locked(path, "the folder"):
        done.append(path.read_text())
    assert said[0].filename == __file__
    assert str(os.getpid()) in done[0]
    files.write_atomic(tmp_path / "x", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "eval.lock"
    with pytest.raises(OSError, match="No such file or directory") as error, locked(path, "it"):
        pass
    assert error.value.filename == str(path)
