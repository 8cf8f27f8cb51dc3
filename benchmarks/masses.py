"""What scoring the pages of one layer takes in a serving engine's store: in one kernel, and by the logits of every row.

``python -m benchmarks.masses`` from the repository root writes ``benchmarks/results/masses-cpu.json``. The ways take
turns, call by call, each on the stores of as many layers as the model has: one layer's would stay in a cache.

- `kernel`: what a `lowbit` selector does. The kernel adds up a page's exponentials and votes.
- `rows`: the logits of every listed row, then `torch.logsumexp` over each page, then the vote: what it did before.
- `quest`: bounds of pages of 32 rows, for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from benchmarks import records
from benchmarks.measure import spread
from benchmarks.records import RESULTS
from sparseattn.cli.values import integers
from sparseattn.cost_model.environment import machine, versions
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.selectors.base import vote
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.selectors.pages.quest import Quest
from sparseattn.selectors.tokens.lowbit import LowBit

KV_HEADS, GROUP, SIZE, LAYERS = 3, 3, 64, 30  # SmolLM2's
NAMES = ("codes", "low", "step")  # of an entry's tensors
WARM = 5  # calls of each way that do not count
Scores: TypeAlias = Callable[[Tensor, dict[str, Tensor], Tensor], Tensor]


def by_rows(selector: LowBit) -> Scores:
    """Scores of pages by the logits of every row: see the module."""

    def scores(query: Tensor, store: dict[str, Tensor], table: Tensor) -> Tensor:
        batch, held, rows = len(query), len(store["low"]), selector.rows
        codes, low, step = (store[name].transpose(0, 1)[None].expand(batch, -1, -1, -1) for name in NAMES)
        valid = table.new_ones(held * rows, dtype=torch.bool).expand(batch, -1)
        listed = table[:, None].expand(-1, query.shape[1], -1)
        keys = QuantizedKeys(codes, low, step, selector.bits, valid)
        found = quantized_keys.listed_logits(query, keys, listed, rows)
        return vote(found.unflatten(-1, (-1, selector.page)).logsumexp(-1), selector.group)

    return scores


def stores(selector: PageSelector, rows: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """One of each layer, for so many rows in all."""
    keys = torch.randn(1, KV_HEADS, rows, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = {name: part[0].transpose(0, 1) for name, part in selector.entries(keys).items()}
    return [{name: part.transpose(0, 1).clone().transpose(0, 1) for name, part in made.items()} for _ in range(LAYERS)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    dtype = getattr(torch, options.dtype)
    own, quest = LowBit(options.bits, page=options.page), Quest(page=32)
    ways: dict[str, tuple[PageSelector, Scores]] = {
        "kernel": (own, own.scores_at),
        "rows": (own, by_rows(own)),
        "quest": (quest, quest.scores_at),
    }
    both: tuple[PageSelector, ...] = own, quest
    held = {one: stores(one, options.store, dtype) for one in both}
    results = []
    for batch in integers(options.batches, "--batches") or []:
        draw = torch.Generator().manual_seed(batch)
        query = torch.randn(batch, KV_HEADS, GROUP, SIZE, generator=draw).to(dtype)
        tables = {}
        for one in held:
            blocks = torch.stack([torch.randperm(options.store // 128, generator=draw) for _ in range(batch)])
            per = 128 // one.unit  # blocks of 128 rows lie anywhere, the entries of one beside each other
            places = (blocks[:, : options.rows // 128, None] * per + torch.arange(per)).flatten(1)
            tables[one] = places.int()
        taken: dict[str, list[float]] = {name: [] for name in ways}
        layers = itertools.cycle(range(LAYERS))
        for number in range(WARM + options.repeats):
            layer = next(layers)
            for name, (one, scores) in ways.items():
                begun = time.perf_counter()
                scores(query, held[one][layer], tables[one])
                if number >= WARM:
                    taken[name].append(1e6 * (time.perf_counter() - begun))
        results.append({"batch": batch, "microseconds": {name: spread(every) for name, every in taken.items()}})
    return {
        "question": "scoring the pages of one layer of a serving engine's store",
        "settings": {name: getattr(options, name) for name in ("bits", "page", "rows", "store", "dtype", "repeats")},
        "shape": {"kv_heads": KV_HEADS, "group": GROUP, "size": SIZE, "layers": LAYERS},
        "results": results,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def tables(record: dict[str, Any]) -> Iterator[Table]:
    """The record as a table."""
    told = record["settings"]
    table = Table(
        title=f"microseconds a layer: lowbit:bits={told['bits']},page={told['page']}, {told['rows']:,} rows",
        box=SIMPLE_HEAD,
    )
    names = list(record["results"][0]["microseconds"])
    for column in ("batch", *names):
        table.add_column(column, justify="right")
    for one in record["results"]:
        table.add_row(str(one["batch"]), *(f"{one['microseconds'][name]['median']:.0f}" for name in names))
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=1)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8064, help="of a sequence, a multiple of 128")
    parser.add_argument("--store", type=int, default=131_072, help="rows that the store of a layer has room for")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS / "masses-cpu.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rows % 128 or options.rows > options.store:
        parser.error(f"--rows is a multiple of 128 and at most --store, got {options.rows} and {options.store}")
    record = measure(options)
    records.save(record, options.out)
    records.show(record, tables, f"{record['machine']}\n{options.out}", options.json)


if __name__ == "__main__":
    main()
