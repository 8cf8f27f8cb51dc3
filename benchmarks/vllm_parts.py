"""Where the time of a step in vLLM goes: parts of a sparse layer, in microseconds, by clocks around our functions.

Used by ``benchmarks.vllm --parts``. The clocks themselves take about a microsecond each, six for a sparse layer, so
steps with them are not the steps whose times are compared with stock's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

PARTED = 20  # steps of each kind whose parts are clocked


class Parts:
    """Seconds of a step by part: `step` whole, `tables` of all layers, and the layers' own.

    Attributes:
        seconds: by part; `kernel NAME` is a compiled function called from Python, within the part that calls it.
        calls: by part.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def clocked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock around it."""

        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.calls[part] += 1

        return run

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Clocks around what an engine of this process runs, until the end of the block."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        from sparseattn.serving.vllm import cpu, page_index
        from sparseattn.serving.vllm.page_index import Store

        places: list[tuple[Any, str, str]] = [
            (cpu.SparseCPUBuilder, "build", "tables"),
            (cpu.SparseCPUImpl, "forward", "layer"),
            (CPUAttentionBackendImpl, "forward", "stock"),
            (Store, "update_from", "entries"),
            (Store, "scores", "choosing"),
            (Store, "best", "choosing"),
            (page_index, "attend_bounded", "both"),
            (page_index, "attend_blocks", "attending"),
            (cpu, "attend_blocks", "attending"),
            (cpu, "attend_rows", "attending"),
            (cpu.SparseCPUImpl, "_count", "counting"),
            *compiled(),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, part in places:
            setattr(owner, name, self.clocked(part, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def of_layers(self, steps: int, layers: int) -> dict[str, Any]:
        """Return microseconds of a sparse layer on average, by part, and of a step beside its layers.

        `both` is choosing and attending in one call, `around` what the layer does besides.

        Args:
            steps: that were clocked.
            layers: of a step that were sparse.
        """
        many = steps * layers
        each = {part: 1e6 * seconds / many for part, seconds in self.seconds.items()}
        kernels = {part.split()[1]: us for part, us in each.items() if part.startswith("kernel ")}
        sparse = each["layer"] - each.get("stock", 0.0)
        named = {part: each.get(part, 0.0) for part in ("choosing", "attending", "both", "entries", "counting")}
        step = {"tables": 1e6 * self.seconds["tables"] / steps, "step": 1e6 * self.seconds["step"] / steps}
        rounded = {"layer": sparse, **named, "around": sparse - sum(named.values()), **step}
        return {
            "steps": steps,
            **{part: round(us, 1) for part, us in rounded.items()},
            "kernels": {name: round(us, 1) for name, us in sorted(kernels.items())},
        }


def compiled() -> list[tuple[Any, str, str]]:
    """Return the compiled functions that Python calls, of all modules that are there: module, name and part."""
    found = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("sparseattn.kernels."):
            continue
        for name, value in list(vars(module).items()):
            if getattr(getattr(value, "compile", None), "__name__", "") == "compile_apart":
                found.append((module, name, f"kernel {name.lstrip('_')}"))
    return found


def clocked_parts(engine: Any, turns: Any, layers: int) -> dict[str, Any]:
    """Return microseconds of a sparse layer by part, `Parts.of_layers`, and of a layer of stock.

    Args:
        engine: whose sequences decode.
        turns: `benchmarks.vllm.Turns`, which says of which kind the next step is.
        layers: of a step that are sparse.
    """
    both = {"stock": Parts(), "sparse": Parts()}
    for number in range(2 * PARTED):
        turns.kind = ("stock", "sparse")[number % 2]
        parts = both[turns.kind]
        with parts.installed():
            parts.clocked("step", engine.step)()
    stock = both["stock"]
    tables = round(1e6 * stock.seconds["tables"] / PARTED, 1)
    rows: dict[str, Any] = both["sparse"].of_layers(PARTED, layers) if layers else {}
    layer = round(1e6 * stock.seconds["stock"] / max(1, stock.calls["stock"]), 1)
    return {**rows, "stock": layer, "stock_tables": tables}


def parts_table(decoded: list[dict[str, Any]]) -> Table:
    """Return the parts of a record's runs as a table."""
    table = Table(title="microseconds of a sparse layer, and of a step's tables", box=SIMPLE_HEAD)
    table.add_column("selector")
    columns = ("stock", "layer", "choosing", "attending", "both", "counting", "around", "tables")
    for column in ("context", "batch", *columns, "compiled"):
        table.add_column(column, justify="right")
    for one in decoded:
        times = [f"{one['parts'].get(column, 0):,.0f}" for column in columns]
        kernels = sum(one["parts"].get("kernels", {}).values())
        table.add_row(one["selector"], f"{one['context']:,}", str(one["batch"]), *times, f"{kernels:,.0f}")
    return table
