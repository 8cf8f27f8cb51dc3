"""Runs a server as a child, tells it to stop when told so, and leaves no process of it behind.

    python -IS supervise.py HOST PORT DRAIN COMMAND...

vLLM alone does not do that. While it starts, a SIGTERM may be lost, or its engine outlives it by up to half a
minute. Once it is up it ends well if it is given time (`--shutdown-timeout`).

It is run by path and needs the standard library alone, as it stays as long as the server and should weigh nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time

TEARDOWN = 8.0  # seconds beyond the requests' own that a server may take to end; 6 were seen, on two busy cores
LINGER = 2.0  # seconds that what it leaves may take to end
TRACKER = b"multiprocessing.resource_tracker"  # of Python; killed with the rest it left 168 MB in /dev/shm
AGAIN = 1.0  # seconds after which a second signal is one: `timeout` and some shells send the first twice
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(host: str, port: int, drain: float, command: list[str]) -> int:
    """Run `command` to its end, or until told to stop: its exit status, 128 and the signal's number for a signal.

    A server that ends untold has failed. vLLM's says 0 when its engine dies, and what starts servers again on failure
    would not; so that status is 1 here.

    A first signal of `STOPS` lets requests under way end within `drain` seconds. A second one ends everything at once.
    While the server starts, and so does not listen yet, the first one already stops all of its processes.
    """
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (*STOPS, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: None)
    _control(PR_SET_CHILD_SUBREAPER, 1)  # what the server leaves is then ours to wait for
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_ends_with_this)
    stopped_by, since, deadline = 0, 0.0, math.inf
    while child.poll() is None:
        select.select([wake], [], [], None if stopped_by == 0 else max(deadline - time.monotonic(), 0))
        stops, now = _stops(wake), time.monotonic()
        if stops and not stopped_by:
            stopped_by, since = stops[0], now
            if _listens(host, port):
                child.send_signal(signal.SIGTERM)
                deadline = now + drain + TEARDOWN
            else:
                _signal(child.pid, signal.SIGTERM)
                deadline = now + LINGER
        elif now >= deadline or (stops and now >= since + AGAIN):
            _kill(child.pid)
            child.wait()
    _clear(child.pid)
    if child.returncode == 0 and not stopped_by and "--help" not in command:
        print("sparseattn: the server ended without being told to; its log says why", file=sys.stderr)
        return 1
    return child.returncode if child.returncode >= 0 else 128 + (stopped_by or -child.returncode)


def _stops(wake: int) -> list[int]:
    """Return the signals to stop that came since the last call."""
    with contextlib.suppress(BlockingIOError):
        return [number for number in os.read(wake, 64) if number in STOPS]
    return []


def _listens(host: str, port: int) -> bool:
    """Whether the server is up: it listens from the end of its start."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _clear(group: int) -> None:
    """Give what the server left of its processes time to end, kill what stays, and at last what was spared."""
    for kill in (None, _kill, lambda group: _signal(group, signal.SIGKILL)):
        if kill is not None:
            kill(group)
        end = time.monotonic() + LINGER
        while time.monotonic() < end:
            if not _signal(group, 0):
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)
            time.sleep(0.05)


def _kill(group: int) -> None:
    """Kills a process group, but for those that give its shared memory back once the others are gone."""
    if sys.platform != "linux":
        _signal(group, signal.SIGKILL)
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(name)) == group:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    spared = TRACKER in file.read()
                if not spared:
                    os.kill(int(name), signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Signals a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: it holds ended processes only
        return False
    return True


def _ends_with_this() -> None:
    """In the child: a SIGTERM comes when this process ends, however it does."""
    _control(PR_SET_PDEATHSIG, signal.SIGTERM)


def _control(option: int, value: int) -> None:
    """Linux's prctl; other systems have nothing like it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
