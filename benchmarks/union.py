"""What is lost where each of W ranks takes the best of its own rows, beside the best of all, at equal rows read.

``python -m benchmarks.union`` from the repository root writes ``benchmarks/results/union.json``. Rows are dealt to
ranks as `KVCache(group=Ranks(group, "union"))` deals them. No rank sends anything before attention, so one process
plays all of them, one after another.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import records
from sparseattn import KVCache
from sparseattn.cache.ranks import Ranks
from sparseattn.cli.inputs import open_trace
from sparseattn.core.deal import Deal
from sparseattn.cost_model.environment import machine, versions
from sparseattn.selectors.registry import make_selector

NAME = "union.json"
SINK, WINDOW, SEAL = 4, 64, 1 << 20


class Played(Ranks):
    """A rank of `size` without the others: it chooses, and attends to nothing."""

    def __init__(self, rank: int, size: int, slack: float) -> None:
        self.group, self.share, self.slack = None, "union", slack
        self.rank, self.size, self.sent = rank, size, Counter()

    def require_device(self, device: torch.device) -> None:
        pass

    def require_same(self, what: Mapping[str, int], device: torch.device) -> None:
        pass


class Problem:
    """A layer of a trace: keys `[H,N,D]`, and the queries `[H,G,n,D]` of the last n of its tokens."""

    def __init__(self, keys: Tensor, queries: Tensor) -> None:
        """`queries`: on the scale of `1/sqrt(D)`."""
        self.keys, self.queries = keys.float(), queries.float()
        rows, asked = keys.shape[1], queries.shape[2]
        self.prompt = rows - asked
        logits = self.queries @ self.keys[:, None].mT / keys.shape[2] ** 0.5  # [H,G,n,N]
        seen = torch.arange(rows) <= torch.arange(self.prompt, rows)[:, None]
        self.weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)

    def read(self, method: str, budget: int, ranks: int, slack: float) -> Tensor:
        """`[n,Hs,N]` bool: the sealed rows that all ranks read together; of one rank, without a group."""
        selector = make_selector(method)
        parts = [
            KVCache(make_selector(method), sink=SINK, window=WINDOW, seal=SEAL, group=group, check=True)
            for group in ([Played(rank, ranks, slack) for rank in range(ranks)] if ranks > 1 else [None])
        ]
        every = [self._numbers(cache, rank, ranks, selector.unit, budget) for rank, cache in enumerate(parts)]
        return torch.stack([torch.stack(step).any(0) for step in zip(*every, strict=True)])

    def _numbers(self, cache: KVCache, rank: int, ranks: int, unit: int, budget: int) -> Iterator[Tensor]:
        """Of each query `[Hs,N]` bool, the rows that one rank reads."""
        keys, rows = self.keys[None], self.keys.shape[1]
        cache.append(keys[:, :, : self.prompt], keys[:, :, : self.prompt])
        for t in range(self.queries.shape[2]):
            at = self.prompt + t
            cache.append(keys[:, :, at, None], keys[:, :, at, None])
            mask = cache.select(self.queries[None, :, :, t], budget).mask(cache.stored.zones.zone)[0]  # [Hs,n]
            numbers = Deal(unit, rank, ranks).numbers(torch.ones(1, mask.shape[1], dtype=torch.bool))[0]
            of_all = mask.new_zeros(len(mask), rows)
            of_all[:, SINK + numbers] = mask
            yield of_all

    def held(self, read: Tensor) -> float:
        """The share of the attention that the rows read hold, with sink and window, mean over heads and queries."""
        place = torch.arange(self.keys.shape[1])
        asked = torch.arange(self.prompt, len(place))[:, None]
        always = (place < SINK) | ((place > asked - WINDOW) & (place <= asked))  # [n,N]
        heads, members = self.weights.shape[:2]
        rows = (read | always[:, None]).movedim(0, 1)  # [Hs,n,N]
        rows = rows.unflatten(0, (heads, -1)).expand(-1, members, -1, -1)
        return float((self.weights * rows).sum(-1).mean())

    def results(self, method: str, budget: int, sizes: Sequence[int], slack: float) -> list[dict[str, float]]:
        """Of one process, and of every number of ranks without and with a slack."""
        one = self.read(method, budget, 1, 0.0)
        ways = [(1, 0.0), *((ranks, more) for ranks in sizes for more in (0.0, slack))]
        return [
            {"ranks": ranks, "slack": more, **self._said(self.read(method, budget, ranks, more), one)}
            for ranks, more in ways
        ]

    def _said(self, read: Tensor, one: Tensor) -> dict[str, float]:
        """The attention held, the recall of the rows that one process reads, and rows read by a list."""
        recall = ((read & one).sum(-1) / one.sum(-1).clamp(min=1)).mean()
        return {"mass": self.held(read), "recall": float(recall), "rows": float(read.sum(-1).float().mean())}


def means(results: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """Of each way the mean over layers."""
    return [{name: sum(one[name] for one in way) / len(way) for name in way[0]} for way in zip(*results, strict=True)]


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each trace, method, budget and way of sharing it."""
    for name in options.trace:
        trace = open_trace(name, lambda *_: None)
        problems = []
        for layer in list(trace.shapes)[:: options.every]:
            seen = trace.layer(layer)
            queries = seen.query[:, :, -options.queries :].float() * (seen.scale * seen.keys.shape[-1] ** 0.5)
            problems.append(Problem(seen.keys, queries))
        for method in options.selector:
            for budget in options.budget:
                of_layers = [problem.results(method, budget, options.ranks, options.slack) for problem in problems]
                line = {"trace": name, "tokens": problems[0].keys.shape[1], "layers": len(problems)}
                for way in means(of_layers):
                    yield line | {"method": method, "budget": budget, **way}


def table(record: Any) -> Iterable[Table]:
    out = Table("trace", "method", "budget", "ranks", "slack", "attention", "recall of one process's rows", "rows")
    for line in record["measured"]:
        names = line["trace"], line["method"], str(line["budget"]), f"{line['ranks']:.0f}", f"{line['slack']:g}"
        out.add_row(*names, f"{line['mass']:.4f}", f"{line['recall']:.3f}", f"{line['rows']:.0f}")
    yield out


def parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    out = argparse.ArgumentParser(prog="python -m benchmarks.union", description="The best of each rank, or of all.")
    out.add_argument("--trace", action="append", help="captured keys; default prose and long; may be repeated")
    out.add_argument("--every", type=int, default=1, help="layers of a trace: every so many of those that it holds")
    out.add_argument("--selector", action="append", help="default quest, lowbit, mean and exact, one list a KV head")
    out.add_argument("--queries", type=int, default=16, help="the last tokens of a trace")
    out.add_argument("--budget", type=numbers, default=[256, 1024], help="rows, separated by commas")
    out.add_argument("--ranks", type=numbers, default=[2, 4, 8], help="separated by commas")
    out.add_argument("--slack", type=float, default=0.25, help="of a rank's part of the budget, beside none")
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    options.trace = options.trace or ["prose", "long"]
    options.selector = options.selector or ["quest", "lowbit", "mean", "exact:group=softmax"]
    lines = list(measured(options))
    record = {"question": "what ranks lose that take the best of their own rows", "queries": options.queries}
    record |= {"ranks": options.ranks, "slack": options.slack, "sink": SINK, "window": WINDOW}
    record |= {"measured": lines, "versions": versions(), "machine": machine()}
    records.end(record, NAME, table, options)


if __name__ == "__main__":
    main()
