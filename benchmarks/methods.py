"""What is timed: a selector by its spec, with the rows that its cache reads densely and its budget."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import Inputs
from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.shown_rows import unit_of
from sparseattn.codecs.base import RowCodec
from sparseattn.codecs.registry import make_codec
from sparseattn.core.budget import budget_of, parse_budget
from sparseattn.core.context import LayerContext
from sparseattn.selectors.base import Selector
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.registry import make_selector
from sparseattn.utils.specs import split_pairs

SIZES = ("sink", "window", "budget")  # what `SPEC@name=rows` sets for one selector, and `rows`


@dataclass(frozen=True)
class Method:
    """A selector to be timed: its spec, and the rows that its cache reads densely and its budget."""

    spec: str
    sink: int
    window: int
    budget: Any
    codec: RowCodec | None = None  # of sealed rows

    @classmethod
    def of(cls, text: str, options: argparse.Namespace) -> Method:
        """Of `SPEC` or `SPEC@sink=4,window=64,budget=2048,rows=[kivi:bits=8,group=64]`; else ValueError."""
        spec, at, sizes = text.partition("@")
        given: dict[str, Any] = {name: getattr(options, name) for name in SIZES}
        for pair in split_pairs(sizes, "row codec") if at else []:
            name, equals, value = pair.partition("=")
            if name not in (*SIZES, "rows") or not equals:
                raise ValueError(f"behind @ come {', '.join(SIZES)} and rows as name=value, got {pair!r}")
            if name == "rows":
                given["codec"] = make_codec(value[1:-1] if value.startswith("[") else value)
            else:
                given[name] = parse_budget(value) if name == "budget" else _rows(value, text)
        make_selector(spec)
        return cls(spec, **given)

    @property
    def kind(self) -> type[Selector]:
        return type(make_selector(self.spec))

    @property
    def slow_to_build(self) -> bool:
        """Its index takes minutes at long contexts."""
        probe = make_selector(self.spec)
        return probe.host or probe.queries_wanted[0] > 0

    @property
    def can_be_fixed(self) -> bool:
        """Whether its step can be one CUDA graph while the context grows."""
        try:
            make_selector(self.spec).fix(1 << 20, 1 << 10)
        except ValueError:
            return False
        return True

    def selector(self, inputs: Inputs, artefact: Path) -> Selector:
        """A fresh one; one that needs an artefact and names none gets the one made for these inputs."""
        spec = self.spec
        if issubclass(self.kind, Partitioned) and "artefact=" not in spec:
            spec += (":" if ":" not in spec else ",") + f"artefact={artefact}"
        return make_selector(spec).for_layer(LayerContext(0, rope=inputs.rope))


def _rows(number: str, text: str) -> int:
    if not number.isdecimal():
        raise ValueError(f"sink and window are numbers of rows, got {number!r} in {text!r}")
    return int(number)


def check_fit(methods: Sequence[Method], rows: int, seal: int) -> None:
    """ValueError where a selector cannot work with its sizes in the shortest context."""
    for method in methods:
        selector = make_selector(method.spec)
        KVCache(selector, sink=method.sink, window=method.window, seal=seal, rows=method.codec)  # its own checks
        budget_of(selector, method.budget, rows)
        if rows - method.sink - method.window < (unit := unit_of(selector, method.codec)):
            raise ValueError(
                f"a sink of {method.sink} and a window of {method.window} leave less than a unit of {unit} of "
                f"{rows} rows to select ({method.spec})"
            )
