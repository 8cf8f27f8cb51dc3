"""`attend` as one fused Triton kernel: reads exactly the rows a selection names, in place, at decode time.

A program serves one selection head of one sequence (all query heads that share it) and one split of the list of places

    S*span places of the selection | sink rows | recent rows

of which lane i of a tile of BLOCK takes place `first + i`. Selection places come first so that a tile, which begins at
a multiple of BLOCK, never straddles two spans of BLOCK rows or more: its rows are then one run of memory.

Everything that depends on data (zones, spans, shares of the splits) is computed inside the kernel; the grid and the
partials depend on capacities alone. So a launch never synchronises with the host and a CUDA graph may capture it.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.selection import Bounds, Selection

LOG2E = math.log2(math.e)


@triton.jit
def _softmax_step(logits, peak, total):
    """One step of the online softmax: a tile of base-2 logits `[M,BLOCK]` joins the running `peak`, `total` `[M]`.

    Returns the tile's weights `[M,BLOCK]`, the factor `[M]` by which whatever was summed before must shrink, and the
    new peak and total. Where nothing was read yet the peak is -inf, and -inf - -inf would be NaN: hence the anchor.
    """
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - anchor[:, None])
    shrink = tl.exp2(peak - anchor)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def _softmax_end(acc, peak, total):
    """Output `[M,D]` and natural-log lse `[M]` of a finished online softmax; 0 and -inf where no row was read."""
    none = total == 0.0
    safe = tl.where(none, 1.0, total)
    lse = tl.where(none, float("-inf"), (peak + tl.log2(safe)) * 0.6931471805599453)  # ln 2
    return acc / safe[:, None], lse


# `slots` and `base` are not specialised: they only offset gathers, and a new budget must not compile a new kernel.
@triton.jit(do_not_specialize=["slots", "base"])
def attend_split(
    query,  # [B,H,G,D]
    keys,  # [B,H,N,D], any strides but the last
    values,  # [B,H,N,D], likewise
    start,  # [B,Hs,S]
    length,  # [B,Hs,S]
    sinks,  # [B]
    sealeds,  # [B]
    ends,  # [B]
    out,  # [B,H,G,splits,D]
    lse,  # [B,H,G,splits]
    slots,
    base,
    scale_log2,
    key_step_b,
    key_step_h,
    key_step_n,
    value_step_b,
    value_step_h,
    value_step_n,
    G: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of one selection head: G or 1
    D: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chosen, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    selection_head = b.to(tl.int64) * tl.num_programs(0) + chosen  # of B*Hs
    kv_head = chosen * SHARE // G

    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    # Rows of `query`, `out` and `lse`. Padded lanes (g >= SHARE) carry a zero query: finite, never stored.
    query_row = selection_head * SHARE + g  # [BLOCK_G]
    served = g < SHARE
    q = tl.load(query + query_row[:, None] * D + d, mask=served[:, None] & (d < D), other=0.0)  # [BLOCK_G,BLOCK_D]

    sink, sealed, end = tl.load(sinks + b), tl.load(sealeds + b), tl.load(ends + b)
    selected = slots * SPAN
    places = selected + sink + tl.maximum(end - sealed, 0)
    tiles = tl.cdiv(places, BLOCK)
    begin, stop = tiles * split // splits * BLOCK, tiles * (split + 1) // splits * BLOCK

    start += selection_head * slots
    length += selection_head * slots
    keys += b.to(tl.int64) * key_step_b + kv_head.to(tl.int64) * key_step_h
    values += b.to(tl.int64) * value_step_b + kv_head.to(tl.int64) * value_step_h

    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(begin, stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        slot, offset = place // SPAN, place % SPAN
        is_slot = place < selected
        chosen_row = base + tl.load(start + slot, mask=is_slot, other=0) + offset
        used = is_slot & (offset < tl.load(length + slot, mask=is_slot, other=0)) & (chosen_row < sealed)
        dense = place - selected
        dense_row = tl.where(dense < sink, dense, dense - sink + sealed)
        reads = used | ((dense >= 0) & (place < places))  # [BLOCK]
        row = tl.where(is_slot, chosen_row, dense_row).to(tl.int64)

        # Rows that are not read become zeros, never what lies in storage: that may be NaN, and 0 * NaN is NaN.
        mask = reads[:, None] & (d < D)
        k = tl.load(keys + row[:, None] * key_step_n + d, mask=mask, other=0.0)  # [BLOCK,BLOCK_D]
        v = tl.load(values + row[:, None] * value_step_n + d, mask=mask, other=0.0)
        # "ieee": float32 inputs must not be rounded to tf32. It changes nothing for 16-bit inputs.
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_G,BLOCK] base 2
        logits = tl.where(reads, logits, float("-inf"))
        weights, shrink, peak, total = _softmax_step(logits, peak, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    # A split without places still writes 0 and -inf: the partials are not initialised.
    acc, split_lse = _softmax_end(acc, peak, total)
    part = query_row * splits + split
    tl.store(out + part[:, None] * D + d, acc.to(out.dtype.element_ty), mask=served[:, None] & (d < D))
    tl.store(lse + part, split_lse, mask=served)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    parts,  # [B*H*G,splits,D] float32
    part_lse,  # [B*H*G,splits] float32
    out,  # [B*H*G,D]
    lse,  # [B*H*G]
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`merge` over the splits of one query head: an online softmax whose logits are the lse and values the outputs."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        real = split < splits
        part = head * splits + split
        logits = tl.load(part_lse + part, mask=real, other=float("-inf")) * 1.4426950408889634  # log2 e
        values = tl.load(parts + part[:, None] * D + d, mask=real[:, None] & (d < D), other=0.0)  # [CHUNK,BLOCK_D]
        weights, shrink, peak, total = _softmax_step(logits[None, :], peak, total)
        acc = acc * shrink[:, None] + tl.sum(tl.trans(weights) * values, 0)[None, :]
    acc, merged = _softmax_end(acc, peak, total)
    tl.store(out + head * D + d[None, :], acc.to(out.dtype.element_ty), mask=d[None, :] < D)
    tl.store(lse + head + tl.arange(0, 1), merged)


# Rows of a tile, warps and pipeline stages, by (bytes of an element, padded head size). Chosen from what the compiler
# reports, not timed, for no GPU was at hand: nothing spills (at most 146 registers), and two programs fit the shared
# memory of an A100's multiprocessor (164 KiB), three that of an H100 (228 KiB). Rows are reached through the spans, two
# loads deep, and Triton divides the stages between the two: 5 keep two tiles of rows in flight, 3 and 4 only one.
# float32 is multiplied without tensor cores and keeps its operands in registers: 32 rows of D = 128 would spill.
TILES = {
    (2, 16): (64, 4, 5),
    (2, 32): (64, 4, 5),
    (2, 64): (64, 4, 5),
    (2, 128): (64, 4, 5),
    (2, 256): (32, 4, 5),
    (4, 16): (64, 4, 5),
    (4, 32): (64, 4, 5),
    (4, 64): (64, 4, 5),
    (4, 128): (16, 4, 5),
    (4, 256): (16, 4, 3),
}
CHUNK = 16  # splits merged at once: [16,256] float32 is 32 registers a thread of 4 warps
PROGRAMS_PER_SM = 2
MOST_SPLITS = 128


def launch(itemsize: int, size: int, span: int, group: int, share: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Compile-time constants and options of `attend_split`, for a launch and for compiling ahead alike.

    `group` is G, `share` the query heads of one selection head. Contracting a*b+c to one rounding is asked for by name
    because Triton 3.9 warns where its default decides.
    """
    block_d = max(16, triton.next_power_of_2(size))  # 16: the least that tl.dot multiplies
    block, warps, stages = TILES[itemsize, block_d]
    constants = {
        "G": group,
        "SHARE": share,
        "D": size,
        "SPAN": span,
        "BLOCK_G": max(16, triton.next_power_of_2(share)),
        "BLOCK_D": block_d,
        "BLOCK": block,
    }
    return constants, {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def launch_merge(size: int) -> tuple[dict[str, int], dict[str, Any]]:
    """As `launch`, for `merge_splits`."""
    block_d = max(16, triton.next_power_of_2(size))
    return {"D": size, "BLOCK_D": block_d, "CHUNK": CHUNK}, {"num_warps": 4, "enable_fp_fusion": True}


def _splits(programs: int, places: int, block: int, device: torch.device) -> int:
    """Splits of each of `programs` lists, from capacities: as many as let all programs run at once.

    Rounded down, so that there is one wave without a tail; each split has a tile to read when the list is as long as it
    can get. Interpreted programs run one after the other, where splitting gains nothing.
    """
    if device.type != "cuda":
        return 1
    at_once = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(at_once // programs, triton.cdiv(places, block), MOST_SPLITS))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    *,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sparseattn.kernels.attend`, accumulated in float32; keys and values are views of any strides but the last.

    `splits` overrides how many programs share each list of rows.

    Raises:
        ValueError: keys or values whose elements of one row are not adjacent.
    """
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"the Triton kernel reads rows whose elements are adjacent: the last stride of keys and values must be 1, "
            f"got {keys.stride(-1)} and {values.stride(-1)}"
        )
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    constants, options = launch(query.element_size(), size, selection.span, group, heads * group // chosen)
    if splits is None:
        # The recent rows' capacity is not known apart from N, the rows that the storage holds.
        capacity = bounds.base + slots * selection.span + keys.shape[2]
        splits = _splits(batch * chosen, capacity, constants["BLOCK"], query.device)

    out = torch.empty(batch, heads, group, size, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, group, dtype=torch.float32, device=query.device)
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(batch, heads, group, splits, size, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(batch, heads, group, splits, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_split[chosen, splits, batch](
            query.contiguous(),
            keys,
            values,
            selection.start.contiguous(),
            selection.length.contiguous(),
            bounds.sink.contiguous(),
            bounds.sealed.contiguous(),
            bounds.rows.contiguous(),
            parts,
            part_lse,
            slots,
            bounds.base,
            scale * LOG2E,
            *keys.stride()[:3],
            *values.stride()[:3],
            **constants,
            **options,
        )
        if splits > 1:
            constants, options = launch_merge(size)
            merge_splits[batch * heads * group,](parts, part_lse, out, lse, splits, **constants, **options)
    return out, lse
