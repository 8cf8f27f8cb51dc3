"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory, width of loads.

Compile-time facts, not speed. The kernels, their constants and options are those of a launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparseattn.kernels.attend import gpu as attend_gpu
from sparseattn.kernels.attend_quantized import gpu as attend_quantized_gpu
from sparseattn.kernels.bucket_spans import gpu as bucket_spans_gpu
from sparseattn.kernels.group_vote import gpu as group_vote_gpu
from sparseattn.kernels.listed_scores import gpu as listed_scores_gpu
from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu
from sparseattn.kernels.page_directions import gpu as page_directions_gpu
from sparseattn.kernels.page_directions.reference import Form
from sparseattn.kernels.product_codes import gpu as product_codes_gpu
from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu
from sparseattn.kernels.quantized_keys import gpu_listed, packing
from sparseattn.kernels.topk import gpu as topk_gpu

ELEMENT = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
Arguments = list[str | int | None]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel for one GPU architecture."""

    registers: int  # per thread
    local_bytes: int  # stack per thread; a kernel without arrays has one only if registers spill
    shared_bytes: int  # per program
    mma: Counter[str]  # tensor-core instructions by name
    loads: Counter[int]  # instructions that read global memory, by the bytes that one thread reads
    vector_loads: int  # 16-byte instructions that load one tile of the rows; 0 where the kernel reads no rows
    row_bytes: float  # read for one row (one page's bounds, one run) with its share of what names it; 0 for the merge


def compile_ahead(
    dtype: torch.dtype,
    size: int,
    span: int,
    group: int,
    per_query_head: bool = False,
    arch: int = 90,
    page: int = 0,
    bias: bool = False,
) -> Compiled:
    """Compiles the attention kernel without a GPU, as a launch on a contiguous `[B,H,N,size]` cache would.

    `arch` is the compute capability times ten: 80 (A100), 90 (H100), 100 (B200). `page`: rows of a block of a paged
    store `[blocks,H,page,size]`, 0 if there is none. `bias`: whether the selection has one.

    Raises:
        RuntimeError: in a process with TRITON_INTERPRET=1, where Triton does not compile.
    """
    constants, options = attend_gpu.launch(dtype.itemsize, size, span, group, 1 if per_query_head else group, page)
    element, table = ELEMENT[dtype], "*i32" if page else None
    steps = [1 << 20, 1 << 16, size]  # of b, h and n: what counts is which are multiples of 16
    arguments: Arguments = [*[element] * 3, "*i32", "*i32", "*fp32" if bias else None, *["*i32"] * 3]
    arguments += [table, "*fp32", "*fp32"]
    arguments += ["i32", "i32", "i32", "fp32", *steps, *steps]
    tile_bytes = 2 * constants["BLOCK"] * constants["BLOCK_D"] * dtype.itemsize
    row_bytes = 2 * size * dtype.itemsize + (12 if bias else 8) / span + (4 if page else 0)
    return _compile(attend_gpu.attend_split, arguments, constants, options, arch, tile_bytes, row_bytes)


def compile_coded_ahead(
    dtype: torch.dtype,
    size: int,
    span: int,
    group: int,
    bits: int = 8,
    rows: int = 32,
    per_query_head: bool = False,
    arch: int = 90,
    bias: bool = False,
) -> Compiled:
    """As `compile_ahead`, for attention over rows of `bits` bits, whose keys share levels in groups of `rows`.

    `row_bytes` is of a row that is read with all others of its group.
    """
    constants, options = attend_quantized_gpu.launch(
        dtype.itemsize, size, bits, rows, span, group, 1 if per_query_head else group
    )
    kept = "*bf16" if dtype == torch.float32 else ELEMENT[dtype]
    wide, parts = constants["WIDE"], constants["PARTS"]
    arguments: Arguments = [ELEMENT[dtype], "*u8", kept, "*u8", kept, "*i32", "*i32", "*fp32" if bias else None]
    arguments += ["*fp32", "*fp32", "i32", "i32", "fp32"]
    for step in (wide, 2 * size, wide, 2 * parts):  # of b, h and n: what counts is which are multiples of 16
        arguments += [1 << 20, 1 << 16, step]
    tile_bytes = 2 * constants["BLOCK"] * constants["BLOCK_W"]
    row_bytes = 2 * wide + 4 * parts + 4 * size / rows + (12 if bias else 8) / span
    return _compile(attend_quantized_gpu.attend_codes, arguments, constants, options, arch, tile_bytes, row_bytes)


def compile_merge_ahead(dtype: torch.dtype, size: int, arch: int = 90) -> Compiled:
    """As `compile_ahead`, for the kernel that merges the splits."""
    arguments: Arguments = ["*fp32", "*fp32", ELEMENT[dtype], "*fp32", "i32"]
    return _compile(attend_gpu.merge_splits, arguments, *attend_gpu.launch_merge(size), arch)


def compile_pages_ahead(
    dtype: torch.dtype,
    size: int,
    group: int,
    vote: str = "sum",
    arch: int = 90,
    *,
    int8: bool = False,
    table: bool = False,
) -> list[Compiled]:
    """As `compile_ahead`, for Quest: the scores of pages, two kernels for "softmax".

    `table`: the bounds lie in a store that sequences share, as `page_bounds.gpu.scores_at` reads them.
    """
    constants, options = page_bounds_gpu.launch(dtype.itemsize, size, group, vote)
    element, softmax, kept = ELEMENT[dtype], vote == "softmax", 1 if int8 else dtype.itemsize
    steps = [0, size, 1 << 16] if table else [1 << 20, 1 << 16, size]  # of b, h and a page
    bounds: Arguments = ["*i8", "*i8", "*fp32"] if int8 else [element, element, None]
    arguments: Arguments = [element, *bounds, *((None, "*i32") if table else ("*i1", None))]
    arguments += ["*fp32", "*fp32" if softmax else None, "i32", "i32", "fp32"]
    tile_bytes = 2 * constants["BLOCK"] * constants["BLOCK_D"] * kept
    row_bytes = 2 * size * kept + (4 if table else 1)
    arguments += [*steps, *steps]
    compiled = [_compile(page_bounds_gpu.score_pages, arguments, constants, options, arch, tile_bytes, row_bytes)]
    if softmax:
        arguments = ["*fp32", "*fp32", "*fp32", "i32", "i32"]
        compiled.append(
            _compile(
                group_vote_gpu.vote_softmax,
                arguments,
                *group_vote_gpu.launch(group, page_bounds_gpu.VOTE_BLOCK),
                arch,
                row_bytes=4 * group,
            )
        )
    return compiled


def compile_best_ahead(total: int, count: int, arch: int = 90, *, page: bool = False, part: bool = False) -> Compiled:
    """As `compile_ahead`, for the best of `total` scores: rows, or pages. `part`: of a list that is cut into parts."""
    arguments: Arguments = ["*fp32", None, "*i32", "*fp32" if part else None, "*i32" if page else None]
    arguments += ["i32", "i32", "i32"]
    return _compile(topk_gpu.pick_best, arguments, *topk_gpu.launch(total, count), arch, row_bytes=4)


def compile_directions_ahead(
    dtype: torch.dtype, size: int, group: int, form: Form, vote: str = "softmax", arch: int = 90, *, table: bool = False
) -> Compiled:
    """As `compile_ahead`, for pages by mean and directions; the vote's second launch is that of `compile_pages_ahead`.

    Numbers of 16 bits are of the dtype, and bfloat16 for float32, as the selectors keep them.
    """
    constants, options = page_directions_gpu.launch(dtype.itemsize, size, group, vote, form)
    element = ELEMENT[dtype]
    kept = "*bf16" if dtype == torch.float32 else element
    coded = kept if form.bits == 16 else "*i8"
    wide = size + form.rank * (-(-size // 2) if form.bits == 4 else size)
    many = form.steps + form.rest
    rows = form.rank * form.page // (2 if form.bits == 4 else 1) if form.kind == "clse" else 0
    arguments: Arguments = [element, coded, kept if many else None, coded if rows else None]
    arguments += [None, "*i32"] if table else ["*i1", None]
    arguments += ["*fp32", "*fp32" if vote == "softmax" else None, "i32", "i32", "fp32", "fp32"]
    for length in (wide, many, rows):  # steps of b, h and an entry
        arguments += ([0, length, 1 << 16] if table else [1 << 20, 1 << 16, length]) if length else [0, 0, 0]
    each = 2 if form.bits == 16 else 1
    row_bytes = each * (wide + rows) + 2 * many + (4 if table else 1)
    tile_bytes = constants["BLOCK"] * constants["CHUNK"] * each
    return _compile(page_directions_gpu.score_directions, arguments, constants, options, arch, tile_bytes, row_bytes)


class FewBits(NamedTuple):
    """How `lowbit` keeps keys: bits of a code, rows of a group, and bits of a level."""

    bits: int = 2
    rows: int = 64
    scales: int = 16


LOWBIT = FewBits()


def compile_lowbit_ahead(
    dtype: torch.dtype,
    size: int,
    group: int,
    form: FewBits = LOWBIT,
    page: int = 1,
    vote: str = "softmax",
    arch: int = 90,
    table: bool = False,
) -> list[Compiled]:
    """As `compile_ahead`, for `lowbit`: scores of every row (two kernels for "softmax"), then those of listed pages.

    `table`: entries lie in a store that sequences share, as `quantized_keys.dispatch.scores_at` reads them.

    Levels of 16 bits are of the dtype, and bfloat16 for float32, as the selector keeps them.
    """
    bits, rows, scales = form
    constants, options = quantized_keys_gpu.launch(dtype.itemsize, size, group, vote, bits, rows, page)
    element, softmax = ELEMENT[dtype], vote == "softmax"
    kept = "*bf16" if dtype == torch.float32 else element
    levels: Arguments = [kept, kept, None] if scales == 16 else ["*i8", "*u8", "*fp32"]
    wide = 4 * packing.words(size, bits)
    inputs: Arguments = [element, "*u8", *levels]
    steps: Arguments = [1 << 20, 1 << 16, rows * wide, 1 << 20, 1 << 16, size, 1 << 20, 1 << 16, size]
    stored: Arguments = [0, 1 << 16, rows * wide, 0, 1 << 16, size, 0, 1 << 16, size] if table else steps
    row_bytes = wide + scales * size / (4 * rows) + (4 / rows if table else 1)
    where: Arguments = [None, "*i32"] if table else ["*i1", None]
    arguments = [*inputs, *where, "*fp32", "*fp32" if softmax else None, "i32", "i32", "fp32", *stored]
    tile_bytes = constants["PART"] * constants["BLOCK_W"]
    compiled = [_compile(quantized_keys_gpu.score_rows, arguments, constants, options, arch, tile_bytes, row_bytes)]
    if softmax:
        arguments = ["*fp32", "*fp32", "*fp32", "i32", "i32"]
        vote_constants, vote_options = group_vote_gpu.launch(group, quantized_keys_gpu.VOTE_BLOCK)
        compiled.append(
            _compile(group_vote_gpu.vote_softmax, arguments, vote_constants, vote_options, arch, row_bytes=4 * group)
        )
    each = group if vote == "each" else 1
    constants, options = gpu_listed.launch_listed(dtype.itemsize, size, group // each, each, bits, rows)
    arguments = [*inputs, "*i1", "*i64", "*fp32", "i32", "i32", "i32", "i32", "fp32", *steps]
    tile_bytes = constants["BLOCK"] * constants["BLOCK_W"]
    return [
        *compiled,
        _compile(gpu_listed.score_listed_rows, arguments, constants, options, arch, tile_bytes, row_bytes),
    ]


def compile_product_codes_ahead(group: int, bits: int, count: int, arch: int = 90) -> list[Compiled]:
    """As `compile_ahead`, for `querypq`: whole sums of every row of `count` bytes, how far these are below the best,
    logits of every row, and logits of listed ones. The vote of these is that of `compile_pages_ahead`."""
    compiled = []
    for whole, listed in ((True, False), (False, False), (False, True)):
        constants, options = product_codes_gpu.launch(-(-group // 2) if whole else group, bits, count, not listed)
        kind = "*i32" if whole else "*fp32"
        facts = kind if listed else None
        arguments: Arguments = [kind, "*u8", "*i1", "*i32" if listed else None, kind, facts, "i32", "i32"]
        arguments += [1 << 20, 1 << 16, 1 << 12]  # steps of b, h and a byte
        tile_bytes = 0 if listed else constants["BLOCK"]
        row_bytes = count + (5 if listed else 1)
        compiled.append(
            _compile(product_codes_gpu.sum_rows, arguments, constants, options, arch, tile_bytes, row_bytes)
        )
    constants, options = product_codes_gpu.launch_tops(group)
    arguments = ["*i32", "*i32", "*i1", "*fp32", "i32", "i32", "i32"]
    row_bytes = 4 * constants["LINES"] + 1
    below = _compile(product_codes_gpu.below_tops, arguments, constants, options, arch, row_bytes=row_bytes)
    return [compiled[0], below, *compiled[1:]]


def compile_probes_ahead(span: int, each: int = 1, buckets: int = 1024, arch: int = 90) -> Compiled:
    """As `compile_ahead`, for SAAP's probing with a table of 8 segments of `buckets`."""
    constants = {"EACH": each, "SPAN": span, "CHUNK": bucket_spans_gpu.CHUNK, "TILE": bucket_spans_gpu.TILE}
    steps = [64 * (buckets + 2), 8 * (buckets + 2), buckets + 2]
    arguments: Arguments = ["*i64", "*i32", "*i32", "*i32", "i32", "i32", "i32", "i32", *steps]
    return _compile(bucket_spans_gpu.cut_runs, arguments, constants, bucket_spans_gpu.OPTIONS, arch, row_bytes=16)


