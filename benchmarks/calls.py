"""Count what a decode step crosses: Python calls, the files they are of, and how often the file changes between calls.

The steps are one `decode`, and one token decoded by a model of one layer with a `SparseCache`, both in their steady
state: everything is compiled, and nothing is sealed. Functions of this package count, not those of torch and
transformers.

    python -m benchmarks.calls
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch

import sparseattn
from sparseattn import KVCache, decode, make_selector
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.sparse_cache import SparseCache

PACKAGE = str(Path(sparseattn.__file__).parent)
HEADS, GROUP, HEAD_DIM, ROWS, BUDGET = 2, 4, 64, 4096, 256
WARM = 3  # steps before the one that counts


@dataclass(frozen=True)
class Calls:
    """What ran of the package.

    Args:
        calls: calls of Python functions.
        moves: how often a call is of another file than the call before it.
        files: calls by file, most first.
    """

    calls: int
    moves: int
    files: dict[str, int]


def calls_of(step: Callable[[], Any]) -> Calls:
    """Return what one call of `step` runs of the package."""
    files: Counter[str] = Counter()
    moves, last = 0, ""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves, last
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            files[file] += 1
            moves += last not in ("", file)
            last = file

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(before)
    named = {Path(file).relative_to(PACKAGE).as_posix(): count for file, count in files.most_common()}
    return Calls(sum(named.values()), moves, named)


def decode_step(selector: str) -> Callable[[], Any]:
    """Return a step of `decode` over random rows, of which those before the window are sealed."""
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, HEADS, ROWS, HEAD_DIM, generator=draw)
    query = torch.randn(1, HEADS, GROUP, HEAD_DIM, generator=draw)
    cache = KVCache(make_selector(selector))
    cache.append(keys, values)
    return lambda: decode(query, cache, BUDGET)


def model_step(selector: str, layers: int) -> Callable[[], Any]:
    """Return a decoded token of a Llama of random weights with a `SparseCache` that holds a prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HEADS * GROUP * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        max_position_embeddings=2 * ROWS,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    arguments = {"use_cache": True, "logits_to_keep": 1, **cache_argument(SparseCache(model, selector, BUDGET))}
    model(torch.arange(ROWS)[None] % 256, **arguments)
    return lambda: model(torch.tensor([[1]]), **arguments)


def measured(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Return calls, files and moves of a step, and the median of the microseconds that `steps` more take."""
    for _ in range(WARM):
        step()
    counts = calls_of(step)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {
        "calls": counts.calls,
        "files": len(counts.files),
        "moves": counts.moves,
        "microseconds": round(1e6 * median(seconds), 1),
        "calls_by_file": counts.files,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print both steps."""
    parser = argparse.ArgumentParser(prog="benchmarks.calls", description=__doc__.partition("\n")[0])
    parser.add_argument("--selector", default="quest")
    parser.add_argument("--layers", type=int, default=1, help="of the model")
    parser.add_argument("--steps", type=int, default=200, help="that are timed; at most 900, before the next seal")
    parser.add_argument("--files", action="store_true", help="print the calls of every file too")
    parser.add_argument("--json", action="store_true", help="print the record, on one line")
    options = parser.parse_args(arguments)
    if not 1 <= options.steps <= 900:
        raise ValueError(f"1 to 900 steps are timed, got {options.steps}")
    with torch.inference_mode():
        record = {
            "decode": measured(decode_step(options.selector), options.steps),
            "model": measured(model_step(options.selector, options.layers), options.steps),
        }
    record["settings"] = {"selector": options.selector, "layers": options.layers, "threads": torch.get_num_threads()}
    if options.json:
        print(json.dumps(record))
        return
    print(f"{'step':8}{'calls':>8}{'files':>8}{'moves':>8}{'us':>10}")
    for name in ("decode", "model"):
        step = record[name]
        print(f"{name:8}{step['calls']:8}{step['files']:8}{step['moves']:8}{step['microseconds']:10}")
        for file, count in step["calls_by_file"].items() if options.files else ():
            print(f"{count:16} {file}")


if __name__ == "__main__":
    main()
