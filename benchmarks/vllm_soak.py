"""A server of `sparseattn serve` under mixed requests, beside stock vLLM under the same: what is left in memory, what
its counters say, and whether it answers as before.

``.venv-vllm/bin/python -m benchmarks.vllm_soak --out FILE`` from the repository root. 3,000 requests, 16 at a time, of
50 to 7,000 tokens: plain ones and streams, with budgets of their own and without, some given up by the client while
they are answered or before, and some that no server should take. Stock vLLM is asked the same without what only
sparseattn knows.

The model is a small random Llama: what is looked for is left behind by requests, and not by layers. Memory is the
proportional set size (PSS) of the server's processes, a pause after the last answer.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import records
from benchmarks.vllm_soak_clients import (
    KINDS,
    LONGEST,
    POSITIONS,
    SECONDS,
    SHORTEST,
    VOCABULARY,
    ask_all,
    made_requests,
)
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.serving.metrics import served_activity
from sparseattn.serving.vllm import installed
from sparseattn.serving.vllm.defaults import SELECTOR
from sparseattn.utils import children
from sparseattn.utils.devices import features

LAYERS = 2
TITLES = {"worker": b"VLLM::Worker", "engine": b"VLLM::EngineCore"}  # that vLLM gives to its processes
SPARSE = {"--budget": 256, "--above": 512, "--sink": 4, "--window": 64, "--dense-layers": 1}
EARLY, EVERY = 50, 500  # requests before memory is looked at first, and again
SAME = 16  # prompts that are asked one by one, before all others and again behind them
EXACT = 64  # requests behind the others; none of them is given up, so that the server's counters must be the clients'
SETTLE = 10  # seconds between the last answer and a look at memory


def answers(url: str) -> list[str]:
    """Return what the server says to the same prompts, one by one."""
    draw, said = random.Random(7), []
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        for number in range(SAME):
            ids = [draw.randrange(VOCABULARY) for _ in range(300 + 200 * number)]
            body = {"model": "soak", "prompt": ids, "temperature": 0, "ignore_eos": True, "max_tokens": 32}
            reply = client.post("/v1/completions", json=body)
            reply.raise_for_status()
            said.append(reply.json()["choices"][0]["text"])
    return said


def counted(url: str) -> dict[str, int]:
    """Return how many requests vLLM's own counters say have ended, by reason."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r'^vllm:request_success_total\{.*?finished_reason="(\w+)".*?\} ([0-9.e+]+)$', text, re.M)
    return {reason: int(float(value)) for reason, value in found if float(value)}


