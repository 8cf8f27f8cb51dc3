"""Views of what the Triton kernels compile to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from scripts.evidence import markdown
from scripts.evidence.condensing import rows

Record: TypeAlias = "Mapping[str, Any]"

SIZE = 128  # D of the kernels on the page; the record has more
HEAD = (
    "kernel",
    "of",
    "sm",
    "registers",
    "local",
    "shared",
    "tensor cores",
    "loads, bytes: instructions",
    "bytes per row",
)


def table(record: Record) -> str:
    """Registers, memory and loads of the kernels of one head size."""
    return measured(one for one in rows(record) if one.get("D") in (SIZE, None))


def measured(kernels: Iterable[Mapping[str, Any]]) -> str:
    """A line a kernel and architecture."""
    lines = []
    for one in sorted(kernels, key=lambda one: (one["kernel"], one["dtype"], one.get("D") or 0, _of(one), one["arch"])):
        numbers = [str(one[name]) for name in ("arch", "registers", "local_bytes", "shared_bytes", "mma")]
        lines.append([one["kernel"], _of(one), *numbers, one["loads"], f"{one['row_bytes']:g}"])
    cells = markdown.table(HEAD, lines, left=2).splitlines()
    cells[1] = "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"
    return "\n".join(cells)


def _of(one: Mapping[str, Any]) -> str:
    """What a kernel was compiled for."""
    named = [
        f"{name}={one[name]}"
        for name in ("D", "G", "span", "each", "kind", "rank", "bits", "rows", "vote")
        if one.get(name) is not None
    ]
    more = {
        "per query head": one.get("per") == "query",
        "8-bit bounds": one.get("int8"),
        "in a shared store": one.get("table"),
        "8-bit levels": one.get("scales") == 8,
        "with a bias": one.get("bias"),
        f"{'pages' if one.get('bits') else 'blocks'} of {one.get('page')}": (one.get("page") or 0) > 1,
    }
    return " ".join([one["dtype"], *named, *(words for words, holds in more.items() if holds)])
