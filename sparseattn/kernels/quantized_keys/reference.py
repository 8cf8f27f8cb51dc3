"""Keys of a few bits: how they are rounded, packed and scored. In torch, which is the specification, and compiled.

A group of `rows` consecutive rows shares, for each channel, a lowest level and a step (as KIVI stores keys,
https://arxiv.org/abs/2402.02750); a row keeps a code of 1, 2 or 4 bits a channel, and its key is read as
`low + step * code`. Groups by channel and not by row, because keys have channels far larger than others. Levels are
floats of 16 bits, or of 8 bits on a grid (`kernels.quantized_keys.level_grid`).

Codes are packed into bytes: byte j of a row's `4 W` holds channels j, j + 4W, j + 8W, .., lowest bits first, the head
size padded to a multiple of `32 / bits`. A group's are stored as `(rows/T, W, T, 4)`, flat: words of 4 bytes, those of
T rows beside each other. T is `TILE` in host memory, where a vector register takes one word of as many rows, and 1 on
a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.kernels import scoring
from sparseattn.kernels.quantized_keys import level_grid as grids

TILE = 16  # rows of which a register of 64 bytes takes a word each
CHUNK = 1 << 22  # numbers of unpacked keys at a time


def words(size: int, bits: int) -> int:
    """W: words of 4 bytes that the codes of a row of `size` channels take."""
    return -(-size * bits // 32)


def rows_of(packed: Tensor, size: int, bits: int) -> int:
    """Rows of a group whose codes are `[..,rows*4W]`."""
    return packed.shape[-1] // (4 * words(size, bits))


def tile(device: torch.device) -> int:
    """T: rows whose words lie beside each other in the memory of a device."""
    return TILE if device.type == "cpu" else 1


def nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `numbers` as the nearest finite ones of a 16-bit `dtype`."""
    most = torch.finfo(dtype).max
    return numbers.clamp(-most, most).to(dtype)


