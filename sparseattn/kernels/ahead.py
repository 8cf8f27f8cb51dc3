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
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparseattn.kernels import spans


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel for one GPU architecture."""

    registers: int  # per thread
    local_bytes: int  # stack per thread; a kernel without arrays has one only if registers spill
    shared_bytes: int  # per program
    mma: Counter[str]  # tensor-core instructions by name
    loads: Counter[int]  # instructions that read global memory, by the bytes that one thread reads
    vector_loads: int  # 16-byte instructions that load one tile of keys and one of values; 0 for the merge


def compile_ahead(
    dtype: torch.dtype, size: int, span: int, group: int, per_query_head: bool = False, arch: int = 90
) -> Compiled:
    """Compiles the attention kernel without a GPU, as a launch on a contiguous `[B,H,N,size]` cache would.

    `arch` is the compute capability times ten: 80 (A100), 90 (H100), 100 (B200).

    Raises:
        RuntimeError: in a process with TRITON_INTERPRET=1, where Triton does not compile.
    """
    constants, options = spans.launch(dtype.itemsize, size, span, group, 1 if per_query_head else group)
    element = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    steps = [1 << 20, 1 << 16, size]  # of b, h and n: what counts is which are multiples of 16
    arguments: list[str | int] = [*[element] * 3, *["*i32"] * 5, "*fp32", "*fp32", "i32", "i32", "fp32", *steps, *steps]
    tile_bytes = constants["BLOCK"] * constants["BLOCK_D"] * dtype.itemsize
    vector_loads = 2 * tile_bytes // (16 * 32 * options["num_warps"])
    return _compile(spans.attend_split, arguments, constants, options, arch, vector_loads)


def compile_merge_ahead(dtype: torch.dtype, size: int, arch: int = 90) -> Compiled:
    """As `compile_ahead`, for the kernel that merges the splits."""
    element = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    return _compile(spans.merge_splits, ["*fp32", "*fp32", element, "*fp32", "i32"], *spans.launch_merge(size), arch, 0)


def _compile(
    kernel: triton.JITFunction,
    arguments: list[str | int],
    constants: dict[str, int],
    options: dict[str, Any],
    arch: int,
    vector_loads: int,
) -> Compiled:
    """`arguments` in order: a pointer or unspecialised scalar by its type, a specialised integer by its value."""
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("Triton does not compile in a process with TRITON_INTERPRET=1; start one without it")
    # A launch specialises on its arguments: aligned pointers (torch allocates at multiples of 256 bytes), integers
    # that are multiples of 16, and 1, which becomes a constant. Without these facts loads would not be vectorised.
    signature: dict[str, str] = {}
    constexprs: dict[str, int] = dict(constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if argument == 1:
            constexprs[name] = 1
            continue
        signature[name] = argument if isinstance(argument, str) else "i32"
        if argument[0] == "*" if isinstance(argument, str) else argument % 16 == 0:
            attributes[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(kernel, signature, constexprs, attributes)
    return report(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options), vector_loads)


def report(built: triton.compiler.CompiledKernel, vector_loads: int) -> Compiled:
    """Reads what a compiled kernel says of itself."""
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
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
