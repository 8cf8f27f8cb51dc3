"""What every method keeps beside keys and values, what choosing reads, and what a step takes besides.

`python -m benchmarks.memory` fills caches, measures them and writes `benchmarks/results/memory.json`.

A state grows by the same bytes with every row, and with every KV head where heads have their own. Two short caches of
one head give what a row adds, two of one and two heads give the share of the heads, and both give a long cache.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.measure import Temporaries
from benchmarks.records import RESULTS, save
from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import Shape
from sparseattn.cost_model import index_bytes
from sparseattn.cost_model.index_bytes import BUDGET, ROWS, SINK, WINDOW, filled_cache, looking_ahead
from sparseattn.kernels import implementations
from sparseattn.selectors.base import Selector
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.eviction.locret import Locret
from sparseattn.selectors.methods import METHODS
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition
from sparseattn.selectors.registry import make_selector
from sparseattn.selectors.tokens.calibrated_base import FromCalibration
from sparseattn.selectors.tokens.querypq import QueryPQ

NAME = "memory"
HEADS, GROUP, SIZE, TOKENS = 8, 4, 128, 131_072  # a layer of Llama 3.1 8B, and its longest context
LARGE = 2048  # the budget in that context
BUCKETS = HIDDEN = 1024
LONGER = {  # sealed rows of two caches, of methods whose temporaries grow evenly only from there on
    **index_bytes.LONGER,
    "fier": (2048, 4096),  # compiled code works on 2,048 rows at a time
    "lowbit": (2048, 4096),
    "vattention": (8192, 16384),  # the certain rows are a share of the rows, up to half of the budget
}
FEW = 256  # sealed rows of the caches that give the share of the heads
SETTINGS = (
    *("doublesparsity:bits=16", "ellipsoid:bits=4", "ellipsoid:bits=8", "fier:group=each", "hnsw:metric=l2"),
    *("loki:group=each", "lowbit:page=16", "lowbit:rows=16", "lowbit:scales=8"),
    *("quest:int8=True", "retroinfer:cluster=32", "saap:context=0.5", "sparq:mean=True"),
)
PLAIN = {"kascade": "kascade:anchors=[0]"}  # of methods that have no default for an argument
SPECS = sorted([*(PLAIN.get(name, name) for name in METHODS), *SETTINGS])
WIDE, NARROW = torch.float32, torch.bfloat16
SEALED = TOKENS - SINK - WINDOW


@functools.lru_cache(maxsize=6)  # of one method
def filled(spec: str, heads: int, rows: int, dtype: torch.dtype = NARROW) -> tuple[KVCache, Tensor]:
    """Return a cache of one sequence with so many sealed rows after one step, and the query of the next step."""
    draw = torch.Generator().manual_seed(0)
    with _selector(spec, heads) as selector:
        cache = filled_cache(selector, Shape(1, heads, GROUP, SIZE, dtype), rows, draw)
    return cache, torch.randn(1, heads, GROUP, SIZE, generator=draw).to(dtype)


@contextmanager
def _selector(spec: str, heads: int) -> Iterator[Selector]:
    """Yield the method; one that needs an artefact gets a random one, which it reads at the first rows, and one that
    takes RoPE back is told of one."""
    selector = make_selector(spec)
    if not isinstance(selector, Partitioned):
        if isinstance(selector, (Locret, QueryPQ)) or (isinstance(selector, FromCalibration) and not selector.roped):
            selector.bind(LayerContext(rope=Rope.of(SIZE)))
        yield selector
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artefact.safetensors"
        Artefact({0: partition(heads)}, roped=True).save(path)
        yield make_selector(f"{spec}{',' if ':' in spec else ':'}artefact={path}").for_layer(0)


def partition(heads: int) -> Partition:
    """Return random centroids and classifiers of the recipe's size."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (HIDDEN, SIZE), "b1": (HIDDEN,), "w2": (BUCKETS, HIDDEN), "b2": (BUCKETS,)}
    weights = {name: torch.randn(heads, *shape, generator=draw) for name, shape in shapes.items()}
    centroids = torch.nn.functional.normalize(torch.randn(heads, BUCKETS, SIZE, generator=draw), dim=-1)
    return Partition(centroids, Classifier(**weights))


@dataclass(frozen=True)
class Growth:
    """Bytes at no row, and those that every row adds."""

    fixed: float
    row: float

    def times(self, factor: float) -> Growth:
        return Growth(self.fixed * factor, self.row * factor)


