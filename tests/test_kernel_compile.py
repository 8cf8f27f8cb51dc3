"""The Triton kernels compile for A100, H100 and B200 into what a memory-bound kernel should be; needs no GPU.

An interpreting process cannot compile, so two processes without TRITON_INTERPRET do: this file, run as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

ARCHES = (80, 90, 100)
# Shared memory that one program may have: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_KIB = {80: 163, 90: 227, 100: 227}
# dtype, D, span, G, one choice per query head: each value at least once, and every line of the kernel's tile table.
VARIANTS = [
    ("float16", 16, 16, 4, False),
    ("bfloat16", 32, 1, 1, False),
    ("float16", 64, 16, 4, False),
    ("bfloat16", 80, 16, 5, False),
    ("float16", 96, 64, 3, True),
    ("float16", 128, 1, 4, False),
    ("bfloat16", 128, 64, 16, True),
    ("float16", 256, 16, 4, False),
    ("float32", 16, 16, 4, False),
    ("float32", 32, 16, 4, False),
    ("float32", 64, 1, 4, False),
    ("float32", 128, 16, 4, False),
    ("float32", 256, 64, 16, False),
]
MERGES = [("bfloat16", 128), ("float32", 256)]
Rows = list[dict[str, Any]]


def compile_all(part: int, parts: int) -> Rows:
    from sparseattn.kernels import ahead

    rows = []
    for arch in ARCHES:
        for dtype, size, span, group, per_query_head in VARIANTS[part::parts]:
            found = ahead.compile_ahead(getattr(torch, dtype), size, span, group, per_query_head, arch)
            rows.append(
                {"arch": arch, "dtype": dtype, "D": size, "span": span, "G": group, "per_query_head": per_query_head}
                | vars(found)
            )
        for dtype, size in MERGES[part::parts]:
            found = ahead.compile_merge_ahead(getattr(torch, dtype), size, arch)
            rows.append({"arch": arch, "dtype": dtype, "D": size, "merge": True} | vars(found))
    return rows


def compile_a_launch() -> Rows:
    """What `attend` itself would launch on an H100: its launches only compile, for a driver that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    from sparseattn.kernels import ahead, spans
    from sparseattn.selection import Bounds, Selection

    h100 = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(h100)
    built = []

    class Warm:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: built.append(self.kernel.warmup(*args, grid=grid, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "attend_split", Warm(spans.attend_split))
        patch.setattr(spans, "merge_splits", Warm(spans.merge_splits))
        query, cache = torch.zeros(2, 2, 4, 128).bfloat16(), torch.zeros(2, 2, 512, 128).bfloat16()
        selection = Selection.pages(torch.zeros(2, 2, 1, dtype=torch.long), 16)  # S = 1 must not become a constant
        spans.attend(query, cache, cache, selection, Bounds.of(2, 512, 1), 0.1, splits=3)
    facts = [ahead.compile_ahead(torch.bfloat16, 128, 16, 4), ahead.compile_merge_ahead(torch.bfloat16, 128)]
    return [
        {"launched": vars(ahead.report(kernel, known.vector_loads)), "ahead": vars(known)}
        for kernel, known in zip(built, facts, strict=True)
    ]


def elsewhere(work: str, cache: Path) -> Rows:
    """Runs this file as a script in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    root = str(Path(__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "error", __file__, work]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    cache = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(2) as pool:
        rows = [row for part in pool.map(lambda part: elsewhere(part, cache), "01") for row in part]
    print(table(rows))
    return rows


def table(rows: Rows) -> str:
    lines = [f"{'kernel':<42} registers local shared    mma loads (bytes: instructions)"]
    for row in sorted(rows, key=lambda row: (row["arch"], row.get("merge", False), row["dtype"], row["D"])):
        of = "merge" if "merge" in row else f"span={row['span']} G={row['G']}{' per query' * row['per_query_head']}"
        name = f"sm_{row['arch']} {row['dtype']} D={row['D']} {of}"
        loads = " ".join(f"{size}:{number}" for size, number in sorted(row["loads"].items(), key=lambda x: int(x[0])))
        mma = sum(row["mma"].values())
        numbers = f"{row['registers']:>9} {row['local_bytes']:>5} {row['shared_bytes']:>6} {mma:>6}"
        lines.append(f"{name:<42} {numbers} {loads}")
    return "\n".join(lines)


def test_every_variant_compiles_for_every_architecture(compiled: Rows) -> None:
    assert len(compiled) == len(ARCHES) * (len(VARIANTS) + len(MERGES))


def test_nothing_spills(compiled: Rows) -> None:
    for row in compiled:
        assert row["local_bytes"] == 0, row
        assert 0 < row["registers"] <= 255, row


def test_shared_memory_lets_two_programs_run_on_a_multiprocessor(compiled: Rows) -> None:
    """`spans.PROGRAMS_PER_SM` counts on two; the driver keeps 1 KiB a program, and as much of the whole."""
    for row in compiled:
        assert 2 * (row["shared_bytes"] + 1024) <= (SHARED_KIB[row["arch"]] + 1) * 1024, row
        assert 2 * row["registers"] * 128 <= 65536, row  # registers of a multiprocessor; programs have 4 warps


def test_sixteen_bit_products_use_tensor_cores_and_float32_does_not(compiled: Rows) -> None:
    """float32 on tensor cores would be tf32, which keeps 11 bits."""
    for row in compiled:
        wants = row["dtype"] != "float32" and "merge" not in row
        assert bool(row["mma"]) == wants, row
        assert all("f32.f16.f16.f32" in name or "f32.bf16.bf16.f32" in name for name in row["mma"]), row


def test_rows_are_loaded_sixteen_bytes_at_once(compiled: Rows) -> None:
    """Whatever the span: a selection of single rows reads its rows as wide as one of pages.

    4-byte loads fetch spans and zones, 8-byte ones a query too small to give each thread 16 bytes.
    """
    for row in compiled:
        if "merge" not in row:
            assert row["loads"]["16"] >= row["vector_loads"] > 0, row
            assert set(row["loads"]) <= {"16", "4", "8"}, row
            assert row["loads"].get("8", 0) <= 1, row


def test_compiling_ahead_gives_what_a_launch_compiles(tmp_path: Path) -> None:
    for kernel in elsewhere("launch", tmp_path):
        assert kernel["launched"] == kernel["ahead"]


if __name__ == "__main__":
    work = sys.argv[1]
    print(json.dumps(compile_a_launch() if work == "launch" else compile_all(int(work), 2)))
