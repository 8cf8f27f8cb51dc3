"""The best rows or pages by their scores in Triton: the least of the best scores is found bit by bit, in registers.

torch's top-k runs one block of threads a list where a list has a few thousand scores, and over a dozen launches where
it has more. Here a program holds up to `HELD` scores. Longer lists are cut into parts, and the best of their best are
taken.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# NOT MEASURED on a GPU yet: from the compiler's reports, without spills (docs/lab/kernels.md).
HELD = 8_192  # scores of a program: 16 a thread of 16 warps


@triton.jit(do_not_specialize=["total", "count", "page"])
def pick_best(
    scores,  # [lists,total] float32
    names,  # [lists,total] int32: of the scores, -1 for none; None: their places
    ids,  # [lists,parts,count] int32: names of the best, -1 where there are fewer; or first rows of pages, 0 there
    values,  # [lists,parts,count] float32, their scores, -inf where there are fewer; None: not asked for
    length,  # [lists,parts,count] int32, rows of pages, 0 where there are fewer; None: `ids` are names
    total,
    count,
    page,
    BLOCK: tl.constexpr,  # scores of a program
    SLOTS: tl.constexpr,  # at least `count`
    STEP: tl.constexpr,  # of `SLOTS` at once
):
    part, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = part * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    score = tl.load(scores + which * total + place, mask=inside, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # the two zeros are equal
    # Unsigned numbers in the order of the scores: the larger a score, the larger its key.
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    real = score != float("-inf")
    wanted = tl.minimum(tl.sum(real.to(tl.int32)), count)
    least = tl.zeros([], tl.uint32)  # the largest key that so many reach
    for step in range(32):
        tried = least | (tl.full([], 1, tl.uint32) << (31 - step))
        least = tl.where(tl.sum((real & (key >= tried)).to(tl.int32)) >= wanted, tried, least)
    above, equal = real & (key > least), real & (key == least)
    spare = wanted - tl.sum(above.to(tl.int32))  # how many of those with the least key are among the best
    # Both counts of what lies before a place, in one pass: there are fewer than 2^16 of each.
    mark = above.to(tl.int32) * 65536 + equal.to(tl.int32)
    before = tl.cumsum(mark, 0) - mark
    ties = before & 65535
    chosen = above | (equal & (ties < spare))
    slot = (before >> 16) + tl.minimum(ties, spare)
    out = (which * tl.num_programs(0) + part) * count
    name = place if names is None else tl.load(names + which * total + place, mask=inside, other=-1)
    tl.store(ids + out + slot, name if length is None else name * page, mask=chosen)
    if values is not None:
        tl.store(values + out + slot, score, mask=chosen)
    if length is not None:
        tl.store(length + out + slot, name * 0 + page, mask=chosen)
    for first in range(0, SLOTS, STEP):  # a part at a time: whole, what lies behind the best took registers to memory
        rest = first + tl.arange(0, STEP)
        left = (rest >= wanted) & (rest < count)
        tl.store(ids + out + rest, tl.full([STEP], -1 if length is None else 0, tl.int32), mask=left)
        if values is not None:
            tl.store(values + out + rest, tl.full([STEP], float("-inf"), tl.float32), mask=left)
        if length is not None:
            tl.store(length + out + rest, tl.zeros([STEP], tl.int32), mask=left)


def launch(total: int, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants and options of `pick_best`, for a launch and for compiling ahead alike."""
    block = min(HELD, max(128, triton.next_power_of_2(total)))
    slots = triton.next_power_of_2(count)
    constants = {"BLOCK": block, "SLOTS": slots, "STEP": min(slots, 512)}
    return constants, {"num_warps": max(4, block // 512), "enable_fp_fusion": True}


def best_rows(scores: Tensor, count: int) -> Tensor:
    """As `dispatch.best_rows`, of equal scores the first, in the order of the rows; -1 at the end."""
    count = min(count, scores.shape[-1])
    return _picked(scores, count, 0)[0] if _fits(scores.shape[-1], count) else _sorted(scores, count)


def best_pages(scores: Tensor, count: int, page: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_pages`, of equal scores the first, in the order of the pages; those of length 0 at the end."""
    count = min(count, scores.shape[-1])
    if _fits(scores.shape[-1], count):
        start, length = _picked(scores, count, page)
        assert length is not None
        return start, length
    names = _sorted(scores, count)
    return names.clamp(min=0) * page, (names >= 0).int() * page


def _sorted(scores: Tensor, count: int) -> Tensor:
    """Return what `best_rows` does, of lists that would not shrink by being cut, by torch's sorts."""
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    names = ordered.indices[..., :count].masked_fill(ordered.values[..., :count].isneginf(), scores.shape[-1])
    names = names.sort(-1).values
    return names.masked_fill(names == scores.shape[-1], -1).int()


def _fits(total: int, count: int) -> bool:
    """Whether lists shrink by being cut: the best of all parts are at most half of what there is."""
    return total <= HELD or 2 * triton.cdiv(total, HELD) * count <= total


def _picked(scores: Tensor, count: int, page: int) -> tuple[Tensor, Tensor | None]:
    """Return names `[B,Hs,S]`, or of pages the first rows and the lengths."""
    batch, chosen, total = scores.shape
    shape = (batch, chosen, count)
    if not batch * chosen * count:
        empty = torch.empty(shape, dtype=torch.int32, device=scores.device)
        return empty, empty.clone() if page else None
    values: Tensor | None = scores.float().reshape(-1, total)
    names: Tensor | None = None
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        while True:
            assert values is not None
            given, lists, total = values, *values.shape
            parts = triton.cdiv(total, HELD)
            last = parts == 1
            ids = torch.empty(lists, parts * count, dtype=torch.int32, device=scores.device)
            length = torch.empty_like(ids) if last and page else None
            values = None if last else torch.empty(ids.shape, dtype=torch.float32, device=scores.device)
            constants, options = launch(total, count)
            pick_best[parts, lists](given, names, ids, values, length, total, count, page, **constants, **options)
            if last:
                return ids.view(shape), None if length is None else length.view(shape)
            names = ids