def growth(spec: str, dtype: torch.dtype, measure: Callable[[KVCache, Tensor], dict[str, int]]) -> dict[str, Growth]:
    """Return what a measure gives for a cache of one KV head, by name."""
    first, second = LONGER.get(spec.partition(":")[0], ROWS)
    few, more = (measure(*filled(spec, 1, rows, dtype)) for rows in (first, second))
    each = {name: (more[name] - few[name]) / (second - first) for name in few}
    return {name: Growth(few[name] - row * first, row) for name, row in each.items()}


def held(cache: KVCache, _: Tensor) -> dict[str, int]:
    return cache.nbytes


def choosing(cache: KVCache, query: Tensor) -> dict[str, int]:
    """Most bytes of temporaries that live at once while rows are chosen."""
    with Temporaries() as seen:
        looking_ahead(cache, query).select(query, BUDGET)
    return {"choosing": seen.peak}


def measured(spec: str) -> dict[str, Any]:
    """Return what is known of a method: bytes, of one sequence."""
    return {"method": spec, **kept(spec), **taken(spec)}


def kept(spec: str) -> dict[str, Any]:
    """Return what it keeps beside keys and values in a layer."""
    alone, both = (filled(spec, heads, FEW)[0].nbytes for heads in (1, 2))
    factors = {name: 1 + (HEADS - 1) * (both[name] / size - 1) if size else 1 for name, size in alone.items()}
    parts, wide = (
        {name: part.times(factors[name]) for name, part in growth(spec, dtype, held).items()}
        for dtype in (NARROW, WIDE)
    )
    keys = parts["kv"]
    for each in (parts, wide):
        del each["kv"], each["books"]
    row, wide_row = (sum(part.row for part in each.values()) for each in (parts, wide))
    fixed = max(0.0, sum(part.fixed for part in parts.values()))  # levels of a graph are drawn, so a line may dip
    states = [
        f"{name} {_number(part.row):,}".removesuffix(" 0") for name, part in parts.items() if part.row or part.fixed
    ]
    return {
        "row": _number(row),
        "row_float32": _number(wide_row),
        "fixed": _number(fixed),
        "whole": _number(fixed + row * SEALED),
        "keys_and_values": _number(keys.row * TOKENS),
        "states": ", ".join(states),
    }


def taken(spec: str) -> dict[str, Any]:
    """Return what choosing reads of a KV head for each row, and what a step takes for one beside what is held."""
    narrow, wide = (growth(spec, dtype, choosing)["choosing"].row for dtype in (NARROW, WIDE))
    choose = implementations.choose.__wrapped__  # which does not keep what it has found
    with patch.multiple(implementations, choose=choose, why_not_numba=lambda *_: "not asked for"):
        without = growth(spec, NARROW, choosing)["choosing"].row
    rows = LONGER.get(spec.partition(":")[0], ROWS)[1]
    cache, query = filled(spec, 1, rows)
    with Temporaries() as step:
        decode(query, looking_ahead(cache, query), BUDGET)
    scan = cache.selector.scan(Shape(1, 1, GROUP, SIZE, NARROW).query(), SEALED, LARGE)
    return {
        "scan": None if scan is None else _number(scan.read / SEALED),
        "choosing": _number(narrow),
        "choosing_float32": _number(wide),
        "choosing_torch": _number(without),
        "step_rows": rows,
        "step": step.peak,
    }


def _number(value: float) -> float:
    """Return it to two places, as an int where it is one."""
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def artefact() -> list[dict[str, Any]]:
    """Return what the bucket methods read of an artefact, for each layer."""
    part = partition(HEADS)
    assert part.classifier is not None
    tensors = part.classifier.tensors()
    halved = sum(tensor.nbytes // (2 if name in ("w1", "w2") else 1) for name, tensor in tensors.items())
    sizes = {
        "centroids (`kmeans`, `moments`)": part.centroids.nbytes,
        "centroids and classifiers (`saap`)": part.centroids.nbytes + sum(tensor.nbytes for tensor in tensors.values()),
        "the same, weights of 16 bits": part.centroids.nbytes + halved,
    }
    return [{"part": name, "bytes": size} for name, size in sizes.items()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures what methods keep and what a step takes.")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="of the record")
    folder = parser.parse_args(arguments).out
    torch.set_num_threads(1)
    shape = {"heads": HEADS, "group": GROUP, "size": SIZE, "tokens": TOKENS, "sink": SINK, "window": WINDOW}
    record = {**shape, "budget": LARGE, "artefact": artefact(), "results": [*map(measured, SPECS)]}
    save(record, folder / f"{NAME}.json")


if __name__ == "__main__":
    main()
