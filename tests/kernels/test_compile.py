"""The Triton kernels compile for A100, H100 and B200 into what a memory-bound kernel should be; needs no GPU.

An interpreting process cannot compile, so one without TRITON_INTERPRET does: this file, run as a script. What it
compiles stays in Triton's own cache (`$TRITON_CACHE_DIR`, else `~/.triton/cache`), whose keys hold the source of a
kernel and of all it calls, its constants and options, the target and Triton itself: half a minute for each architecture
the first time, then seconds.
`make test` compiles what a step launches on an H100, `make test-all` every variant for all three.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.evidence import tables
from scripts.evidence.condensing import instructions
from scripts.evidence.derived import kernels

pytest.importorskip("triton")

# Shared memory that one program may have: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_KIB = {80: 163, 90: 227, 100: 227}
ARCHES = [pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 90, 100)]
# dtype, D, span, G, one choice per query head, rows of a block of a paged store, and whether rows have a bias: each
# value at least once, and every line of the kernel's tile table.
VARIANTS = [
    ("float16", 16, 16, 4, False, 0),
    ("bfloat16", 32, 1, 1, False, 0),
    ("float16", 64, 16, 4, False, 0),
    ("bfloat16", 80, 16, 5, False, 0),
    ("float16", 96, 64, 3, True, 0),
    ("float16", 128, 1, 4, False, 0),
    ("bfloat16", 128, 16, 4, False, 0),
    ("bfloat16", 128, 16, 4, False, 16),
    ("float16", 128, 1, 4, False, 64),
    ("bfloat16", 128, 64, 16, True, 0),
    ("float16", 256, 16, 4, False, 0),
    ("float32", 16, 16, 4, False, 0),
    ("float32", 32, 16, 4, False, 0),
    ("float32", 64, 1, 4, False, 0),
    ("float32", 128, 16, 4, False, 0),
    ("float32", 128, 16, 4, False, 16),
    ("float32", 256, 64, 16, False, 0),
]
VARIANTS = [(*variant, False) for variant in VARIANTS] + [
    ("bfloat16", 128, 16, 4, False, 0, True),
    ("float32", 128, 1, 4, True, 0, True),
]
MERGES = [("bfloat16", 128), ("float32", 256)]
# dtype, D, G, vote, where bounds lie (in order, with 8 bits, or in a store with a table): every vote, and the lines of
# the pages' tile table where a tile is largest.
PAGES = [
    ("float16", 64, 1, "each", "order"),
    ("bfloat16", 128, 4, "sum", "order"),
    ("bfloat16", 128, 4, "sum", "int8"),
    ("bfloat16", 128, 4, "sum", "table"),
    ("bfloat16", 128, 4, "softmax", "order"),
    ("float16", 256, 16, "max", "order"),
    ("float16", 256, 16, "softmax", "table"),
    ("float32", 64, 4, "sum", "order"),
    ("float32", 128, 4, "sum", "order"),
    ("float32", 128, 4, "sum", "int8"),
    ("float32", 128, 4, "sum", "table"),
    ("float32", 256, 17, "each", "order"),
    ("float32", 256, 17, "each", "table"),
]
PROBES = [(16, 1), (1, 4)]  # span, selection heads of a KV head
# G, bits of a code, bytes of a row: product codes. The first is compiled with the others, the rest in the slow run.
PRODUCT_CODES = [(4, 4, 8), (1, 4, 4), (3, 4, 2), (4, 8, 8), (5, 8, 4), (16, 8, 16), (17, 4, 64), (2, 8, 128)]
# Scores of a list, how many of them are the best, whether they are pages, and whether the list is cut into parts.
BEST = [(8192, 128, True, False), (2048, 128, True, False), (131072, 2048, False, True), (8192, 4096, False, False)]
LISTS = [("bfloat16", 128, 4), ("float32", 256, 1)]  # dtype, D, G
# dtype, D, G, bits, rows of a group, page, vote, bits of levels, with a table: every vote and number of bits, and where
# a tile is largest.
LOWBIT = [
    ("bfloat16", 128, 4, 2, 64, 1, "softmax", 16, False),
    ("bfloat16", 128, 4, 2, 32, 1, "softmax", 8, False),
    ("float16", 80, 5, 2, 32, 1, "each", 16, False),
    ("bfloat16", 128, 8, 1, 64, 16, "max", 16, False),
    ("float16", 256, 16, 4, 128, 1, "sum", 16, False),
    ("float32", 128, 4, 2, 64, 1, "softmax", 16, False),
    ("float32", 256, 17, 4, 64, 16, "each", 16, False),
    ("bfloat16", 64, 3, 1, 64, 16, "softmax", 16, True),
]
# dtype, D, G, kind, rows of a page, rank, bits, whether the rest counts, vote, with a table: pages by mean and
# directions. The first is compiled with the others, the rest in the slow run.
DIRECTIONS = [
    ("bfloat16", 128, 4, "clse", 16, 2, 4, True, "softmax", False),
    ("bfloat16", 128, 4, "quad", 16, 0, 16, False, "sum", False),
    ("bfloat16", 128, 4, "quad", 16, 2, 8, False, "softmax", True),
    ("bfloat16", 64, 3, "clse", 16, 2, 16, False, "softmax", False),
    ("float16", 80, 5, "ellipsoid", 16, 4, 16, True, "each", False),
    ("float16", 256, 16, "clse", 16, 8, 16, False, "max", True),
    ("float32", 128, 4, "clse", 16, 2, 16, False, "softmax", False),
    ("float32", 256, 17, "quad", 16, 4, 4, True, "each", False),
    ("float32", 256, 17, "clse", 32, 4, 8, True, "sum", False),
]
# dtype, D, span, G, bits, rows of a group of keys, one choice per query head, and whether rows have a bias: the first
# in every run, the others in the slow one.
CODED = [
    ("bfloat16", 128, 16, 4, 8, 32, False, False),
    ("bfloat16", 128, 16, 4, 4, 32, False, False),
    ("bfloat16", 64, 1, 4, 4, 64, True, False),
    ("bfloat16", 128, 16, 4, 2, 32, False, False),
    ("float16", 64, 1, 4, 2, 32, True, False),
    ("float16", 256, 16, 4, 2, 32, False, False),
    ("float32", 128, 16, 4, 2, 32, False, False),
    ("float16", 32, 16, 4, 8, 16, False, True),
    ("float16", 80, 16, 5, 4, 32, False, False),
    ("float16", 256, 16, 4, 8, 32, False, True),
    ("bfloat16", 256, 64, 16, 4, 16, False, False),
    ("float32", 64, 16, 4, 8, 32, False, False),
    ("float32", 128, 1, 4, 8, 32, True, True),
    ("float32", 128, 16, 4, 4, 32, False, False),
    ("float32", 256, 16, 16, 8, 32, False, True),
    ("float32", 256, 64, 16, 4, 32, False, False),
]
SIXTEEN = ("f32.f16.f16", "f32.bf16.bf16", "kind::f16")  # what instructions of 16-bit products are called
MULTIPLY = (  # by tensor cores in 16 bits
    *("attend_split", "attend_codes", "score_pages", "score_rows", "score_listed_rows", "score_directions"),
)
Rows = list[dict[str, Any]]


def compile_all(arch: int) -> Rows:
    from sparseattn.kernels import triton_ahead

    rows: Rows = []

    def keep(kernel: str, found: Any, **what: Any) -> None:
        rows.append({"arch": arch, "kernel": kernel, **what, **vars(found)})

    for dtype, size, span, group, per_query_head, page, bias in VARIANTS:
        found = triton_ahead.compile_ahead(getattr(torch, dtype), size, span, group, per_query_head, arch, page, bias)
        per = "query" if per_query_head else "kv"
        more = {"bias": True} if bias else {}
        keep("attend_split", found, dtype=dtype, D=size, span=span, G=group, per=per, page=page, **more)
    for dtype, size in MERGES:
        keep("merge_splits", triton_ahead.compile_merge_ahead(getattr(torch, dtype), size, arch), dtype=dtype, D=size)
    for dtype, size, group, vote, kept in PAGES:
        options = {"int8": kept == "int8", "table": kept == "table"}
        built = triton_ahead.compile_pages_ahead(getattr(torch, dtype), size, group, vote, arch, **options)
        names = ["score_pages", *["vote_softmax"] * (vote == "softmax")]
        for name, found in zip(names, built, strict=True):
            keep(name, found, dtype=dtype, D=size, G=group, vote=vote, **options)
    for total, count, pages, part in BEST:
        found = triton_ahead.compile_best_ahead(total, count, arch, page=pages, part=part)
        keep("pick_best", found, dtype="float32", total=total, best=count, pages=pages, part=part)
    for span, each in PROBES:
        keep("cut_runs", triton_ahead.compile_probes_ahead(span, each, arch=arch), dtype="int32", span=span, each=each)
    for dtype, size, group in LISTS:
        found = triton_ahead.compile_lists_ahead(getattr(torch, dtype), size, group, arch)
        keep("score_listed", found, dtype=dtype, D=size, G=group)
    for dtype, size, group, bits, each, page, vote, scales, table in LOWBIT:
        kind = getattr(torch, dtype)
        form = triton_ahead.FewBits(bits, each, scales)
        built = triton_ahead.compile_lowbit_ahead(kind, size, group, form, page, vote, arch, table)
        names = ["score_rows", *["vote_softmax"] * (vote == "softmax"), "score_listed_rows"]
        for name, found in zip(names, built, strict=True):
            what = {"dtype": dtype, "D": size, "G": group, "bits": bits, "rows": each, "page": page, "vote": vote}
            keep(name, found, **what, scales=scales, table=table and name == "score_rows")
    rows += compile_product_codes(arch, PRODUCT_CODES[:1])
    return [*rows, *compile_directions(arch, DIRECTIONS[:1]), *compile_coded(arch, CODED[:1])]


def compile_product_codes(arch: int, variants: list[tuple[int, int, int]]) -> Rows:
    from sparseattn.kernels import triton_ahead

    rows: Rows = []
    tables, listed = {"dtype": "float32"}, {"dtype": "float32", "listed": True}
    launches = (("sum_rows", {"dtype": "int32"}), ("below_tops", {"dtype": "int32"}), ("sum_rows", tables))
    for group, bits, count in variants:
        built = triton_ahead.compile_product_codes_ahead(group, bits, count, arch)
        for (kernel, what), found in zip((*launches, ("sum_rows", listed)), built, strict=True):
            rows.append(
                {"arch": arch, "kernel": kernel, "G": group, "bits": bits, "bytes": count, **what, **vars(found)}
            )
    return rows


def compile_directions(arch: int, variants: list[tuple[Any, ...]]) -> Rows:
    from sparseattn.kernels import triton_ahead
    from sparseattn.kernels.page_directions.reference import Form

    rows: Rows = []
    for dtype, size, group, kind, page, rank, bits, rest, vote, table in variants:
        form = Form(kind, page, rank, bits, rest)
        found = triton_ahead.compile_directions_ahead(getattr(torch, dtype), size, group, form, vote, arch, table=table)
        what = {"dtype": dtype, "D": size, "G": group, "kind": kind, "rank": rank, "bits": bits, "page": page}
        rows.append({"arch": arch, "kernel": "score_directions", **what, "vote": vote, "table": table, **vars(found)})
    return rows


def compile_coded(arch: int, variants: list[tuple[Any, ...]]) -> Rows:
    from sparseattn.kernels import triton_ahead

    rows: Rows = []
    for dtype, size, span, group, bits, each, per_query_head, bias in variants:
        found = triton_ahead.compile_coded_ahead(
            getattr(torch, dtype), size, span, group, bits, each, per_query_head, arch, bias
        )
        per, more = "query" if per_query_head else "kv", {"bias": True} if bias else {}
        what = {"dtype": dtype, "D": size, "span": span, "G": group, "bits": bits, "rows": each, "per": per, **more}
        rows.append({"arch": arch, "kernel": "attend_codes", **what, **vars(found)})
    return rows


def compile_a_launch() -> Rows:
    """What `attend` itself would launch on an H100: its launches only compile, for a driver that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    from sparseattn.core.selection import Bounds, Selection
    from sparseattn.kernels import triton_ahead
    from sparseattn.kernels.attend import gpu as attend_gpu
    from sparseattn.kernels.attend_quantized import gpu as attend_quantized_gpu
    from sparseattn.kernels.attend_quantized import reference as attend_quantized_reference
    from sparseattn.kernels.bucket_spans import gpu as bucket_spans_gpu
    from sparseattn.kernels.group_vote import gpu as group_vote_gpu
    from sparseattn.kernels.listed_scores import gpu as listed_scores_gpu
    from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu
    from sparseattn.kernels.page_bounds.bounds import PageBounds
    from sparseattn.kernels.page_directions import gpu as page_directions_gpu
    from sparseattn.kernels.page_directions.reference import Form, encode
    from sparseattn.kernels.product_codes import gpu as product_codes_gpu
    from sparseattn.kernels.product_codes.codes import ProductCodes
    from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu
    from sparseattn.kernels.quantized_keys import gpu_listed, packing
    from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
    from sparseattn.kernels.topk import gpu as topk_gpu

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
        for module, names in (
            (attend_gpu, ["attend_split", "merge_splits"]),
            (group_vote_gpu, ["vote_softmax"]),
            (page_bounds_gpu, ["score_pages"]),
            (topk_gpu, ["pick_best"]),
            (bucket_spans_gpu, ["cut_runs"]),
            (listed_scores_gpu, ["score_listed"]),
            (product_codes_gpu, ["sum_rows", "below_tops"]),
            (quantized_keys_gpu, ["score_rows"]),
            (gpu_listed, ["score_listed_rows"]),
            (page_directions_gpu, ["score_directions"]),
            (attend_quantized_gpu, ["attend_codes"]),
        ):
            for name in names:
                patch.setattr(module, name, Warm(getattr(module, name)))
        query, cache = torch.zeros(2, 2, 4, 128).bfloat16(), torch.zeros(2, 2, 512, 128).bfloat16()
        selection = Selection.pages(torch.zeros(2, 2, 1, dtype=torch.long), 16)  # S = 1 must not become a constant
        attend_gpu.attend(query, cache, cache, selection, Bounds.of(2, 512, 1), 0.1, splits=3)
        table = torch.zeros(2, 1, dtype=torch.int32)
        attend_gpu.attend(query, cache, cache, selection, Bounds.of(2, 512, 1), 0.1, table, splits=1)
        biased = Selection.pages(torch.zeros(2, 2, 1, dtype=torch.long), 16, bias=torch.zeros(2, 2, 1))
        attend_gpu.attend(query, cache, cache, biased, Bounds.of(2, 512, 1), 0.1, splits=3)
        valid, integers, root = torch.ones(2, 512, dtype=torch.bool), cache.to(torch.int8), 128**0.5
        for bounds, vote in (
            (PageBounds(cache, cache, valid), "sum"),
            (PageBounds(cache, cache, valid), "softmax"),
            (PageBounds(integers, integers, valid, torch.ones(2, 2, 128)), "sum"),
        ):
            topk_gpu.best_pages(page_bounds_gpu.scores(query, bounds, vote, root), 3, 16)
        store = cache.transpose(1, 2).flatten(0, 1)
        shared = torch.zeros(2, 512, dtype=torch.int32)
        topk_gpu.best_pages(page_bounds_gpu.scores_at(query, PageBounds(store, store), shared, "sum", root), 3, 16)
        ids = torch.zeros(2, 2, 1, dtype=torch.int64)
        bucket_spans_gpu.spans(ids, torch.zeros(2, 2, 8, 1026, dtype=torch.int32), 16, 64, 5)
        listed_scores_gpu.scores(query, cache, torch.zeros(2, 8, 1, dtype=torch.int32))
        patch.setattr(packing, "tile", lambda device: 1)  # as on a GPU
        parts = torch.zeros(2, 2, 8, 64 * 32, dtype=torch.uint8), *torch.zeros(2, 2, 2, 8, 128).bfloat16()
        keys = QuantizedKeys(*parts, 2, valid)
        quantized_keys_gpu.scores(query, keys, "softmax", 1)
        entries = QuantizedKeys(*(part[0].transpose(0, 1) for part in parts), 2)
        quantized_keys_gpu.scores_at(query, entries, torch.zeros(2, 8, dtype=torch.int32), "softmax", 16)
        quantized_keys_gpu.listed_logits(query, keys, torch.zeros(2, 2, 1, dtype=torch.int64), 16)
        form = Form("clse", 16, 2, 4, True)
        entries = encode(cache, form, torch.bfloat16)
        page_directions_gpu.scores(query, entries, torch.ones(2, 32, dtype=torch.bool), form, "sum", 11.0)
        plain = Form("quad", 16, 2)
        store = {
            name: part.transpose(1, 2).flatten(0, 1) for name, part in encode(cache, plain, torch.bfloat16).items()
        }
        page_directions_gpu.scores_at(query, store, torch.zeros(2, 32, dtype=torch.int32), plain, "sum", 11.0)
        attend_quantized_gpu.attend(
            query, attend_quantized_reference.encode(cache, cache, 8, 32), selection, 0.1, splits=3
        )
        by_code = ProductCodes(torch.zeros(2, 2, 8, 512, dtype=torch.uint8), 4, valid)
        names = torch.zeros(2, 2, 4, 16, 16, dtype=torch.uint8)
        product_codes_gpu.nearest(names, torch.ones(2, 2), by_code)
        product_codes_gpu.logits(torch.zeros(2, 2, 4, 16, 16), by_code)
        product_codes_gpu.voted(torch.zeros(2, 2, 4, 16, 16), by_code, torch.zeros(2, 2, 1, dtype=torch.int32))
    best = triton_ahead.compile_best_ahead(512, 3, page=True)
    facts = [
        triton_ahead.compile_ahead(torch.bfloat16, 128, 16, 4),
        triton_ahead.compile_merge_ahead(torch.bfloat16, 128),
        triton_ahead.compile_ahead(torch.bfloat16, 128, 16, 4, page=512),
        triton_ahead.compile_ahead(torch.bfloat16, 128, 16, 4, bias=True),
        triton_ahead.compile_merge_ahead(torch.bfloat16, 128),
        *triton_ahead.compile_pages_ahead(torch.bfloat16, 128, 4, "sum"),
        best,
        *triton_ahead.compile_pages_ahead(torch.bfloat16, 128, 4, "softmax"),
        best,
        *triton_ahead.compile_pages_ahead(torch.bfloat16, 128, 4, "sum", int8=True),
        best,
        *triton_ahead.compile_pages_ahead(torch.bfloat16, 128, 4, "sum", table=True),
        best,
        triton_ahead.compile_probes_ahead(16),
        triton_ahead.compile_lists_ahead(torch.bfloat16, 128, 4),
        *triton_ahead.compile_lowbit_ahead(torch.bfloat16, 128, 4)[:2],
        *triton_ahead.compile_lowbit_ahead(torch.bfloat16, 128, 4, page=16, table=True),
        triton_ahead.compile_directions_ahead(torch.bfloat16, 128, 4, form, "sum"),
        triton_ahead.compile_directions_ahead(torch.bfloat16, 128, 4, plain, "sum", table=True),
        triton_ahead.compile_coded_ahead(torch.bfloat16, 128, 16, 4),
        triton_ahead.compile_merge_ahead(torch.bfloat16, 128),
        *triton_ahead.compile_product_codes_ahead(4, 4, 8),
        triton_ahead.compile_lowbit_ahead(torch.bfloat16, 128, 4)[1],  # the vote
    ]
    return [
        {"launched": vars(triton_ahead.report(kernel, known.vector_loads, known.row_bytes)), "ahead": vars(known)}
        for kernel, known in zip(built, facts, strict=True)
    ]