def compile_lists_ahead(dtype: torch.dtype, size: int, group: int, arch: int = 90) -> Compiled:
    """As `compile_ahead`, for QueryBridge's scores of listed keys."""
    constants = {"G": group, "D": size, "BLOCK_D": triton.next_power_of_2(size), "BLOCK": listed_scores_gpu.BLOCK}
    arguments: Arguments = [ELEMENT[dtype], ELEMENT[dtype], "*i32", "*fp32", "i32", 1 << 20, 1 << 16, size]
    tile_bytes = constants["BLOCK"] * constants["BLOCK_D"] * dtype.itemsize
    row_bytes = size * dtype.itemsize + 4
    return _compile(
        listed_scores_gpu.score_listed, arguments, constants, listed_scores_gpu.OPTIONS, arch, tile_bytes, row_bytes
    )


def _compile(
    kernel: triton.JITFunction,
    arguments: Arguments,
    constants: dict[str, Any],
    options: dict[str, Any],
    arch: int,
    tile_bytes: int = 0,
    row_bytes: float = 0,
) -> Compiled:
    """`arguments` in order: a pointer or unspecialised scalar by its type, a specialised integer by its value, None."""
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("Triton does not compile in a process with TRITON_INTERPRET=1; start one without it")
    # A launch specialises on its arguments: aligned pointers (torch allocates at multiples of 256 bytes), integers
    # that are multiples of 16, and 1, which becomes a constant. Without these facts loads would not be vectorised.
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = dict(constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if argument is None or argument == 1:
            constexprs[name] = argument
            continue
        signature[name] = argument if isinstance(argument, str) else "i32"
        if argument[0] == "*" if isinstance(argument, str) else argument % 16 == 0:
            attributes[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(kernel, signature, constexprs, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return report(built, tile_bytes // (16 * 32 * built.metadata.num_warps), row_bytes)


def report(built: triton.compiler.CompiledKernel, vector_loads: int, row_bytes: float) -> Compiled:
    """Read what a compiled kernel says of itself; the last two are given."""
    usage = _resource_usage(built.asm["cubin"])
    ptx = built.asm["ptx"]
    loads = Counter(int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?\], (\w+)", ptx))
    for vector, bits in re.findall(r"ld\.global(?:\.\w+::\w+)*(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        loads[int(vector or 1) * int(bits) // 8] += 1
    return Compiled(
        registers=usage["REG"],
        local_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=built.metadata.shared,
        mma=Counter(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*", ptx)),
        loads=loads,
        vector_loads=vector_loads,
        row_bytes=row_bytes,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
