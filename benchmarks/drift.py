"""How methods hold through a long answer: what they find, part by part of the tokens decoded behind a prompt.

``python -m benchmarks.drift TRACE --last 4096`` from the repository root writes ``benchmarks/results/drift.json``. The
trace's last tokens are decoded again. What a method learns it learns from the tokens before them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from benchmarks import records, replayed
from sparseattn.cli.inputs import open_trace
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.replay_settings import Replay, check_replay
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace

NAME = "drift.json"
SELECTORS = ("exact:group=softmax", "quest", "lowbit", "pq", "querypq:mean=plain", "querypq:ahead=0", "querypq")


def measured(trace: Trace, spec: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the recovered share of each part of the answer: means over layers, query heads and the part's tokens."""
    settings = replayed.settings(options) | {"every": options.every}
    found = evaluate(trace, make_selector(spec), options.budget, steps=["recovered"], **settings)
    parts = found.by_step("recovered").nanmean(0).split(options.part // options.every)
    return [
        {"selector": spec, "end": (i + 1) * options.part, "recovered": float(part.nanmean())}
        for i, part in enumerate(parts)
    ]


def table(record: Any) -> Iterable[Table]:
    ends = sorted({row["end"] for row in record["results"]})
    out = Table("recovered up to token", *(f"{end:,}" for end in ends))
    for spec in dict.fromkeys(row["selector"] for row in record["results"]):
        shares = {row["end"]: row["recovered"] for row in record["results"] if row["selector"] == spec}
        out.add_row(spec, *(f"{shares[end]:.2f}" for end in ends))
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.drift", description="What is found in a long answer.")
    out.add_argument("trace", help="captured keys and queries: a file, or a built-in trace by name")
    out.add_argument("--selector", action="append", help="repeat for more")
    out.add_argument("--budget", type=int, default=256)
    replayed.add_options(out, window=64, last=4096, words="tokens decoded behind the prompt")
    out.add_argument("--part", type=int, default=512, help="tokens that one mean is over, a divisor of --last")
    out.add_argument("--every", type=int, default=16, help="one of so many tokens is measured, a divisor of --part")
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    specs = options.selector or list(SELECTORS)
    try:
        trace = open_trace(options.trace, lambda *_: None)
        if options.part < 1 or options.last % options.part:
            raise ValueError(f"--part is a divisor of --last, got {options.part} of {options.last}")
        if options.every < 1 or options.part % options.every:
            raise ValueError(f"--every is a divisor of --part, got {options.every} of {options.part}")
        replay = Replay(**replayed.settings(options))
        for spec in specs:
            check_replay(trace, [options.budget], make_selector(spec), replay)
    except ValueError as error:
        command.error(str(error))
    record = {
        "question": "what methods find, part by part of a long answer",
        "trace": trace.name,
        "model": trace.meta.get("model"),
        "tokens": trace.tokens,
        "prompt": trace.tokens - options.last,
        **{name: getattr(options, name) for name in ("budget", *replayed.SETTINGS, "part", "every")},
        "layers": list(trace.layers),
        "versions": versions(),
        "machine": machine(),
        "results": [row for spec in specs for row in measured(trace, spec, options)],
    }
    records.end(record, NAME, table, options)


if __name__ == "__main__":
    main()
