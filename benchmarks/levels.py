"""What a choice in two levels loses: pages of pages are scored first, and pages within the best of these alone.

``python -m benchmarks.levels`` from the repository root writes ``benchmarks/results/levels.json``; with ``--rows
104857600`` it takes 5 GB and some minutes. Keys are drawn, rows
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
    low, high = torch.empty(2, rows // PAGE, SIZE)
    for first in range(0, rows, CHUNK):
        count = min(CHUNK, rows - first)
        begins = torch.rand(count, generator=draw) < 1 / topic
        about = torch.randint(TOPICS, (count,), generator=draw)[begins.cumsum(0) % count]
        keys = centres[about] + torch.randn(count, SIZE, generator=draw)
        pages = keys.view(-1, PAGE, SIZE)
        own = slice(first // PAGE, (first + count) // PAGE)
        torch.amin(pages, 1, out=low[own])
        torch.amax(pages, 1, out=high[own])
    return low, high, centres


def scores(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quest's bound of each page."""
    return high @ query.relu() - low @ (-query).relu()


def recall(each: Tensor, above: Tensor, joined: int, opened: float, pages: int) -> tuple[float, float]:
    """The share of the best pages that two levels find, and of the entries that they score.

    Args:
        each: `[P]`, the bound of every page.
        above: the bound of every upper entry, of `joined` pages each.
        opened: share of the upper entries whose pages are scored.
        pages: that are chosen.
    """
    found = above.topk(max(int(len(above) * opened), 1)).indices
    inside = (found[:, None] * joined + torch.arange(joined)).flatten()
    ranked = inside[each[inside].topk(min(pages, len(inside))).indices]
    best = each.topk(pages).indices
    return float(torch.isin(ranked, best).sum() / pages), (len(above) + len(inside)) / len(each)


def upper(low: Tensor, high: Tensor, joined: int) -> tuple[Tensor, Tensor]:
    """The bounds of `joined` pages each, as one."""
    return low.unflatten(0, (-1, joined)).amin(1), high.unflatten(0, (-1, joined)).amax(1)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for topic in options.topic:
        low, high, centres = bounds(options.rows, topic, options.seed)
        draw = torch.Generator().manual_seed(options.seed + 1)
        queries = centres[:: TOPICS // options.queries][: options.queries]
        queries = queries + 0.5 * torch.randn(queries.shape, generator=draw)
        levels = {joined: upper(low, high, joined) for joined in options.joined}
        ways = [(joined, opened) for joined in options.joined for opened in options.opened]
        sums = dict.fromkeys(ways, (0.0, 0.0))
        for query in queries:
            each = scores(query, low, high)
            for joined, opened in ways:
                found, scored = recall(each, scores(query, *levels[joined]), joined, opened, options.pages)
                before = sums[joined, opened]
                sums[joined, opened] = before[0] + found, before[1] + scored
        for (joined, opened), of_all in sums.items():
            found, scored = (part / len(queries) for part in of_all)
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
