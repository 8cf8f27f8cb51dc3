"""A server of `sparseattn serve`, vLLM itself with the plug-in: it answers, and ends with nothing left."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparseattn.models.packaged import PACKAGED

ROOT = Path(__file__).parent.parent.parent
TOKENS = 200
LONG = "The capital of France is Paris. " * 60  # is decoded sparsely


class Served:
    """A server of SmolLM2 at float32, sparse in sequences of more than 64 rows, on its way up.

    Args:
        folder: of its log, and where it runs.
        port: where it is to listen.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.url, self.log = folder, port, f"http://127.0.0.1:{port}", folder / "log"
        self.start()

    def start(self) -> None:
        """Start it, or start it again once it has ended."""
        given = ["--selector", "quest:page=16", "--budget", "32", "--above", "64", "--dtype", "float32"]
        given += ["--max-model-len", "1024", "--kv-cache-gib", "0.5", "--port", str(self.port), "--drain", "60"]
        command = [sys.executable, "-m", "sparseattn", "serve", "smollm2", *given, "--", "--enforce-eager"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=self.folder)

    def wait_until_up(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.said()
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except urllib.error.URLError:
                time.sleep(0.5)
        pytest.fail(f"not up after {seconds} s: {self.said()}")

    def said(self) -> str:
        return self.log.read_text() if self.log.is_file() else "its log was not kept"

    def complete(self, prompt: str, tokens: int) -> dict:
        asked = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def members(self) -> list[int]:
        """Its processes: those of the session that the server leads, a child of the command's."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    words = (folder / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                found[int(folder.name)] = (int(words[1]), int(words[3]))
        leaders = [pid for pid, (parent, session) in found.items() if parent == self.process.pid and session == pid]
        return [pid for pid, (_, session) in found.items() if session in leaders]

    def check_killed(self, name: str) -> None:
        """Kill one of its processes: the others end within seconds, and nothing is left."""
        members = self.members()
        memory = shared(members)
        command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in members}
        (target,) = {
            "worker": [pid for pid, line in command_lines.items() if b"Worker" in line],
            "engine": [pid for pid, line in command_lines.items() if b"EngineCore" in line],
            "server": [pid for pid in members if os.getsid(pid) == pid],
            "command": [self.process.pid],
        }[name]
        os.kill(target, signal.SIGKILL)
        assert self.process.wait(60) != 0
        end = time.monotonic() + 30
        while left(members, memory) and time.monotonic() < end:  # of a killed command, the server ends by itself
            time.sleep(0.2)
        assert not left(members, memory)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    if not PACKAGED["smollm2"].cached:
        pytest.skip("smollm2 is not cached: `sparseattn models --fetch smollm2` brings it")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = Served(tmp_path, port)
    try:
        yield server
    finally:
        server.process.kill()  # the server follows it
        server.process.wait()


@pytest.mark.slow
def test_a_server_answers_what_it_was_asked_before_it_was_told_to_stop_and_leaves_nothing(served: Served) -> None:
    served.wait_until_up(300)
    assert served.complete("The capital of France is", 2)["choices"][0]["text"] == " Paris."
    members = served.members()
    memory = shared(members)
    assert len(members) >= 3, "the server, its engine and its worker"
    assert memory
    answers = []
    asking = threading.Thread(target=lambda: answers.append(served.complete("Once upon a time", TOKENS)))
    asking.start()
    time.sleep(1)
    assert not answers, "it is still under way"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0, served.log.read_text()
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == TOKENS
    assert not left(members, memory)


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_while_it_starts_leaves_nothing(served: Served) -> None:
    end = time.monotonic() + 200
    while "Initializing a V1 LLM engine" not in served.log.read_text():  # the engine's process has begun
        assert time.monotonic() < end, served.log.read_text()
        time.sleep(0.2)
    members = served.members()
    memory = shared(members)
    assert len(members) >= 2
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) != 0, "it never served"
    assert not left(members, memory)


@pytest.mark.slow
def test_a_server_whose_process_was_killed_answers_as_before_once_it_is_started_again(served: Served) -> None:
    """At the same port: its worker, which holds the weights and the cache, and the engine, a process each."""
    served.wait_until_up(300)
    answer = served.complete(LONG, 12)
    assert answer["usage"]["sparseattn"]["sparse_tokens"] == 11
    for killed in ("worker", "engine"):
        served.check_killed(killed)
        served.start()
        served.wait_until_up(300)
        again = served.complete(LONG, 12)
        assert again["choices"] == answer["choices"]
        assert again["usage"] == answer["usage"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["server", "command"])
def test_a_process_that_is_killed_takes_the_others_with_it(served: Served, killed: str) -> None:
    """So that what restarts it, such as systemd or Docker, sees it end, and finds its port and memory free."""
    served.wait_until_up(300)
    assert served.complete(LONG, 12)["usage"]["sparseattn"]["sparse_tokens"] == 11
    served.check_killed(killed)


@pytest.mark.slow
def test_a_log_that_cannot_grow_any_more_stops_no_server(served: Served) -> None:
    """As on a full disk: from here on no process of the server may write behind what a file holds."""
    served.wait_until_up(300)
    size = served.log.stat().st_size
    for pid in served.members():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
    for _ in range(2):
        assert served.complete("The capital of France is", 2)["choices"][0]["text"] == " Paris."
    served.process.terminate()
    assert served.process.wait(120) == 0
    assert served.log.stat().st_size == size


def left(members: list[int], shared: set[Path]) -> list[object]:
    """Which of the processes still do anything, and which of the shared memory is still there."""
    living: list[object] = []
    for pid in members:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.append(pid)
    return living + [path for path in shared if path.exists()]


def shared(members: list[int]) -> set[Path]:
    """The shared memory that processes have mapped."""
    found: set[Path] = set()
    for pid in members:
        words = Path(f"/proc/{pid}/maps").read_text().split()
        found |= {Path(word) for word in words if word.startswith("/dev/shm/psm_")}
    return found
