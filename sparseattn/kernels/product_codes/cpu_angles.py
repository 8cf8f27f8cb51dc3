"""What compiled code reads of a RoPE to turn one key to all positions, see `cpu_turning`.

Positions are taken in blocks of `WIDE`, and blocks `TOGETHER` at a time. A pair that turns by no more than `FARTHEST`
within half a block is a polynomial there, and all such pairs are one polynomial. Its terms come from blocks together in
the same way: of those pairs, the ones that turn little within half of these are a polynomial again.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparseattn.kernels.numba_centroids import VECTORS
from sparseattn.kernels.numba_vectors import FEATURES, LANES
from sparseattn.kernels.product_codes.codes import Turning
from sparseattn.kernels.product_codes.missed_rows import record_bytes

# Registers of half a block's positions, and blocks that are worked on at once: their sums fill a processor's registers.
STRIPES, OUTPUTS = (2, 4) if "+avx512f" in FEATURES else (1, 2)
HALF = STRIPES * LANES
WIDE = 2 * HALF
TERMS, FARTHEST = 6, 1.61  # of a polynomial, and the largest angle: it is off by a 730th of what its pairs add at most
TOGETHER = 8  # blocks
AT_ONCE = 8 * TOGETHER  # blocks whose terms are made at once
COLUMNS = TOGETHER * TERMS
# The terms by which of the two sums of a block they are in: what is alike on both sides of its middle, and what is not.
ORDER = (0, 2, 4, 1, 3, 5)
# Of `turning_numbers`, and where among them the number of blocks is, and where those of rows that codes miss begin.
NUMBERS, BLOCKS_AT, MISSED_AT = 24, 15, 20
NONE_ADDED: Any = np.zeros(NUMBERS, np.int64)
IRREGULAR = -(1 << 62)


class Angles(NamedTuple):
    """What is read of a RoPE whose pairs are in three lists, each filled up to whole registers, one at least.

    Args:
        order: `[F + M + S]` int64, which pair is which, -1 for one that fills up: those that turn by more than
            `FARTHEST` within half a block, F; of the others those that do within half of blocks together, M; and the
            slowest, S.
        quick: how many of the F are pairs.
        far: `[blocks,2F]`, cosines and sines at the middle of each block.
        near: `[2,quick + TERMS / 2,HALF]`, at the positions of a block's second half: cosines and even powers of the
            position, where half a block is 1; then sines and odd powers.
        wide_far: `[blocks / TOGETHER,2M + 2S]`, cosines and sines at the middle of blocks together.
        wide_near: `[COLUMNS / VECTORS,2M + TERMS,VECTORS]`: what cosine and sine of the M, and the terms of the
            slowest, count for in each term of each block, terms in their `ORDER`.
        slow: `[TERMS,S]`, what the slowest count for in each term of blocks together.
    """

    order: Tensor
    quick: int
    far: Tensor
    near: Tensor
    wide_far: Tensor
    wide_near: Tensor
    slow: Tensor


@functools.lru_cache(maxsize=16)
def angles_of(frequencies: tuple[float, ...], first: int, blocks: int) -> Angles:
    """Return those of a RoPE whose pairs turn by these radians a position, for so many blocks from the `first` on, a
    multiple of `TOGETHER`."""
    turns = torch.tensor(frequencies)
    order = turns.argsort(descending=True, stable=True)
    quick, middling = (int((turns * reach > FARTHEST).sum()) for reach in (HALF, TOGETHER * HALF))
    lists = []
    for part in order.tensor_split([quick, middling]):
        fill = -len(part) % LANES if len(part) else LANES
        lists.append(torch.nn.functional.pad(part, (0, fill), value=-1))
    quickest, second, third = (turns[part.clamp(min=0)] for part in lists)
    apart, power = torch.arange(HALF) + 0.5, torch.arange(TERMS)[:, None]
    within, powers = turns[order[:quick]][:, None] * apart, (apart / HALF) ** power
    near = torch.stack([torch.cat([within.cos(), powers[::2]]), torch.cat([within.sin(), powers[1::2]])])
    return Angles(
        torch.cat(lists),
        quick,
        _at(WIDE, first, blocks, quickest),
        near.contiguous(),
        torch.cat([_at(TOGETHER * WIDE, first // TOGETHER, blocks // TOGETHER, part) for part in (second, third)], 1),
        _terms(second),
        _counted(third * (TOGETHER * HALF)).contiguous(),
    )


def _at(wide: int, first: int, count: int, turns: Tensor) -> Tensor:
    """Return cosines and sines of pairs at the middles of `count` runs of `wide` positions from the `first` run on,
    `[count,2n]`."""
    angle = (wide * (torch.arange(first, first + count) + 0.5) - 0.5)[:, None] * turns
    return torch.cat([angle.cos(), angle.sin()], 1)


def _counted(angle: Tensor) -> Tensor:
    """Return what pairs that turn by `angle` within a reach count for in each term `[TERMS,n]` of a polynomial of the
    place in that reach, the one with the least squared error. Even terms are of what their cosines are multiplied by,
    the others of what their sines are."""
    place = torch.linspace(0, 1, 65, dtype=torch.float64)[:, None]
    found = torch.empty(TERMS, len(angle), dtype=torch.float64)
    for first, of in enumerate((torch.cos, torch.sin)):
        powers = place ** torch.arange(first, TERMS, 2)
        found[first::2] = torch.linalg.lstsq(powers, of(place * angle)).solution
    return found.float()


def _terms(turns: Tensor) -> Tensor:
    """Return `wide_near`."""
    power = torch.arange(TERMS)
    middle = (torch.arange(TOGETHER) + 0.5) * WIDE - TOGETHER * HALF  # of each block
    weight = _counted(turns * HALF).mT[:, None]  # [M,1,TERMS]
    cos, sin = (of(turns[:, None] * middle)[..., None] for of in (torch.cos, torch.sin))  # [M,TOGETHER,1]
    even = power % 2 == 0
    across, along = weight * torch.where(even, cos, -sin), weight * torch.where(even, sin, cos)
    # The slowest's polynomial of the place in blocks together, as one of the place in a block.
    at, less = (middle / (TOGETHER * HALF))[:, None], power[:, None, None] - power  # [TERMS,1,TERMS]
    binomials = torch.tensor([[math.comb(j, k) for k in range(TERMS)] for j in range(TERMS)])[:, None]
    moved = binomials * at ** less.clamp(min=0) / TOGETHER**power  # [TERMS,TOGETHER,TERMS]
    rows = torch.cat([part[:, :, ORDER].flatten(1) for part in (across, along, moved)])  # [2M + TERMS,COLUMNS]
    return rows.unflatten(1, (-1, VECTORS)).transpose(0, 1).float().contiguous()


def turning_numbers(turning: Turning | None, heads: int, size: int) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what `cpu_turning` takes of it, int64, and tensors that must live as long."""
    if turning is None:
        return NONE_ADDED, ()
    key, rope, step = turning.key.float().contiguous(), turning.rope, WIDE * AT_ONCE
    batch, rows = turning.at.shape
    at, first = turning.at, turning.first
    if first is None:
        last = max(int(at.max()), 0) if at.numel() else 0
        least = int(at.where(at >= 0, last).min()) if at.numel() else 0
    else:
        last, least = first + rows - 1, first
    before = least // step * step  # the first position that is worked on
    blocks = AT_ONCE * ((last - before) // step + 1)
    angles = angles_of(tuple(rope.inv_freq.tolist()), before // WIDE, blocks)  # by value: each layer has one of its own
    if first is None:
        at = at.clamp(min=before) - before
        begins = _begins(at)
    else:
        begins = torch.full((batch,), first - before)
    tensors = at, begins, angles.far, angles.near, angles.wide_far, angles.wide_near, angles.slow, angles.order, key
    slowest = angles.slow.shape[1]
    middling = angles.wide_far.shape[1] // 2 - slowest
    records = key if turning.missed is None else adjacent_heads(turning.missed.records, size)
    missed = (0, 0, 0) if turning.missed is None else (records.stride(1), records.shape[3], records.shape[2])
    # Whether there is one, addresses, R, whether interleaved, heads and D of the keys, rows, blocks; pairs; and of rows
    # that codes miss the address, bytes from a KV head to the next, of a row, and how many of a KV head.
    numbers = [1, *(tensor.data_ptr() for tensor in tensors), rope.rotated, rope.interleaved, heads, size, rows,
               blocks, angles.quick, angles.far.shape[1] // 2, middling, slowest,
               records.data_ptr(), *missed]  # fmt: skip
    return np.array(numbers, np.int64), (*tensors, records)


def adjacent_heads(records: Tensor, size: int) -> Tensor:
    """Return records `[B,H,X,W]` of rows of `size` channels, a KV head's adjacent, and heads equally far apart."""
    batch, heads, _, width = records.shape
    if records.dtype != torch.uint8 or width != record_bytes(size):
        wanted = f"uint8 of {record_bytes(size)} bytes"
        raise ValueError(f"records of rows of {size} channels are {wanted}, got {records.dtype} of {width}")
    regular = records.stride()[2:] == (width, 1) and (batch == 1 or records.stride(0) == heads * records.stride(1))
    return records if regular else records.contiguous()


def _begins(at: Tensor) -> Tensor:
    """Return `[B]` int64, the place of row 0 where each row's is one more than the row's before, but for those at 0;
    `IRREGULAR` where some are not. Of padding in front it is below 0. at: `[B,N]` int32, positions from the first that
    is worked on."""
    if not at.numel():
        return torch.zeros(len(at), dtype=torch.int64)
    places = torch.arange(at.shape[1], dtype=at.dtype)  # a comparison of two kinds takes ten times as long
    first = at[:, -1] - places[-1]
    alike = ((first[:, None] + places).clamp_(min=0) == at).all(1)
    return torch.where(alike, first.long(), IRREGULAR)
