"""A lock keeps a second process out, says who holds it, and ends with its process however that ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparseattn import locks
from sparseattn.locks import locked

HOLD = """
import runpy, sys
locked = runpy.run_path(sys.argv[1])["locked"]  # without torch, which takes seconds to import
with locked(sys.argv[2], "the folder"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_kept_out_until_the_holder_ends_even_killed(tmp_path: Path) -> None:
    path = tmp_path / "eval.lock"
    arguments = [sys.executable, "-c", HOLD, locks.__file__, str(path)]
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
    lock, calls = locks._lock, []

    def late(file: locks.File) -> bool:
        if not calls:
            path.unlink()  # as the holder does when it ends, between our opening and locking the file
        calls.append(file)
        return lock(file)

    monkeypatch.setattr(locks, "_lock", late)
    with locked(path, "it"):
        monkeypatch.undo()
        assert len(calls) == 2
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"), locked(path, "it"):
            pass


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "eval.lock"
    with pytest.raises(OSError, match="No such file or directory") as error, locked(path, "it"):
        pass
    assert error.value.filename == str(path)