def elsewhere(what: str) -> Rows:
    """Runs this file as a script in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "error", __file__, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=ARCHES, ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest, once: Callable[[str, Callable[[Path], None]], Path]) -> Rows:
    def make(folder: Path) -> None:
        rows = elsewhere(str(request.param))
        (folder / "rows.json").write_text(json.dumps(rows))
        shown = {**tables.defined()["kernels"], "where": {}}  # of every head size
        print(tables.drawn(shown, kernels({}, [instructions(row) for row in rows]), {}))

    rows = json.loads((once(f"compiled-{request.param}", make) / "rows.json").read_text())
    assert {row["arch"] for row in rows} == {request.param}
    return rows


def test_every_variant_compiles(compiled: Rows) -> None:
    softmax = sum(vote == "softmax" for *_, vote, _ in PAGES) + sum(vote == "softmax" for *_, vote, _, _ in LOWBIT)
    each = len(VARIANTS) + len(MERGES) + len(PAGES) + softmax + len(PROBES) + len(LISTS) + 2 * len(LOWBIT) + len(BEST)
    each += 2 + 4  # the first of `DIRECTIONS` and of `CODED`, and four launches of the first of `PRODUCT_CODES`
    assert len(compiled) == each


def test_nothing_spills(compiled: Rows) -> None:
    for row in compiled:
        assert row["local_bytes"] == 0, row
        assert 0 < row["registers"] <= 255, row


def test_shared_memory_lets_two_programs_run_on_a_multiprocessor(compiled: Rows) -> None:
    """`attend_gpu.Tile.resident` counts on two; the driver keeps 1 KiB a program, and as much of the whole."""
    for row in compiled:
        assert 2 * (row["shared_bytes"] + 1024) <= (SHARED_KIB[row["arch"]] + 1) * 1024, row
        # Two programs of 4 warps share the registers of a multiprocessor. `pick_best` is of 16, for a list each.
        assert (512 if row["kernel"] == "pick_best" else 2 * 128) * row["registers"] <= 65536, row


def test_sixteen_bit_products_use_tensor_cores_and_float32_does_not(compiled: Rows) -> None:
    """float32 on tensor cores would be tf32, which keeps 11 bits."""
    for row in compiled:
        wants = row["dtype"] != "float32" and row["kernel"] in MULTIPLY
        assert bool(row["mma"]) == wants, row
        assert all(any(kind in name for kind in SIXTEEN) for name in row["mma"]), row


def test_rows_are_loaded_sixteen_bytes_at_once(compiled: Rows) -> None:
    """Whatever the span: a selection of single rows reads its rows as wide as one of pages.

    4-byte loads fetch spans, zones and tables, 8-byte ones a query too small to give each thread 16 bytes, 1-byte ones
    which pages are real, one 2-byte load the single query of listed keys.
    """
    others = {"attend_split": set(), "score_pages": {"1"}, "score_listed": {"2"}}
    for row in compiled:
        if row["kernel"] in others:
            assert row["loads"]["16"] >= row["vector_loads"] > 0, row
            assert set(row["loads"]) <= {"16", "8", "4"} | others[row["kernel"]], row
            assert row["loads"].get("8", 0) <= 1, row
            assert row["loads"].get("2", 0) <= 1, row


def test_codes_of_a_few_bits_are_loaded_sixteen_bytes_at_once(compiled: Rows) -> None:
    """Where a row's are a multiple of that; each of 80 channels' 20 bytes are 4 and 4."""
    seen = [row for row in compiled if row["kernel"] == "score_rows" and row["D"] * row["bits"] % 128 == 0]
    assert len(seen) >= 4
    for row in seen:
        assert row["loads"]["16"] >= max(row["vector_loads"], 1), row


def test_codes_of_rows_in_order_are_loaded_several_at_once(compiled: Rows) -> None:
    """As many as a thread has: 8 of 1,024 rows, 4 of 512. Lists of rows are read byte by byte."""
    seen = [row for row in compiled if row["kernel"] == "sum_rows" and not row.get("listed")]
    assert len(seen) == 2
    for row in seen:
        assert row["loads"]["1"] <= 8, "which rows are valid"
        assert row["loads"]["8" if row["dtype"] == "int32" else "4"] >= 1, row


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100], ids="sm_{}".format)
def test_product_codes_of_every_form_compile_without_spills(arch: int) -> None:
    rows = elsewhere(f"products-{arch}")
    assert len(rows) == 4 * len(PRODUCT_CODES)
    test_nothing_spills(rows)
    test_shared_memory_lets_two_programs_run_on_a_multiprocessor(rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100], ids="sm_{}".format)
def test_every_form_of_directions_compiles_without_spills(arch: int) -> None:
    rows = elsewhere(f"directions-{arch}")
    assert len(rows) == len(DIRECTIONS)
    test_nothing_spills(rows)
    test_shared_memory_lets_two_programs_run_on_a_multiprocessor(rows)
    test_sixteen_bit_products_use_tensor_cores_and_float32_does_not(rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_attention_over_rows_of_few_bits_fits_every_architecture(arch: int) -> None:
    """And reads codes sixteen bytes at once, where a row's are a multiple of that and a tile's are as many."""
    from sparseattn.kernels.attend_quantized import gpu as attend_quantized_gpu

    built = elsewhere(f"coded-{arch}")
    assert len(built) == len(CODED)
    test_nothing_spills(built)
    test_shared_memory_lets_two_programs_run_on_a_multiprocessor(built)
    for row in built:
        tile = attend_quantized_gpu.tile_of(getattr(torch, row["dtype"]).itemsize, row["D"], row["bits"])
        assert tile.resident * row["registers"] * 32 * tile.warps <= 65536, row
    test_sixteen_bit_products_use_tensor_cores_and_float32_does_not(built)
    for row in built:
        if row["dtype"] != "float32" and row["D"] * row["bits"] % 128 == 0:
            assert row["loads"]["16"] >= row["vector_loads"], row


@pytest.mark.slow
def test_compiling_ahead_gives_what_a_launch_compiles() -> None:
    for kernel in elsewhere("launch"):
        assert kernel["launched"] == kernel["ahead"]


if __name__ == "__main__":
    if sys.argv[1:] == ["launch"]:
        print(json.dumps(compile_a_launch()))
    elif sys.argv[1].startswith("directions-"):
        print(json.dumps(compile_directions(int(sys.argv[1].removeprefix("directions-")), DIRECTIONS)))
    elif sys.argv[1].startswith("products-"):
        print(json.dumps(compile_product_codes(int(sys.argv[1].removeprefix("products-")), PRODUCT_CODES)))
    elif sys.argv[1].startswith("coded-"):
        print(json.dumps(compile_coded(int(sys.argv[1].removeprefix("coded-")), CODED)))
    else:
        print(json.dumps([row for arch in sys.argv[1:] for row in compile_all(int(arch))]))
