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

from sparseattn.utils import files, locks
from sparseattn.utils.locks import locked
from tests.command import run

HOLD = """
import sys
from sparseattn.utils.locks import locked
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
    sentence = "nothing keeps the folder for one process, .* no locks: two runs there at once would spoil each other's"
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


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="Windows looks for a link and then opens the file")
@pytest.mark.parametrize("seen", [True, False], ids=["a link", "a link that comes after the look"])
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool, there: bool) -> None:
    victim, path = tmp_path / "victim", tmp_path / "eval.lock"
    if there:
        victim.write_bytes(b"dear")
    path.symlink_to(victim)
    if not seen:
        monkeypatch.setattr(Path, "is_symlink", lambda self: False)
    said = "eval.lock is a symbolic link, and a lock is a file of its own: remove it" if seen else "eval.lock"
    with pytest.raises(ValueError if seen else OSError, match=said), locked(path, "it"):
        pass
    assert path.readlink() == victim
    assert victim.exists() == there
    assert not there or victim.read_bytes() == b"dear"


def test_a_file_of_two_names_is_not_written(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "eval.lock"
    victim.write_bytes(b"dear")
    os.link(victim, path)
    with pytest.raises(ValueError, match=r"eval\.lock is a file of 2 names, and a lock is a file of its own"):
        locked(path, "it").__enter__()
    assert victim.read_bytes() == path.read_bytes() == b"dear"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_pipe_is_no_lock_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "eval.lock")
    with pytest.raises(ValueError, match=r"eval\.lock is no file, and a lock is a file of its own: remove it"):
        locked(tmp_path / "eval.lock", "it").__enter__()


def test_a_link_that_is_laid_within_the_block_is_left_alone(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "eval.lock"
    victim.write_bytes(b"dear")
    with locked(path, "it"):
        path.unlink()
        path.symlink_to(victim)
    assert path.is_symlink()
    assert victim.read_bytes() == b"dear"


def test_eval_does_not_write_where_its_lock_leads(tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_bytes(b"dear")
    out.mkdir()
    (out / "eval.lock").symlink_to(victim)
    done = run("eval", "--model", "reference", "--lengths", "300", "--out", out)
    assert done.exit_code == 2, done.output
    assert "eval.lock is a symbolic link" in " ".join(done.stderr.split())
    assert victim.read_bytes() == b"dear"


def test_what_a_killed_run_left_is_looked_for_without_following_links(tmp_path: Path) -> None:
    victim, left = tmp_path / "victim", tmp_path / f".x.{files._host()}-{0:08x}.part"
    victim.write_bytes(b"dear")
    left.symlink_to(victim)
    files.write_atomic(tmp_path / "y", b"new")
    assert left.is_symlink(), "it is nobody's unfinished file"
    assert victim.read_bytes() == b"dear"