def rounded(numbers: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """float32 `numbers` as the nearest of a 16-bit `dtype` that is not below (`up`) or not above them; finite."""
    near, most = nearest(numbers, dtype), torch.finfo(dtype).max
    wrong = near.float() < numbers if up else near.float() > numbers
    bits = near.view(torch.int16)
    away = (bits >= 0) == up  # from zero: the next number has the next bits
    moved = torch.where(away, bits + 1, bits - 1)
    smallest = torch.tensor(1 if up else -(1 << 15) + 1, dtype=torch.int16, device=bits.device)
    moved = torch.where(near == 0, smallest, moved)
    return torch.where(wrong, moved, bits).view(dtype).clamp(-most, most)


def quantise(keys: Tensor, rows: int, bits: int, levels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and levels of keys.

    Args:
        keys: `[B,H,n,D]`, n a multiple of `rows`.
        rows: of a group.
        bits: a channel, 1 to 8; what is packed has 1, 2 or 4.
        levels: "bins": in the middle of equal parts of the distance from the least to the largest number of a channel
            in the group, so that none is farther than half a step from its level. "ends": the least, the largest and
            equal steps between them, as KIVI and FIER have it. "means", for one bit: the means of the numbers below and
            above the middle of that distance, which keep a few large numbers apart from the many small ones.
        dtype: of the levels, 16 bits; steps are rounded up.

    Returns:
        codes `[B,H,n,D]` uint8; low, the level of code 0, and step `[B,H,n/rows,D]`.
    """
    low, step = sixteen(*reach(keys, rows, levels, "torch"), bits, levels, dtype)
    return _codes(keys, low.float(), step.float(), bits), low, step


def reach(keys: Tensor, rows: int, levels: str, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """What levels are made of, `[B,H,n/rows,D]` float32: the least and the largest number of a channel in a group; for
    "means" those of the numbers below and above the middle of these, the first twice where none is above.

    impl: see `scoring`, "torch" or "numba".
    """
    if scoring.chosen(impl, keys.device, keys.dtype, ("torch", "numba")) == "numba":
        from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

        return quantized_keys_cpu.means(keys, rows) if levels == "means" else quantized_keys_cpu.extents(keys, rows)
    grouped = keys.float().unflatten(2, (-1, rows))  # [B,H,n/rows,rows,D]
    least, most = grouped.amin(3), grouped.amax(3)
    if levels != "means":
        return least, most
    upper = grouped > ((least + most) / 2)[:, :, :, None]
    above = upper.sum(3)
    total, high = grouped.sum(3), torch.where(upper, grouped, 0.0).sum(3)
    below = (total - high) / (rows - above)  # the least number is never above the middle
    return below, torch.where(above > 0, high / above.clamp(min=1), below)


def sixteen(least: Tensor, most: Tensor, bits: int, levels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """low and step in 16 bits, of what `reach` finds."""
    last = (1 << bits) - 1
    if levels == "means":
        low = nearest(least, dtype)
        return low, nearest((most - low.float()) * (most > least), dtype)
    if levels == "ends":
        low = rounded(least, dtype, up=False)
        return low, rounded((most - low.float()) / last, dtype, up=True)
    low = nearest(least + (most - least) / (2 << bits), dtype)
    return low, rounded(_needed(least, most, low.float(), bits), dtype, up=True)


def eight(least: Tensor, most: Tensor, bits: int, levels: str, held: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """low and step in 8 bits, for "bins" and "means", and the grid that they are on: `held`, or what it has to grow to.
    Steps are rounded up, those of "means" to the nearest."""
    parts, share = (1, 0.0) if levels == "means" else (1 << bits, 0.5)
    wide = (most - least) / parts
    wanted = least + wide * share
    grid = grids.fitting(wanted, wide, held)
    low = grids.lows(wanted, grid)
    lowest = grids.read(low, low, grid)[0]
    if levels == "means":
        return low, grids.steps((most - lowest) * (most > least), grid, up=False), grid
    return low, grids.steps(_needed(least, most, lowest, bits), grid, up=True), grid


def _needed(least: Tensor, most: Tensor, low: Tensor, bits: int) -> Tensor:
    """The step of "bins" for which no number from `least` to `most` is farther than half of it from a level."""
    return torch.maximum((low - least) * 2, (most - low) / ((1 << bits) - 0.5))


def _codes(keys: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """Codes `[B,H,n,D]` uint8 of the nearest levels, which are `[B,H,n/rows,D]` float32."""
    grouped = keys.float().unflatten(2, (low.shape[2], -1))
    codes = (grouped - low[:, :, :, None]) / torch.where(step > 0, step, 1.0)[:, :, :, None]
    return codes.round_().clamp_(0, (1 << bits) - 1).to(torch.uint8).flatten(2, 3)


def pack(codes: Tensor, rows: int, bits: int) -> Tensor:
    """`[B,H,n/rows,rows*4W]` uint8 of codes `[B,H,n,D]`."""
    wide, planes = words(codes.shape[-1], bits), 8 // bits
    codes = torch.nn.functional.pad(codes, (0, 4 * wide * planes - codes.shape[-1])).unflatten(-1, (planes, 4 * wide))
    packed = codes[..., 0, :].clone()
    for plane in range(1, planes):
        packed |= codes[..., plane, :] << (bits * plane)
    packed = packed.unflatten(2, (-1, rows)).unflatten(4, (wide, 4))  # [B,H,n/rows,rows,W,4]
    return packed.unflatten(3, (-1, tile(codes.device))).transpose(4, 5).flatten(3).contiguous()


def encode(
    keys: Tensor, rows: int, bits: int, levels: str, dtype: torch.dtype, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`pack` of `quantise`'s codes, low and step; impl: see `scoring`, "torch" or "numba"."""
    low, step = sixteen(*reach(keys, rows, levels, impl), bits, levels, dtype)
    return code(keys, low, step, bits, impl=impl), low, step


def code(
    keys: Tensor, low: Tensor, step: Tensor, bits: int, grid: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Keys `[B,H,n,D]` packed (`pack`) as the codes of their nearest levels; grid: see `logits`, impl: see `reach`."""
    rows = keys.shape[2] // low.shape[2]
    if grid is not None:
        low, step = grids.read(low, step, grid)
    if scoring.chosen(impl, keys.device, keys.dtype, ("torch", "numba")) != "numba":
        return pack(_codes(keys, low.float(), step.float(), bits), rows, bits)
    from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

    return quantized_keys_cpu.encode(keys, low, step, rows, bits, words(keys.shape[-1], bits))


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Codes `[B,H,n,D]` uint8 of `pack`'s `[B,H,n/rows,rows*4W]`, D = `size`."""
    shape = -1, words(size, bits), tile(packed.device), 4
    rows = packed.unflatten(3, shape).transpose(4, 5).flatten(5).flatten(2, 4)  # [B,H,n,4W]
    return unpack_bytes(rows, bits, size)


def unpack_bytes(rows: Tensor, bits: int, size: int) -> Tensor:
    """Codes `[..,D]` of rows of bytes `[..,4W]`."""
    mask = (1 << bits) - 1
    planes = [(rows >> (bits * plane)) & mask for plane in range(8 // bits)]
    return torch.cat(planes, -1)[..., :size]


def moved(packed: Tensor, bits: int, size: int, device: torch.device) -> Tensor:
    """Packed codes on a device, ordered as they are stored there."""
    shape = -1, words(size, bits), tile(packed.device), 4
    rows = packed.unflatten(3, shape).transpose(4, 5).flatten(3, 4).to(device)  # [B,H,n/rows,rows,W,4]
    return rows.unflatten(3, (-1, tile(rows.device))).transpose(4, 5).flatten(3).contiguous()


def keys_of(packed: Tensor, low: Tensor, step: Tensor, bits: int, grid: Tensor | None = None) -> Tensor:
    """`[B,H,n,D]` float32: the keys that codes and levels stand for; grid: see `logits`."""
    codes = unpack(packed, bits, low.shape[-1])
    codes = codes.unflatten(2, (low.shape[2], -1)).float()  # [B,H,n/rows,rows,D]
    low, step = grids.read(low, step, grid)
    return (codes * step[:, :, :, None] + low[:, :, :, None]).flatten(2, 3)


def groups_of(pages: Tensor, page: int, groups: int, held: int) -> Tensor:
    """`[B,L]` int64: in how many of the `groups` that share levels a row of each list lies.

    Args:
        pages: int64 `[B,L,P]`, pages of `page` rows, negative: unused.
        held: rows of all groups.
    """
    rows = held // max(groups, 1)
    inside = math.gcd(page, max(rows, 1))  # of a page, so many rows lie in one group
    first = pages[..., None] * page + torch.arange(0, page, inside, device=pages.device)
    at = torch.where((first < 0) | (first >= held), groups, first // max(rows, 1)).flatten(2)
    touched = torch.zeros(*pages.shape[:2], groups + 1, dtype=torch.bool, device=pages.device)
    return touched.scatter_(2, at, True)[..., :-1].sum(-1)
