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
from sparseattn.core.budget import budget_of, parse_budget
from sparseattn.core.context import LayerContext
from sparseattn.selectors.base import Selector
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.registry import make_selector

SIZES = ("sink", "window", "budget")  # what `SPEC@name=rows` sets for one selector, and `bits`


@dataclass(frozen=True)
class Method:
    """A selector to be timed: its spec, and the rows that its cache reads densely and its budget."""

    spec: str
    sink: int
    window: int
    budget: Any
    bits: int | None = None  # of sealed rows, as in `KVCache`

    @classmethod
    def of(cls, text: str, options: argparse.Namespace) -> Method:
        """Of `SPEC` or `SPEC@sink=4,window=64,budget=2048`; ValueError for anything else."""
        spec, at, sizes = text.partition("@")
        given: dict[str, Any] = {name: getattr(options, name) for name in SIZES}
        for pair in sizes.split(",") if at else []:
            name, equals, number = pair.partition("=")
            if name not in (*SIZES, "bits") or not equals:
                raise ValueError(f"behind @ come {', '.join(SIZES)} and bits as name=number, got {pair!r}")
            given[name] = parse_budget(number) if name == "budget" else _rows(number, text)
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
        KVCache(selector, sink=method.sink, window=method.window, seal=seal, bits=method.bits)  # its own checks
        budget_of(selector, method.budget, rows)
        if rows - method.sink - method.window < (unit := unit_of(selector, method.bits)):
            raise ValueError(
                f"a sink of {method.sink} and a window of {method.window} leave less than a unit of {unit} of "
                f"{rows} rows to select ({method.spec})"
            )
