"""Where keys of few bits lose the rows that matter: other head sizes, key norms, outliers, far positions, hard keys.

``python -m benchmarks.lowbit`` from the repository root writes ``benchmarks/results/lowbit.json``. Captured keys are
those of the built-in traces `prose` (SmolLM2, D = 64) and, with `--trace long`, Gemma's (D = 256, key norms).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import records
from benchmarks.records import RESULTS
from sparseattn import KVCache, LowBit, Quest, Selector
from sparseattn.cli.inputs import open_trace
from sparseattn.core.rope import Rope
from sparseattn.cost_model.environment import machine, versions
from sparseattn.kernels.encode_keys.dispatch import encode
from sparseattn.kernels.encode_keys.reference import quantise
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.quantized_keys.packing import pack
from sparseattn.selectors.base import vote
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace

NAME = "lowbit.json"
ROWS = 64  # of a group
FAR = 1_000_000  # positions that keys are moved by
METHODS: dict[str, Callable[[], Selector]] = {
    "lowbit": LowBit,
    "lowbit:bits=1": lambda: LowBit(1),
    "quest:group=softmax": lambda: Quest(group="softmax"),
}


class Problem:
    """Keys `[H,N,D]` and queries `[H,G,n,D]` behind them."""

    def __init__(
        self, name: str, keys: Tensor, queries: Tensor, values: Tensor | None = None, rope: Rope | None = None
    ) -> None:
        """With `values` `[H,N,D]` attention on keys of few bits is tried; with a `rope` keys as they were before it."""
        self.name, self.keys, self.queries = name, keys.float(), queries.float()
        self.values, self.rope = values, rope

    def result(self, budget: int) -> dict[str, Any]:
        """Of each method the recovered share of the weight, and of low bits how far logits are off."""
        heads, rows, size = self.keys.shape
        logits = self.queries @ self.keys[:, None].mT / size**0.5  # [H,G,n,N]
        weights = logits.softmax(-1)
        voted = weights.sum(1)  # [H,n,N]
        best = voted.topk(min(budget, rows)).values.sum(-1) / self.queries.shape[1]  # [H,n]
        out: dict[str, Any] = {"keys": self.name, "heads": heads, "rows": rows, "size": size}
        out["order"] = float(best.mean())
        out["methods"] = {name: self._recovered(make(), voted, budget) for name, make in METHODS.items()}
        if self.rope is not None:
            out["methods"]["lowbit before RoPE"] = self._before(self.rope, LowBit(), voted, budget)
        if self.values is not None:
            out["attention"] = {str(bits): self._attention(self.values, bits) for bits in (2, 4, 8)}
        out["errors"] = {str(bits): self._errors(LowBit(bits), logits) for bits in (1, 2, 4)}
        return out

    def _recovered(self, selector: Selector, voted: Tensor, budget: int) -> dict[str, float]:
        cache = KVCache(selector, sink=0, window=0, seal=selector.unit, check=True)
        cache.append(self.keys[None], self.keys[None])
        held = []
        for at in range(self.queries.shape[2]):
            mask = cache.select(self.queries[None, :, :, at], budget).mask(self.keys.shape[1])[0]
            held.append((voted[:, at] * mask).sum(-1) / self.queries.shape[1])
        share = torch.stack(held, -1)  # [H,n]
        return {"mean": float(share.mean()), "worst": float(share.mean(-1).min())}

    def _before(self, rope: Rope, selector: LowBit, voted: Tensor, budget: int) -> dict[str, float]:
        """As `_recovered`, with keys rounded before RoPE and turned afterwards."""
        place = torch.arange(self.keys.shape[1])
        kept = rope.rotate(_rounded(selector, rope.unrotate(self.keys, place)), place)
        logits = self.queries @ kept[:, None].mT / self.keys.shape[-1] ** 0.5
        rows = vote(logits.movedim(2, 0), "softmax").topk(budget).indices  # [n,H,S]
        share = voted.movedim(1, 0).gather(2, rows).sum(-1) / self.queries.shape[1]  # [n,H]
        return {"mean": float(share.mean()), "worst": float(share.mean(0).min())}

    def _attention(self, values: Tensor, bits: int) -> float:
        """Error of full attention's output, relative to its length, where keys themselves are read in so many bits."""
        size = self.keys.shape[-1]
        codes, low, step = quantise(self.keys[None], ROWS, bits, "bins", torch.bfloat16)
        parts = codes.unflatten(2, (-1, ROWS)).float() * step.float()[:, :, :, None] + low.float()[:, :, :, None]
        out, exact = (
            (self.queries @ keys[:, None].mT / size**0.5).softmax(-1) @ values[:, None]
            for keys in (parts.flatten(2, 3)[0], self.keys)
        )
        return float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())

    def _errors(self, selector: LowBit, exact: Tensor) -> dict[str, float]:
        """Logits' error: root mean square, in standard deviations of the logits, and the largest share of the bound;
        by torch, and as the CPU's kernel has them, which rounds the query to 8 bits."""
        size, last, bits = self.keys.shape[-1], (1 << selector.bits) - 1, selector.bits
        index = encode(self.keys[None], selector.rows, bits, selector.levels, torch.bfloat16)
        index = replace(index, valid=torch.ones(1, self.keys.shape[1], dtype=torch.bool))
        stretch = self.queries.abs()[..., None, :] * index.step[0, :, None, None].float()  # [H,G,n,N/rows,D]
        bounds = {"torch": stretch.sum(-1) / (2 * size**0.5)}
        bounds["numba"] = bounds["torch"] + last * size**0.5 / 508 * stretch.amax(-1)
        found: dict[str, float] = {}
        for impl, bound in bounds.items():
            got = quantized_keys.logits(self.queries.flatten(1, 2)[None], index, impl)
            error = got.view_as(exact) - exact
            found[f"rms.{impl}"] = float(error.square().mean().sqrt() / exact.std(-1).mean())
            if selector.levels == "bins":
                slack = 1e-5 * exact.abs().max()  # of sums in float32: a group of equal keys has no step
                share = (error.abs() - slack) / bound.repeat_interleave(selector.rows, -1).clamp(min=1e-9)
                found[f"of_bound.{impl}"] = float(share.max())
        return found


