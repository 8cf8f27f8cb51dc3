"""Rounded rows, the rounding's error at low rank, and outliers. GEAR, https://arxiv.org/abs/2403.05527."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import GROUP, ROW, SEAL, Kept, NewRows, RowCodec
from sparseattn.kernels.attend_quantized.reference import (
    CHANNELS,
    between,
    check_bits,
    packed,
    read_rows,
    round_rows,
    unpacked,
    width,
)
from sparseattn.kernels.encode_keys.reference import quantise
from sparseattn.utils.hashing import stream

LOOPS = 3  # of the power iteration


class Gear(RowCodec):
    """Rounds keys by channel and values by row as KIVI does, and adds what that loses in two ways.

    The largest and the smallest numbers of each channel in a group of keys, and of each value, lie apart; the mean
    stands in for them while the others are rounded. What rounding then loses is kept at a low rank, one factorisation
    for keys and one for values at each seal, by power iteration.

    GEAR's outliers are a share (2 %) of a channel over the whole prompt, and of a value over all heads. Here they are a
    number, of a channel in each group and of each head's value, so that a row is read by itself. The rank is the same
    at every seal; GEAR takes 4 for the prompt and 2 for what is generated.

    Args:
        bits: 2, 4 or 8.
        group: rows of keys that share levels, a power of two from 8 to 256; GEAR's is 64.
        rank: of what rounding loses; 0: none.
        outliers: numbers kept at either end; 0: none (GEAR-L).
    """

    parts: ClassVar[Mapping[str, str]] = {
        "keys": ROW,
        "key_levels": GROUP,
        "key_far": GROUP,
        "key_at": GROUP,
        "key_left": ROW,
        "key_right": SEAL,
        "values": ROW,
        "value_levels": ROW,
        "value_far": ROW,
        "value_at": ROW,
        "value_left": ROW,
        "value_right": SEAL,
    }

    def __init__(self, bits: int = 2, group: int = 64, rank: int = 4, outliers: int = 1) -> None:
        check_bits(bits)
        if type(group) is not int or not 8 <= group <= 256 or group & (group - 1):
            raise ValueError(f"group is a power of two rows of keys that share levels, 8 to 256, got {group!r}")
        if type(rank) is not int or not 0 <= rank <= 64:
            raise ValueError(f"rank is 0 to 64, got {rank!r}")
        if type(outliers) is not int or not 0 <= outliers <= 4:
            raise ValueError(f"outliers are 0 to 4 numbers at either end, got {outliers!r}")
        self.bits, self.group, self.rank, self.outliers = bits, group, rank, outliers

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        grouped = rows.keys.float().unflatten(2, (-1, self.group))  # [B,H,n/group,group,D]
        keys, far, at = self._without(grouped, 3)
        keys = keys.flatten(2, 3)
        codes, low, step = quantise(keys, self.group, self.bits, "ends", rows.half)
        levels = torch.stack([low, step], 3)
        made = {"keys": packed(codes, self.bits), "key_levels": levels, "key_far": far.to(rows.half), "key_at": at}
        lost = keys - between(codes, levels.repeat_interleave(self.group, 2))
        made |= self._low_rank("key", lost, rows.half)
        values, far, at = self._without(rows.values.float(), 3)
        rounded, levels = round_rows(values, self.bits, rows.half)
        lost = values - read_rows(rounded, levels, self.bits, values.shape[3])
        made |= {"values": rounded, "value_levels": levels, "value_far": far.to(rows.half), "value_at": at}
        return made | self._low_rank("value", lost, rows.half)

    def _without(self, numbers: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers with the mean in place of the outliers along `dim`, these, and their places uint8."""
        far, at = numbers.topk(self.outliers, dim)
        least, low = numbers.topk(self.outliers, dim, largest=False)
        places = torch.cat([at, low], dim)
        mean = numbers.mean(dim, keepdim=True)
        inner = numbers.scatter(dim, places, mean.expand_as(places))
        return inner, torch.cat([far, least], dim), places.to(torch.uint8)

    def _low_rank(self, name: str, lost: Tensor, half: torch.dtype) -> dict[str, Tensor]:
        """`lost` `[B,H,n,D]` as rows `[B,H,n,r]` and `[B,H,1,D,r]`."""
        size = lost.shape[3]
        rank = min(self.rank, size)
        right = torch.rand(size, rank, generator=stream(0, "gear")).to(lost.device).expand(*lost.shape[:2], -1, -1)
        left = lost @ right
        for _ in range(LOOPS if rank else 0):
            left = torch.linalg.qr(lost @ torch.linalg.qr(right).Q).Q
            right = lost.mT @ left
        size = right.norm(dim=2, keepdim=True).sqrt()  # [B,H,1,r] of both parts, which 16 bits hold
        left, right = left * size, right / torch.where(size > 0, size, 1.0)
        short = rank - left.shape[3]  # fewer rows than ranks
        left, right = (torch.nn.functional.pad(part, (0, short)) for part in (left, right))
        return {f"{name}_left": left.to(half), f"{name}_right": right[:, :, None].to(half)}

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        codes = unpacked(kept.of("keys", row), self.bits, kept.size)
        keys = between(codes, kept.of("key_levels", row)) + self._lost(kept, "key", row)
        far, at = kept.of("key_far", row), kept.of("key_at", row)  # [B,Hs,R,2o,D]
        for k in range(far.shape[3]):
            keys = torch.where(at[:, :, :, k] == (row % self.group)[..., None], far[:, :, :, k].float(), keys)
        values = read_rows(kept.of("values", row), kept.of("value_levels", row), self.bits, kept.size)
        values = values + self._lost(kept, "value", row)
        return keys, values.scatter(3, kept.of("value_at", row).long(), kept.of("value_far", row).float())

    @staticmethod
    def _lost(kept: Kept, name: str, row: Tensor) -> Tensor:
        left, right = kept.of(f"{name}_left", row).float(), kept.of(f"{name}_right", row).float()
        return (right @ left[..., None])[..., 0]

    def entry_bytes(self, size: int) -> dict[str, int]:
        codes, levels, far = width(size, self.bits), 4 * -(-size // CHANNELS), 2 * self.outliers
        rank = min(self.rank, size)
        return {
            "keys": codes,
            "key_levels": 4 * size,
            "key_far": 2 * far * size,
            "key_at": far * size,
            "values": codes,
            "value_levels": levels,
            "value_far": 2 * far,
            "value_at": far,
            **{f"{name}_left": 2 * rank for name in ("key", "value")},
            **{f"{name}_right": 2 * rank * size for name in ("key", "value")},
        }

    def check_size(self, size: int) -> None:
        if 2 * self.outliers >= size:
            raise ValueError(f"{self} keeps {2 * self.outliers} numbers of a value apart, which has {size}")
