"""How far page scores are from the pages' true mass, by layer and query head, and how well they order pages by it.

``python -m benchmarks.looseness TRACE`` from the repository root writes ``benchmarks/results/looseness.json``; a trace
is a file or the name of a built-in one. Any selector by page can be measured (`--selector`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import records
from benchmarks.records import RESULTS
from sparseattn.cli.inputs import open_trace
from sparseattn.core.context import LayerContext
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.rank_correlation import rank_correlation
from sparseattn.evaluation.replay_settings import usable_layers
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import Rows
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace, TraceLayer

NAME = "looseness"
SELECTORS = ("quest", "unique", "mean", "quad", "clse", "ellipsoid")
MEASURES = {
    "offset": "score less the logarithm of the page's mass, mean over pages and tokens",
    "deviation": "standard deviation of that over the pages of a token, mean over tokens",
    "rank": "rank correlation (Spearman) of score and mass over the pages of a token, mean over tokens",
}


def by_page(spec: str) -> PageSelector:
    """A selector that scores pages for each query head apart.

    Raises:
        ValueError: it is none, or scores single rows.
    """
    made = make_selector(spec)
    if not isinstance(made, PageSelector) or made.page == 1:
        raise ValueError(f"{spec!r} does not score whole pages; these do: {', '.join(SELECTORS)}, lowbit:page=16")
    made.group = "each"
    return made


def looseness(selector: PageSelector, layer: TraceLayer, sink: int, window: int, last: int) -> dict[str, Any]:
    """What `MEASURES` says of the pages that the last tokens all may choose from.

    A score on the scale of one row's logit (`PageSelector.mass`) has the logarithm of a page's rows added.

    Args:
        selector: scores each query head apart; it sees no row before.
        layer: keys `[H,N,D]` and queries `[H,G,T,D]`.
        sink, window: rows before and behind the pages.
        last: tokens at the end that ask.

    Returns:
        measure -> `[H*G]` floats, and the bytes of an entry for each row as `row_bytes`.
    """
    rows = (layer.keys.shape[1] - last - window - sink) // selector.unit * selector.unit
    if rows < 2 * selector.page:
        raise ValueError(
            f"{layer.keys.shape[1]:,} tokens leave {max(rows, 0)} rows between sink {sink}, window {window} and the "
            f"last {last}, less than two pages of {selector.page}"
        )
    keys, asked = layer.keys[None, :, sink : sink + rows].contiguous(), layer.query[:, :, -last:].float()
    heads, group, _, size = asked.shape
    selector.bind(LayerContext(scale=layer.scale))
    if isinstance(selector, ReadsKeys):
        selector.stored = keys
    selector.append(Rows(keys, keys, torch.arange(sink, sink + rows)[None]))
    entries = {name: getattr(selector, name).visible for name in selector.entry_names}
    valid = selector.valid_entries(torch.ones(1, rows, dtype=torch.bool))
    query = asked.flatten(1, 2)[None]  # [1,H,G*last,D]: tokens in place of more query heads
    found = selector.scores(query, entries, valid).view(heads * group, last, -1)  # [H*G,last,P]
    mass = (query @ keys.float().mT * layer.scale).unflatten(-1, (-1, selector.page)).logsumexp(-1).view(found.shape)
    away = (found - mass).double() + (0.0 if selector.mass else math.log(selector.page))
    counted = sum(part.numel() * selector.bytes_of(part) for part in entries.values())
    return {
        "offset": away.mean((1, 2)).tolist(),
        "deviation": away.std(-1).mean(1).tolist(),
        "rank": rank_correlation(found, mass).nanmean(1).tolist(),
        "row_bytes": (counted if entries else size * keys.element_size() * heads * rows) / (heads * rows),
    }


def measured(trace: Trace, specs: Sequence[str], layers: Sequence[int], options: Any) -> list[dict[str, Any]]:
    """A line for each selector and layer."""
    return [
        {
            "trace": trace.name,
            "tokens": trace.tokens,
            "selector": spec,
            "label": by_page(spec).label().replace("group='each', ", "").replace(", group='each'", ""),
            "layer": index,
            **looseness(by_page(spec), trace.layer(index), options.sink, options.window, options.last),
        }
        for index in layers
        for spec in specs
    ]


def mean(values: Iterable[float]) -> float:
    """Of those that are numbers."""
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())


def tables(record: Mapping[str, Any], per_head: bool = False) -> list[Table]:
    """Of each trace a row for a selector and layer, and for a query head if asked."""
    made = []
    for trace in dict.fromkeys(one["trace"] for one in record["lines"]):
        table = Table(title=f"{trace}: score less the true mass of a page", title_justify="left")
        for name in ("selector", "layer", *(["head"] if per_head else []), "bytes a row", *MEASURES):
            table.add_column(name, justify="left" if name == "selector" else "right")
        for one in record["lines"]:
            if one["trace"] != trace:
                continue
            heads: list[int | None] = list(range(len(one["rank"]))) if per_head else [None]
            for head in heads:
                shown = [mean(one[name]) if head is None else one[name][head] for name in MEASURES]
                which = [] if head is None else [str(head)]
                cells = [one["selector"], str(one["layer"]), *which, f"{one['row_bytes']:.1f}"]
                table.add_row(*cells, *(f"{value:.3f}" for value in shown))
        made.append(table)
    return made


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser("python -m benchmarks.looseness", description=__doc__.partition("\n")[0])
    command.add_argument("trace", nargs="+", help="trace files, or names of built-in traces")
    command.add_argument("--selector", action="append", help=f"by page; default {', '.join(SELECTORS)}")
    command.add_argument("--layers", help="such as 2,6,10; default all that attend to the whole context")
    command.add_argument("--sink", type=int, default=4, help="rows before the pages")
    command.add_argument("--window", type=int, default=64, help="rows behind them")
    command.add_argument("--last", type=int, default=32, help="tokens at the end that ask")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    command.add_argument("--per-head", action="store_true", help="every query head apart in the tables")
    command.add_argument("--json", action="store_true", help="the record on one line in place of tables")
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    for name, least in {"sink": 0, "window": 0, "last": 1}.items():
        if getattr(options, name) < least:
            command.error(f"--{name} is {least} or more, got {getattr(options, name)}")
    specs = options.selector or list(SELECTORS)
    lines: list[dict[str, Any]] = []
    try:
        for spec in specs:
            by_page(spec)
        wanted = None if options.layers is None else [int(text) for text in options.layers.split(",")]
        for name in options.trace:
            trace = open_trace(name, lambda *_: None)
            lines += measured(trace, specs, usable_layers(trace, wanted), options)
    except ValueError as error:
        command.error(str(error))
    settings = {name: getattr(options, name) for name in ("sink", "window", "last")}
    record = {"question": "how far page scores are from the pages' true mass", "measures": MEASURES, **settings}
    record |= {"lines": lines, "versions": versions(), "machine": machine()}
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{NAME}.json"
    records.save(record, path)
    records.show(record, lambda found: tables(found, options.per_head), f"record: {path}", options.json)


if __name__ == "__main__":
    main()