def _rounded(selector: LowBit, keys: Tensor) -> Tensor:
    """Keys `[H,N,D]` as the selector keeps them."""
    codes, low, step = quantise(keys[None], selector.rows, selector.bits, selector.levels, torch.bfloat16)
    return QuantizedKeys(pack(codes, selector.rows, selector.bits), low, step, selector.bits).decoded()[0]


def drawn(size: int, rows: int, heads: int, group: int, queries: int) -> Iterable[Problem]:
    """Keys that nobody captured."""
    draw = torch.Generator().manual_seed(size)
    keys = torch.randn(heads, rows, size, generator=draw)
    asked = 2 * torch.randn(heads, group, queries, size, generator=draw)
    yield Problem(f"Gaussian, D = {size}", keys, asked)
    layer = synthetic(rows, heads, group, size, rope=True, queries=queries).layer(0)
    keys, asked = layer.keys, layer.query
    yield Problem(f"synthetic, D = {size}", keys, asked)
    normed = keys / keys.square().mean(-1, keepdim=True).sqrt()
    yield Problem(f"synthetic with key norm, D = {size}", normed, asked * float(keys.std()))


def hardened(keys: Tensor, queries: Tensor) -> Iterable[Problem]:
    """Captured keys with what breaks ranges: large means, drifting means, equal keys, one huge number a group."""
    size, rows = keys.shape[-1], keys.shape[1]
    offset = torch.zeros(size)
    offset[[1, size // 2]] = 20 * keys.std()
    yield Problem("two channels with a large mean", keys + offset, queries)
    drift = torch.arange(rows)[:, None] / rows * offset
    yield Problem("two channels whose mean drifts", keys + drift, queries)
    equal = keys.clone()
    equal[:, rows // 2 : rows // 2 + 256] = equal[:, rows // 2 : rows // 2 + 1]
    yield Problem("256 equal keys in a row", equal, queries)
    huge = keys.clone()
    huge[:, ::64, 3] = 1000 * keys.std()
    quiet = queries.clone()
    quiet[..., 3] *= 1e-3  # or the huge rows were all there is to find
    yield Problem("a number of 1,000 deviations in every group, seldom asked for", huge, quiet)
    yield Problem("the same, asked for like any other", huge, queries)


def captured(trace: Trace, layer: int, queries: int) -> Iterable[Problem]:
    """A layer of a trace as it is, before RoPE, and with every position moved far out."""
    seen = trace.layer(layer)
    keys, asked = seen.keys.float(), seen.query[:, :, -queries:].float() * (seen.scale * seen.keys.shape[-1] ** 0.5)
    rows = (keys.shape[1] - queries) // 64 * 64
    name = f"{trace.name}, layer {layer}"
    yield Problem(name, keys[:, :rows], asked, seen.values[:, :rows].float(), seen.rope)
    if seen.rope is not None:
        yield Problem(f"{name}, a million positions on", *moved(seen.rope, keys, asked, FAR, rows))
    yield from hardened(keys[:, :rows], asked)


def moved(rope: Rope, keys: Tensor, queries: Tensor, by: int, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and queries turned on by `by` positions: their products stay as they were."""
    place = torch.full((1,), by)
    return rope.rotate(keys[:, :rows], place), rope.rotate(queries, place)


def table(record: Any) -> Iterable[Table]:
    out = Table("keys", "true order", *(f"{name}, of it" for name in METHODS), "rms error, 2 bits", "largest of bound")
    for one in record["problems"]:
        shares = (f"{one['methods'][name]['mean'] / one['order']:.2f}" for name in METHODS)
        error = one["errors"]["2"]
        errors = f"{error['rms.numba']:.3f}", f"{error['of_bound.numba']:.2f}"
        out.add_row(one["keys"], f"{one['order']:.2f}", *shares, *errors)
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.lowbit", description="Where keys of few bits fail.")
    out.add_argument("--trace", action="append", help="captured keys; default prose; may be repeated")
    out.add_argument("--layers", type=int, default=3, help="layers of a trace, spread over those it holds")
    out.add_argument("--rows", type=int, default=8192, help="keys that are drawn")
    out.add_argument("--sizes", default="64,80,128,256", help="head sizes that are drawn")
    out.add_argument("--queries", type=int, default=16)
    out.add_argument("--budget", type=int, default=256)
    out.add_argument("--json", action="store_true", help="the record on standard output")
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    for name, least in {"layers": 1, "rows": 512, "queries": 1, "budget": 16}.items():
        if getattr(options, name) < least:
            command.error(f"--{name} is {least} or more, got {getattr(options, name)}")
    if options.rows % ROWS:
        command.error(f"--rows is a multiple of a group's {ROWS}, got {options.rows}")
    try:
        sizes = [int(text) for text in options.sizes.split(",")]
    except ValueError:
        command.error(f"--sizes are head sizes such as 64,128, got {options.sizes!r}")
    problems: list[dict[str, Any]] = []
    for name in options.trace or ["prose"]:
        trace = open_trace(name, lambda *_: None)
        held = list(trace.shapes)
        chosen = held[:: max(len(held) // options.layers, 1)][: options.layers]
        for layer in chosen:
            problems += [problem.result(options.budget) for problem in captured(trace, layer, options.queries)]
    for size in sizes:
        problems += [problem.result(options.budget) for problem in drawn(size, options.rows, 2, 4, options.queries)]
    record = {"question": "where keys of few bits fail", "budget": options.budget, "queries": options.queries}
    record |= {"problems": problems, "versions": versions(), "machine": machine()}
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / NAME
    records.save(record, path)
    records.show(record, table, f"record: {path}", options.json)


if __name__ == "__main__":
    main()