class Server:
    """A server of the soak's model in processes of its own.

    Args:
        folder: the model.
        stock: vLLM as it is.
        log: where it writes.

    Attributes:
        words: what it was started with, but for its port.
    """

    def __init__(self, folder: Path, stock: bool, log: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        given: dict[str, Any] = {"--selector": "none"} if stock else {"--selector": SELECTOR, **SPARSE}
        given |= {"--name": "soak", "--dtype": "float32", "--max-model-len": POSITIONS, "--kv-cache-gib": 0.25}
        words = [str(word) for pair in given.items() for word in pair]
        more = ["--", "--enforce-eager", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048"]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.words = [*words, *more]
        around = children.environment(dict(os.environ))
        around["PYTHONPATH"] = str(Path(__file__).parents[1])
        command = [sys.executable, "-m", "sparseattn", "serve", str(folder), "--port", str(port), *self.words]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=around)

    def wait_until_up(self, seconds: float = 600) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ends before, or does not come up in so many seconds.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/health", timeout=5).raise_for_status()
                return
            time.sleep(0.5)
        raise RuntimeError(f"the server does not come up: {self.log.read_text()[-3000:]}")

    def memory(self) -> dict[str, float]:
        """Return MiB (PSS) of its processes: the worker that computes, the engine that schedules, the others, all."""
        found = {"worker": 0.0, "engine": 0.0, "others": 0.0}
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        ours = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        for pid in ours:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                name = next((role for role, title in TITLES.items() if command.startswith(title)), "others")
                (kib,) = re.findall(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
                found[name] += int(kib) / 1024
        return {name: round(mib, 1) for name, mib in {**found, "all": sum(found.values())}.items()}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.log.read_text()[-3000:], file=sys.stderr)
        self.stop()

    def stop(self) -> int:
        """End it, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()  # what it started follows it
            return self.process.wait()


def write_model(folder: Path) -> None:
    """Write a random Llama with SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from sparseattn.models.load import load_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=POSITIONS,
        initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer("smollm2").save_pretrained(folder)


def soak(folder: Path, stock: bool, count: int, concurrency: int, say: Callable[[], None]) -> dict[str, Any]:
    """Return what one server did under the requests.

    Args:
        folder: the model.
        stock: vLLM as it is.
        count: of requests.
        concurrency: requests at a time.
        say: called behind each.
    """
    log = folder / f"{'stock' if stock else 'sparse'}.log"
    with Server(folder, stock, log) as server:
        server.wait_until_up()
        requests = list(made_requests(count, 0, stock, KINDS))
        before = answers(server.url)
        start = time.monotonic()
        seen, memory = [], []
        edges = [0, EARLY, *range(EVERY, count, EVERY), count]
        for begin, end in itertools.pairwise(edges):
            seen.append(asyncio.run(ask_all(server.url, requests[begin:end], concurrency, say)))
            time.sleep(SETTLE)
            memory.append({"requests": end, **server.memory()})
        seconds = time.monotonic() - start - SETTLE * len(memory)
        row = {
            "server": "stock" if stock else "sparseattn",
            "command": ["sparseattn", "serve", "FOLDER", *server.words],
            "seconds": round(seconds, 1),
            "kinds": dict(sum((one.kinds for one in seen), collections.Counter())),
            "failed": sum(len(one.wrong) for one in seen),
            "failures": [wrong for one in seen for wrong in one.wrong][:20],
            "memory_early_mib": memory[0],
            "memory_mib": memory[-1],
            "memory_steps_mib": memory,
            "ended": counted(server.url),
            "usage": dict(sum((one.usage for one in seen), collections.Counter())),
        }
        if not stock:
            row["counters"] = _exact(server.url, concurrency)
        row["answers"] = SAME
        row["answers_equal"] = sum(a == b for a, b in zip(before, answers(server.url), strict=True))
        row["errors_in_log"] = len(re.findall(r"^.*(?:ERROR|Traceback).*$", log.read_text(), re.M))
        row["exit_status"] = server.stop()
        return row


def _exact(url: str, concurrency: int) -> dict[str, int]:
    """Return what the server counted for requests of which none is given up, and what their clients saw.

    Raises:
        RuntimeError: one of them failed.
    """
    before = served_activity(url)
    kinds = {kind: share for kind, share in KINDS.items() if kind not in ("given_up", "left")}
    requests = list(made_requests(EXACT, 1, False, kinds))
    seen = asyncio.run(ask_all(url, requests, concurrency, lambda: None))
    if seen.wrong:
        raise RuntimeError(f"requests at the end failed: {seen.wrong}")
    time.sleep(1)
    counts = served_activity(url) - before
    return {
        "requests": EXACT,
        "rows_read": counts.rows_read,
        "rows_read_by_clients": seen.usage["rows_read"],
        "rows_held": counts.rows_held,
        "rows_held_by_clients": seen.usage["rows_held"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--out", type=Path, help="the record", required=True)
    options = parser.parse_args()
    if options.requests <= EARLY:
        parser.error(f"--requests is more than {EARLY}, after which memory is looked at, got {options.requests}")
    found = installed.distribution()
    assert found is not None
    with tempfile.TemporaryDirectory(prefix="soak-") as made, progress_bar() as bar:
        folder = Path(made)
        write_model(folder)
        rows = []
        for stock in (True, False):
            task = bar.add_task("stock vLLM" if stock else "sparseattn", total=options.requests)
            say = functools.partial(bar.advance, task)
            rows.append(soak(folder, stock, options.requests, options.concurrency, say))
    record = {
        "vllm": found[1],
        "dtype": "float32",
        "requests": options.requests,
        "concurrency": options.concurrency,
        "prompts": [SHORTEST, LONGEST],
        "servers": rows,
        "machine": machine(),
        "features": features(),
        "versions": versions(),
    }
    records.save(record, options.out)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
