"""Keys and values of 8, 4 or 2 bits: how they are rounded, packed, read back and attended to. KIVI, arXiv 2402.02750.

KIVI (https://arxiv.org/abs/2402.02750) rounds keys by channel over groups of rows, for keys have channels far larger
than others, and values by row, in groups of `CHANNELS` channels. Both are read as `low + step * code`, low and step
floats of 16 bits. The least and the largest number of a group are levels, but for the rounding of low (down) and step
(up), so that a number is at most half a step off, and a key lies between `low` and `low + step * last`.

A row's codes are `W = ceil(D * bits / 8)` bytes: byte j holds channels `j`, `j + W`, `j + 2W`, ..., the first in its
lowest bits. What no channel takes is 0.

Attention over such rows is specified here in torch, "read back, then attend", and compiled in `cpu.py` and
`gpu.py`, which read the codes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.attend import gather
from sparseattn.kernels.encode_keys.reference import quantise
from sparseattn.utils.tensors import only_tensors

BITS = (2, 4, 8)
CHANNELS = 32  # of a value that share levels, as in KIVI
PARTS = ("keys", "key_levels", "values", "value_levels")  # the tensors of `CodedRows`
CHUNK = 1 << 22  # numbers rounded or read back at a time


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """N rows of keys and values of a few bits, views of storage.

    Args:
        keys, values: `[B,H,N,W]` uint8, see the module.
        key_levels: `[B,H,N/group,2,D]` of 16 bits: low and step of each channel in a group of rows.
        value_levels: `[B,H,N,2,C]` of 16 bits: low and step of each of C groups of `CHANNELS` channels in a row.
        bits: 2, 4 or 8.
        group: rows of keys that share levels.

    Raises:
        ValueError: another number of bits, or shapes or dtypes that do not fit each other.
    """

    keys: Tensor
    key_levels: Tensor
    values: Tensor
    value_levels: Tensor
    bits: int
    group: int

    def __post_init__(self) -> None:
        check_bits(self.bits)
        only_tensors(keys=self.keys, values=self.values, key_levels=self.key_levels, value_levels=self.value_levels)
        size, (batch, heads, rows) = self.key_levels.shape[-1], self.keys.shape[:3]
        wanted = {
            "keys": (batch, heads, rows, width(size, self.bits)),
            "values": (batch, heads, rows, width(size, self.bits)),
            "key_levels": (batch, heads, rows // self.group, 2, size),
            "value_levels": (batch, heads, rows, 2, -(-size // CHANNELS)),
        }
        for name, shape in wanted.items():
            part = getattr(self, name)
            dtype = torch.uint8 if "levels" not in name else self.key_levels.dtype
            if part.shape != shape or part.dtype != dtype or rows % self.group:
                raise ValueError(
                    f"{name} of {rows} rows of {size} channels in {self.bits} bits, in groups of {self.group}, is "
                    f"{dtype} {list(shape)}, got {part.dtype} {list(part.shape)}"
                )
        if self.key_levels.element_size() != 2 or not self.key_levels.is_floating_point():
            raise ValueError(f"levels are of a 16-bit floating dtype, got {self.key_levels.dtype}")

    @property
    def size(self) -> int:
        """D."""
        return self.key_levels.shape[-1]

    def decoded(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B,H,N,D]`, as they are read: all of them, for comparing and for dense attention."""
        keys = [
            between(unpacked(codes, self.bits, self.size), levels.repeat_interleave(self.group, 2)).to(dtype)
            for codes, levels in self._parts(self.keys, self.key_levels, self.group)
        ]
        values = [
            between(unpacked(codes, self.bits, self.size), _by_channel(levels, self.size)).to(dtype)
            for codes, levels in self._parts(self.values, self.value_levels, 1)
        ]
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _parts(self, codes: Tensor, levels: Tensor, group: int) -> list[tuple[Tensor, Tensor]]:
        once = _at_once(len(codes) * codes.shape[1], self.size, self.group)
        return list(zip(codes.split(once, 2), levels.split(max(once // group, 1), 2), strict=True))

    def taken(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B,Hs,R,D]` float32 of rows `row` `[B,Hs,R]`, Hs a multiple of H; others are not
        read."""
        keys = unpacked(gather.take(self.keys, row), self.bits, self.size)
        values = unpacked(gather.take(self.values, row), self.bits, self.size)
        of_keys = gather.take(self.key_levels.flatten(3), row // self.group).unflatten(3, (2, -1))
        of_values = gather.take(self.value_levels.flatten(3), row).unflatten(3, (2, -1))
        return between(keys, of_keys), between(values, _by_channel(of_values, self.size))

    def row_bytes(self) -> int:
        """Return the bytes of a row's codes and of its value's levels."""
        return 2 * self.keys.shape[3] + 2 * self.value_levels.shape[4] * self.value_levels.element_size()

    def group_bytes(self) -> int:
        """Return the bytes of the levels of a group of keys."""
        return 2 * self.size * self.key_levels.element_size()

    def bytes_read(self, selection: Selection) -> Tensor:
        """Return `[B,H]` int64: bytes of the rows that a selection names and of the levels of every group in which one
        lies, each once for all query heads of a KV head."""
        heads, rows = self.keys.shape[1:3]
        named = selection.mask(rows).unflatten(1, (heads, -1)).any(2)  # [B,H,N]
        groups = named.unflatten(2, (-1, self.group)).any(3).sum(-1)
        return named.sum(-1) * self.row_bytes() + groups * self.group_bytes()


def check_bits(bits: int) -> None:
    """ValueError for a number of bits that rows are not kept in."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"rows are of 2, 4 or 8 bits, got {bits!r}")


def width(size: int, bits: int) -> int:
    """W: bytes of the codes of a row of `size` channels."""
    return -(-size * bits // 8)


def encode(keys: Tensor, values: Tensor, bits: int, group: int) -> CodedRows:
    """Round rows to `bits` bits.

    Args:
        keys, values: `[B,H,n,D]`, n a multiple of `group`; finite.
        bits: 8, 4 or 2.
        group: rows of keys that share levels.

    Returns:
        The rows; levels are in the keys' dtype if it is of 16 bits, else in bfloat16.
    """
    check_bits(bits)
    if keys.shape[2] % group:
        raise ValueError(f"rows are rounded in groups of {group}, got {keys.shape[2]} of them")
    dtype = keys.dtype if keys.element_size() == 2 else torch.bfloat16
    parts: list[tuple[Tensor, ...]] = []
    once = _at_once(len(keys) * keys.shape[1], keys.shape[3], group)
    for mine, theirs in zip(keys.split(once, 2), values.split(once, 2), strict=True):
        codes, low, step = quantise(mine, group, bits, "ends", dtype)
        parts.append((packed(codes, bits), torch.stack([low, step], 3), *round_rows(theirs, bits, dtype)))
    whole = {name: torch.cat(part, 2) for name, part in zip(PARTS, zip(*parts, strict=True), strict=True)}
    return CodedRows(**whole, bits=bits, group=group)


def _at_once(lists: int, size: int, group: int) -> int:
    """Rows, whole groups, of which `lists` lists have about `CHUNK` numbers."""
    return max(CHUNK // (max(lists, 1) * size * group), 1) * group


def round_rows(values: Tensor, bits: int, dtype: torch.dtype, channels: int = CHANNELS) -> tuple[Tensor, Tensor]:
    """Return codes `[B,H,n,W]` and levels `[B,H,n,2,C]` of rows `[B,H,n,D]`, in groups of `channels` channels."""
    size, shape = values.shape[3], values.shape[:3]
    spare = -size % channels
    if spare:  # a last group of fewer channels is as if its last were there more often
        values = torch.cat([values, values[..., -1:].expand(*shape, spare)], 3)
    # A channel of a group stands for a row of one channel.
    codes, low, step = quantise(values.reshape(*shape[:2], -1, 1), channels, bits, "ends", dtype)
    levels = torch.stack([part.view(*shape, -1) for part in (low, step)], 3)
    return packed(codes.view(*shape, -1)[..., :size], bits), levels


def packed(codes: Tensor, bits: int) -> Tensor:
    """`[...,W]` uint8 of codes `[...,D]` uint8."""
    if bits == 8:
        return codes.contiguous()
    planes = codes.split(width(codes.shape[-1], bits), -1)
    out = planes[0].clone()
    for plane, part in enumerate(planes[1:], 1):
        out[..., : part.shape[-1]] |= part << (plane * bits)
    return out


def unpacked(packed: Tensor, bits: int, size: int) -> Tensor:
    """Codes `[...,D]` uint8 of `[...,W]`."""
    if bits == 8:
        return packed
    last = (1 << bits) - 1
    return torch.cat([(packed >> shift) & last for shift in range(0, 8, bits)], -1)[..., :size]


def read_rows(packed: Tensor, levels: Tensor, bits: int, size: int, channels: int = CHANNELS) -> Tensor:
    """Return rows `[...,D]` float32 of what `round_rows` gave."""
    return between(unpacked(packed, bits, size), _by_channel(levels, size, channels))


def _by_channel(levels: Tensor, size: int, channels: int = CHANNELS) -> Tensor:
    """Return a row's levels `[...,2,C]` as `[...,2,D]`."""
    return levels.repeat_interleave(channels, -1)[..., :size]


def between(codes: Tensor, levels: Tensor) -> Tensor:
    """`[...,D]` float32 of codes `[...,D]` and levels `[...,2,D]`."""
    low, step = levels.float().unbind(-2)
    return codes.float() * step + low


def attend(query: Tensor, rows: CodedRows, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """Return the specification: the named rows are read back, the rest is a softmax."""
    return attend_read(query, rows.taken, rows.keys.shape[2], selection, scale)


def attend_read(
    query: Tensor,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    stored: int,
    selection: Selection,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention over rows that `read` gives back, whatever they are kept as.

    Args:
        query: `[B,H,G,D]`.
        read: of rows `[B,Hs,R]` below `stored` their keys and values `[B,Hs,R,D]`.
        stored: rows that there are.
        selection: the rows named; places from `stored` on are not read.
        scale: factor of the logits.
    """
    batch, heads, group, size = query.shape
    chosen = selection.start.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    row = selection.rows if stored else selection.rows[..., :0]  # [B,Hs,R]
    reads = (row >= 0) & (row < stored)
    # An unused place reads the head's highest used row again, whose weight there is 0; without any, row 0's is.
    spare = torch.where(reads, row, -1).amax(-1, keepdim=True) if row.shape[-1] else row
    keys, values = read(torch.where(reads, row, spare).clamp(min=0))
    values = values.masked_fill((spare < 0)[..., None], 0.0)
    scaled = query.to(wide).reshape(batch, chosen, -1, size) * scale
    logits = scaled @ keys.to(wide).mT  # [B,Hs,G or 1,R]
    if selection.bias is not None:
        logits = logits + selection.bias.repeat_interleave(selection.span, -1)[:, :, None, : row.shape[-1]]
    logits = logits.masked_fill(~reads[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = logits.softmax(-1).masked_fill(lse.isneginf()[..., None], 0.0)
    out = (weights @ values.to(wide)).reshape(query.shape)
    return out.to(query.dtype), lse.reshape(batch, heads, group)
