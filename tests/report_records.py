"""Records of every kind that `report` reads, small ones, and a trace with its text: what its tests look at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.evaluation.attention_stats import inspect_trace
from sparseattn.evaluation.by_head import at_bytes, at_rows
from sparseattn.evaluation.recall_sweep import Problem, curves
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.tasks.compared import FORCED, FULL
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace

CONTEXT = {"date": "2026-11-23", "versions": {"python": "3.11.7", "sparseattn": "0.1.0"}, "machine": {"cores": 2}}
METHODS = ("quest", "exact", "window")
TOKENS = 320
WORDS = ["the ", "caf", "", "é ", "read", "\n", "rows & <b>bold</b> ", "“quoted” "]


def trace(name: str = "tale") -> Trace:
    """Two layers of two KV heads of two query heads; its text has tokens that split a character, and tags."""
    made = synthetic(TOKENS, heads=2, group=2, size=32, layers=2, clusters=8)
    pieces = [WORDS[i % len(WORDS)] for i in range(TOKENS)]
    meta = {"model": "made up", "text": {"name": "tale.txt"}}
    return Trace.build([made.layer(0), made.layer(1)], made.positions, meta, name, pieces)


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({**one, **CONTEXT}) + "\n" for one in records))


def fill(folder: Path) -> None:
    """A folder for each command: bench, inspect, recall, eval."""
    told = trace()
    found = [
        evaluate(told, method, budget, sink=2, window=8, last=4)
        for method in METHODS
        for budget in ((16, 64) if method != "window" else (16,))
    ]
    write(folder / "bench" / "bench.jsonl", [{**one.record(per_head=True), "trace_meta": told.meta} for one in found])
    compared = [at_rows(found, 64), at_bytes(found, 0.5)]
    write(folder / "bench" / "by-layer.jsonl", [{**one.record(), "trace_meta": told.meta} for one in compared])
    needs = inspect_trace(told, sink=2, window=8, last=4).records()
    write(folder / "inspect" / "inspect.jsonl", [{**one, "trace_meta": told.meta} for one in needs])
    write(folder / "recall" / "recall.jsonl", _recall(told))
    write(folder / "eval" / "eval.jsonl", [*answers(), *agreement()])
    write(folder / "recommend" / "recommend.jsonl", recommended())


def _recall(told: Trace) -> list[dict[str, Any]]:
    tasks = {
        "queries to keys": [Problem.of(told.layer(0), told.positions, 8)],
        "keys to keys": [Problem.of(told.layer(0), told.positions, 8, held_out=True)],
    }
    made = []
    for label, spec in (("quest", "quest:page=1"), ("exact", "exact")):
        for task, curve in curves(make_selector(spec), tasks, k=10).items():
            facts = {"source": "tale", "direction": task, "label": label, "gap": None}
            made += [{**facts, **one} for one in curve.records()]
    return made


def recommended() -> list[dict[str, Any]]:
    """Two layers of two KV heads by two methods, the second of which is measured in one layer alone, and a plan."""
    rows = {"sink": 4, "window": 64, "windows": 2, "held_out": 3, "layers": [[0, 2, 2, 16], [1, 2, 2, 16]]}
    made: list[dict[str, Any]] = [{"record": "settings", "model": "made up", "length": 2048, **rows}]
    made.append({"record": "made", **CONTEXT})
    for window, layer, method in ((0, 0, "quest"), (1, 0, "quest"), (0, 1, "quest"), (1, 1, "quest"), (0, 0, "exact")):
        points = [
            {
                "budget": budget,
                "kl": (1 + window) / budget,
                "error_heads": [0.1, 0.3],
                "kl_heads": [0.5 / budget] * 2,
                "bytes_heads": [budget / 500] * 2,
            }
            for budget in (16, 64)
        ]
        made.append(
            {"record": "frontier", "number": window, "layer": layer, "method": method, "source": "0", "points": points}
        )
    for window in (0, 1):
        point = {"kl": 0.05, "kl_heads": [0.02] * 2, "error_heads": [0.4] * 2, "bytes_heads": [0.02] * 2}
        place = {"record": "frontier", "number": window, "layer": 0, "method": "window", "source": "0"}
        made.append({**place, "points": [point]})
    verified = {"windows": 3, "kl": {"mean": 0.0125}, "same_top": {"mean": 0.96}}
    cost = {"plan": 1e6, "full": 4e6, "unit": "bytes", "predicted": False}
    layers = {"0": "window", "1": [{"method": "quest", "budget": 64}, "dense"]}
    made.append({"record": "plan", "name": "made up-1%", "layers": layers, "cost": cost, "verified": verified})
    return made


def answers() -> list[dict[str, Any]]:
    """A pass key at three depths of two lengths: Quest loses it at the beginning."""
    made = []
    for method, budget, rows in ((FULL, None, 2000.0), ("quest", "64", 140.0), ("quest", "256", 330.0)):
        for length in (1024, 4096):
            for depth in (0.0, 0.5, 1.0):
                score = 0.0 if method == "quest" and budget == "64" and depth == 0 else 1.0
                facts = {"task": "passkey", "protocol": "question", "prompt": f"{length} {depth}", "length": length}
                facts |= {"depth": depth, "method": method, "budget": budget, "score": score, "rows": rows}
                made.append({**facts, "bytes_share": rows / 4096, "settings": {"model": "made up", "seal": None}})
    return made


def agreement() -> list[dict[str, Any]]:
    made = []
    for method, budget, rows, kl in (
        (FULL, None, 2048.0, 0.0),
        ("quest", "64", 140.0, 0.2),
        ("exact", "64", 130.0, 0.01),
    ):
        for window in range(3):
            facts = {"task": "agreement", "protocol": FORCED, "prompt": f"w{window}", "length": 2048, "text": "alice"}
            facts |= {"kind": "novel", "method": method, "budget": budget, "rows": rows, "bytes_share": rows / 2048}
            facts |= {"kl": kl * (1 + window / 9), "same_top": 1 - kl, "nll": 2.0, "nll_difference": kl / 2}
            made.append({**facts, "scored_tokens": 16, "settings": {"model": "made up", "seal": None}})
    return made
