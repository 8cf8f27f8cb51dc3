"""What a choice in two levels loses: pages of pages are scored first, and pages within the best of these alone.

``python -m benchmarks.levels`` from the repository root writes ``benchmarks/results/levels.json``. Keys are drawn, rows
of the same topic next to each other, as texts have them: how much is lost hangs on that, so two lengths of a topic are
tried. An upper level joins the bounds of Quest's pages; a share of its entries is opened.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import records
from sparseattn.cost_model.environment import machine, versions

NAME = "levels.json"
PAGE, SIZE, TOPICS = 16, 64, 512
CHUNK = 1 << 18  # rows drawn at a time


def bounds(rows: int, topic: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Least and largest number of each page `[P,D]` of `rows` keys, of topics of about `topic` rows; and what topics
    are about `[TOPICS,D]`."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(TOPICS, SIZE, generator=draw)
    low, high = [], []
    for first in range(0, rows, CHUNK):
        count = min(CHUNK, rows - first)
        begins = torch.rand(count, generator=draw) < 1 / topic
        about = torch.randint(TOPICS, (count,), generator=draw)[begins.cumsum(0) % count]
        keys = centres[about] + torch.randn(count, SIZE, generator=draw)
        pages = keys.view(-1, PAGE, SIZE)
        low.append(pages.amin(1))
        high.append(pages.amax(1))
    return torch.cat(low), torch.cat(high), centres


def scores(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quest's bound of each page."""
    return high @ query.relu() - low @ (-query).relu()


def recall(query: Tensor, low: Tensor, high: Tensor, joined: int, opened: float, pages: int) -> tuple[float, float]:
    """The share of the best pages that two levels find, and of the entries that they score."""
    best = scores(query, low, high).topk(pages).indices
    upper = len(low) // joined
    least, most = low.view(upper, joined, -1).amin(1), high.view(upper, joined, -1).amax(1)
    found = scores(query, least, most).topk(max(int(upper * opened), 1)).indices
    inside = (found[:, None] * joined + torch.arange(joined)).flatten()
    ranked = inside[scores(query, low[inside], high[inside]).topk(min(pages, len(inside))).indices]
    return float(torch.isin(ranked, best).sum() / pages), (upper + len(inside)) / len(low)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for topic in options.topic:
        low, high, centres = bounds(options.rows, topic, options.seed)
        draw = torch.Generator().manual_seed(options.seed + 1)
        queries = centres[:: TOPICS // options.queries][: options.queries]
        queries = queries + 0.5 * torch.randn(queries.shape, generator=draw)
        for joined in options.joined:
            for opened in options.opened:
                of_each = [recall(query, low, high, joined, opened, options.pages) for query in queries]
                found, scored = (sum(part) / len(of_each) for part in zip(*of_each, strict=True))
                yield {"topic": topic, "joined": joined, "opened": opened, "recall": found, "scored": scored}


def table(record: Any) -> Iterable[Table]:
    out = Table("rows of a topic", "pages joined", "opened", "entries scored", "recall of the best pages")
    for line in record["measured"]:
        share = f"{line['opened']:.1%}", f"{line['scored']:.1%}"
        out.add_row(str(line["topic"]), str(line["joined"]), *share, f"{line['recall']:.3f}")
    yield out


def parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def shares(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    out = argparse.ArgumentParser(prog="python -m benchmarks.levels", description="A choice in two levels.")
    out.add_argument("--rows", type=int, default=10 << 20, help="keys that are drawn, for one KV head")
    out.add_argument("--pages", type=int, default=128, help="that are chosen, of 16 rows")
    out.add_argument("--topic", type=numbers, default=[64, 1024], help="rows of a topic in the mean")
    out.add_argument("--joined", type=numbers, default=[8, 32], help="pages of an upper entry")
    out.add_argument("--opened", type=shares, default=[0.01, 0.05, 0.2], help="share of the upper entries")
    out.add_argument("--queries", type=int, default=32)
    out.add_argument("--seed", type=int, default=0)
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    record = {"question": "what a choice in two levels loses", "rows": options.rows, "pages": options.pages}
    record |= {"queries": options.queries, "page": PAGE, "size": SIZE, "measured": list(measured(options))}
    records.end(record | {"versions": versions(), "machine": machine()}, NAME, table, options)


if __name__ == "__main__":
    main()
