"""What a key that is turned to each row's position adds to rows' sums, in compiled code, see `codes.Turning`.

A rotation by a position is one by a multiple of `VECTORS` and one by what is left, so that the products with so many
positions are sums of products with the same numbers (as in `Rope.products_below`).
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_centroids import OUTPUTS, VECTORS, multiply
from sparseattn.kernels.numba_rows import FAST, array_at
from sparseattn.kernels.product_codes.codes import Turning, room_beside

NONE_ADDED: Any = np.zeros(12, np.int64)
AT_ONCE = 32  # times `VECTORS` positions
IRREGULAR = -(1 << 62)
PADDED = 128  # rows that kernels may read behind the last
_room_beside = njit(room_beside)


@functools.lru_cache(maxsize=16)
def _angles(rope: Rope, blocks: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each `VECTORS`-th position `[blocks,R]`, and of the first ones `[R,VECTORS]`."""
    far = torch.cat(rope.cos_sin(torch.arange(0, blocks * VECTORS, VECTORS)), -1)
    return far.contiguous(), torch.cat(rope.cos_sin(torch.arange(VECTORS)), -1).mT.contiguous()


def turning_numbers(turning: Turning | None, heads: int, size: int) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what `add_turning` takes of it, int64, and tensors that must live as long."""
    if turning is None:
        return NONE_ADDED, ()
    at, key, rope = turning.at.clamp(min=0), turning.key.float().contiguous(), turning.rope
    last = int(at.max()) if at.numel() else 0
    blocks = AT_ONCE * (last // (VECTORS * AT_ONCE) + 1)
    far, near = _angles(rope, blocks)
    begins = _begins(at)
    numbers = np.array(
        [
            1, key.data_ptr(), at.data_ptr(), begins.data_ptr(), far.data_ptr(), near.data_ptr(), blocks, rope.rotated,
            rope.interleaved, heads, size, at.shape[1],
        ],
        np.int64,
    )  # fmt: skip
    return numbers, (key, at, begins, far, near)


def _begins(at: Tensor) -> Tensor:
    """Return `[B]` int64, the position of row 0 where each row's is one more than the row's before, but for those at 0;
    `IRREGULAR` where some are not. Of padding in front it is below 0."""
    if not at.numel():
        return torch.zeros(len(at), dtype=torch.int64)
    places = torch.arange(at.shape[1])
    first = at.long()[:, -1] - places[-1]
    alike = ((first[:, None] + places).clamp(min=0) == at).all(1)
    return torch.where(alike, first, IRREGULAR)


def turning_room(share: int, rows: int, blocks: int) -> int:
    """Return the bytes that `add_turning` works in."""
    return 4 * share * VECTORS * blocks + 2 * share * (rows + PADDED)


@njit(fastmath=set(FAST))
def turned_products(numbers, which, query, share, out_at):
    """Write the products of a KV head's queries `[G*D]` float32 with its key, turned to the positions of all blocks:
    `[G,VECTORS*blocks]` float32 at the address `out_at`."""
    key_at, far_at, near_at = numbers[1], numbers[4], numbers[5]
    blocks, wide, interleaved, size = numbers[6], numbers[7], numbers[8], numbers[10]
    key = array_at(np.float32, key_at + 4 * which * size, size)
    far, near = array_at(np.float32, far_at, blocks * wide), array_at(np.float32, near_at, wide * VECTORS)
    half, left, rest = wide // 2, np.empty(AT_ONCE * wide, np.float32), np.empty(AT_ONCE, np.float32)
    across, along = np.empty(half, np.float32), np.empty(half, np.float32)
    for g in range(share):
        still = np.float32(0)
        for d in range(wide, size):
            still += query[g * size + d] * key[d]
        rest[:] = still
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b = query[g * size + first], query[g * size + second]
            c, d = key[first], key[second]
            across[i], along[i] = a * c + b * d, b * c - a * d
        for block in range(0, blocks, AT_ONCE):
            for n in range(AT_ONCE):
                to, at = n * wide, (block + n) * wide
                for i in range(half):
                    left[to + i] = across[i] * far[at + i] + along[i] * far[at + half + i]
                for i in range(half):
                    left[to + half + i] = along[i] * far[at + i] - across[i] * far[at + half + i]
            out = array_at(np.float32, out_at + 4 * VECTORS * (g * blocks + block), AT_ONCE * VECTORS)
            multiply(left, rest, AT_ONCE // OUTPUTS, near, wide, out)


@njit
def _by_row(numbers, which, found, out):
    """Return the products of a KV head's rows, an array `[rows]`: `found` `[positions]` from the first row's position
    on where rows follow each other, else written to `out`."""
    sequence, rows = which // numbers[9], numbers[11]
    begin = array_at(np.int64, numbers[3] + 8 * sequence, 1)[0]
    if begin >= 0:
        return found[begin : begin + rows]
    at = array_at(np.int32, numbers[2] + 4 * sequence * rows, rows)
    for n in range(rows):
        out[n] = found[at[n]]
    return out


@njit(fastmath=set(FAST))
def _range(numbers):
    low, high = numbers[0], numbers[0]
    for n in range(len(numbers)):
        low, high = min(low, numbers[n]), max(high, numbers[n])
    return low, high


@njit(fastmath=set(FAST))
def _round(numbers, low, unit, out):
    for n in range(len(numbers)):
        out[n] = np.int16(np.rint((numbers[n] - low) * unit))


@njit
def add_turning(numbers, which, query, share, subspaces, arena):
    """Write the products with a KV head's key, turned to all positions, as float32 at the address `arena`, and return
    the least step with which sums have room for them; see `round_added`."""
    blocks, rows = numbers[6], numbers[11]
    turned_products(numbers, which, query, share, arena)
    found = array_at(np.float32, arena, share * VECTORS * blocks).reshape(share, VECTORS * blocks)
    most, own = np.float32(0), np.empty(rows, np.float32)
    for g in range(share):
        low, high = _range(_by_row(numbers, which, found[g], own))
        most = max(most, high - low)
    return most / np.float32(_room_beside(subspaces))


@njit
def round_added(numbers, which, share, step, arena):
    """Round what `add_turning` wrote to whole steps from each query head's least: int16 `[G,rows]` behind it. Return
    their address and the rows from one query head's to the next's."""
    blocks, rows = numbers[6], numbers[11]
    found = array_at(np.float32, arena, share * VECTORS * blocks).reshape(share, VECTORS * blocks)
    across, begin = rows + PADDED, arena + 4 * share * VECTORS * blocks
    whole, own = array_at(np.int16, begin, share * across).reshape(share, across), np.empty(rows, np.float32)
    unit = np.float32(1) / step if step > 0 else np.float32(1)
    for g in range(share):
        mine = _by_row(numbers, which, found[g], own)
        low, _ = _range(mine)
        _round(mine, low, unit, whole[g, :rows])
        whole[g, rows:] = 0
    return begin, across


@njit
def add_to_sums(sums, head_step, share, added, across, first, count):
    """Add what rows from `first` on have to their sums, int16 at the address `sums`, `head_step` bytes from a query
    head's to the next's; none to those below 0, which are not valid."""
    for g in range(share):
        own = array_at(np.int16, sums + g * head_step, count)
        more = array_at(np.int16, added + 2 * (g * across + first), count)
        for lane in range(count):
            own[lane] = own[lane] + more[lane] if own[lane] >= 0 else own[lane]


@njit
def add_to_listed(sums, head_step, share, added, across, names, count):
    """As `add_to_sums`, of the rows that `names`, int32 at an address, says."""
    rows = array_at(np.int32, names, count)
    for g in range(share):
        own, more = array_at(np.int16, sums + g * head_step, count), array_at(np.int16, added + 2 * g * across, across)
        for i in range(count):
            own[i] += more[rows[i]]
