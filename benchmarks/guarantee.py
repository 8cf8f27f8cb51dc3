"""How often vAttention misses its bound: the share of steps whose denominator is off by more than epsilon.

``python -m benchmarks.guarantee TRACE`` from the repository root writes ``benchmarks/results/guarantee.json``. A step
is a decoded token of a query head. The bound is of the softmax's denominator; the output's error stands beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from benchmarks import records
from sparseattn.cli.inputs import open_trace
from sparseattn.core.budget import budget_label, parse_budget
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.replay_settings import Replay, check_replay
from sparseattn.selectors.combined.vattention import VAttention
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace

NAME = "guarantee.json"
SETTINGS = (
    "vattention:epsilon=0.05",
    "vattention",
    "vattention:epsilon=0.2",
    "vattention:delta=0.05",
    "vattention:delta=0.2",
    "vattention:margin=0.0",
    "vattention:inner=lowbit",
    "vattention:inner=quest",
    "vattention@512",
)
MEASURED = ("denominator_error", "relative_error")


def measured(trace: Trace, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """One setting, `SPEC` or `SPEC@BUDGET`."""
    spec, _, cap = text.partition("@")
    selector, budget = made(spec), parse_budget(cap or "all")
    settings = {"sink": options.sink, "window": options.window, "last": options.last}
    found = evaluate(trace, selector, budget, steps=MEASURED, **settings)
    off, out = (found.steps[name] > selector.epsilon for name in MEASURED)  # [layers,H*G,T]
    return {
        "selector": spec,
        "epsilon": selector.epsilon,
        "delta": selector.delta,
        "budget": budget_label(budget),
        "missed": float(off.double().mean()),
        "missed_worst": float(off.double().mean(-1).max()),
        "missed_output": float(out.double().mean()),
        **{name: found.mean(name) for name in (*MEASURED, "kept", "bytes_share")},
        "layers": list(found.layers),
        "steps": off.numel(),
    }


def made(spec: str) -> VAttention:
    """ValueError for another selector."""
    selector = make_selector(spec)
    if not isinstance(selector, VAttention):
        raise ValueError(f"a bound is vattention's, got {spec}")
    return selector


def table(record: Any) -> Iterable[Table]:
    out = Table("setting", "budget", "delta", "missed", "worst head", "output missed", "rows", "bytes")
    for one in record["results"]:
        shares = (f"{one[name]:.1%}" for name in ("delta", "missed", "missed_worst", "missed_output"))
        out.add_row(one["selector"], one["budget"], *shares, f"{one['kept']:.0f}", f"{one['bytes_share']:.1%}")
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.guarantee", description="How often a bound is missed.")
    out.add_argument("trace", help="captured keys and queries: a file, or a built-in trace by name")
    out.add_argument("--selector", action="append", help="SPEC or SPEC@BUDGET; repeat for more")
    out.add_argument("--sink", type=int, default=4)
    out.add_argument("--window", type=int, default=64)
    out.add_argument("--last", type=int, default=32, help="tokens decoded")
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    asked = options.selector or list(SETTINGS)
    try:
        trace = open_trace(options.trace, lambda *_: None)
        replay = Replay(options.sink, options.window, options.last)
        for text in asked:
            spec, _, cap = text.partition("@")
            check_replay(trace, [parse_budget(cap or "all")], made(spec), replay)
    except ValueError as error:
        command.error(str(error))
    results = [measured(trace, text, options) for text in asked]
    record = {
        "question": "how often vAttention's denominator is off by more than epsilon",
        "trace": trace.name,
        "model": trace.meta.get("model"),
        "tokens": trace.tokens,
        **{name: getattr(options, name) for name in ("sink", "window", "last")},
        "layers": results[0]["layers"],
        "steps": results[0]["steps"],
        "versions": versions(),
        "machine": machine(),
        "results": [{name: one[name] for name in one if name not in ("layers", "steps")} for one in results],
    }
    records.end(record, NAME, table, options)


if __name__ == "__main__":
    main()
