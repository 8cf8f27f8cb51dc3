"""How codes of a few bits lie in memory: packed into bytes, ordered for the processor that reads them.

Byte j of a row's `4 W` holds channels j, j + 4W, j + 8W, .., lowest bits first, the head size padded to a multiple of
`32 / bits`. A group's codes are stored as `(rows/T, W, T, 4)`, flat: words of 4 bytes, those of T rows beside each
other. T is `TILE` in host memory, where a vector register takes one word of as many rows, and 1 on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 16  # rows of which a register of 64 bytes takes a word each


def words(size: int, bits: int) -> int:
    """Return W, the words of 4 bytes that the codes of a row of `size` channels take."""
    return -(-size * bits // 32)


def rows_of(packed: Tensor, size: int, bits: int) -> int:
    """Return the rows of a group whose codes are `[..,rows*4W]`."""
    return packed.shape[-1] // (4 * words(size, bits))


def tile(device: torch.device) -> int:
    """Return T, the rows whose words lie beside each other in the memory of a device."""
    return TILE if device.type == "cpu" else 1


def pack(codes: Tensor, rows: int, bits: int) -> Tensor:
    """Return `[B,H,n/rows,rows*4W]` uint8 of codes `[B,H,n,D]`."""
    wide, planes = words(codes.shape[-1], bits), 8 // bits
    codes = torch.nn.functional.pad(codes, (0, 4 * wide * planes - codes.shape[-1])).unflatten(-1, (planes, 4 * wide))
    packed = codes[..., 0, :].clone()
    for plane in range(1, planes):
        packed |= codes[..., plane, :] << (bits * plane)
    packed = packed.unflatten(2, (-1, rows)).unflatten(4, (wide, 4))  # [B,H,n/rows,rows,W,4]
    return packed.unflatten(3, (-1, tile(codes.device))).transpose(4, 5).flatten(3).contiguous()


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return codes `[B,H,n,D]` uint8 of `pack`'s `[B,H,n/rows,rows*4W]`, D = `size`."""
    shape = -1, words(size, bits), tile(packed.device), 4
    rows = packed.unflatten(3, shape).transpose(4, 5).flatten(5).flatten(2, 4)  # [B,H,n,4W]
    return unpack_bytes(rows, bits, size)


def unpack_bytes(rows: Tensor, bits: int, size: int) -> Tensor:
    """Return codes `[..,D]` of rows of bytes `[..,4W]`."""
    mask = (1 << bits) - 1
    planes = [(rows >> (bits * plane)) & mask for plane in range(8 // bits)]
    return torch.cat(planes, -1)[..., :size]


def repack(packed: Tensor, bits: int, size: int, device: torch.device) -> Tensor:
    """Return packed codes on a device, ordered as they are stored there."""
    shape = -1, words(size, bits), tile(packed.device), 4
    rows = packed.unflatten(3, shape).transpose(4, 5).flatten(3, 4).to(device)  # [B,H,n/rows,rows,W,4]
    return rows.unflatten(3, (-1, tile(rows.device))).transpose(4, 5).flatten(3).contiguous()
