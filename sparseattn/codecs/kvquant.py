"""Levels learnt by k-means, a few outliers apart, keys before RoPE. KVQuant, https://arxiv.org/abs/2401.18079."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import ONCE, ROW, Kept, NewRows, RowCodec
from sparseattn.kernels.attend_quantized.reference import packed, unpacked, width
from sparseattn.utils.hashing import stream

ROUNDS = 50  # of k-means, KVQuant's
SAMPLE = 1 << 14  # numbers of a head that it sees


class KVQuant(RowCodec):
    """Rounds normalised numbers to the nearest of `2^bits` learnt levels, and keeps the farthest numbers as they are.

    Keys are taken before RoPE. Each channel has a middle and a reach, by percentiles of the prompt's rows; each value
    has its own. Numbers in these units are rounded to one set of levels for keys and one for values, k-means centroids
    of the prompt's. With two bits their mean and deviation are set right (Q-Norm). Per row so many numbers as `share`
    says lie apart, 16 bits and a byte of their channel each.

    KVQuant learns on calibration data, for a layer, weighted by Fisher information; here each head learns from its own
    prompt, unweighted. Its threshold decides how many outliers a key has, with a cap; here every row has the cap.

    Args:
        bits: 2 or 4. KVQuant's 3 do not fill bytes evenly.
        share: of numbers that lie apart, 0 to 0.1: of keys rounded up, of values as many at either end; 0.01 is
            KVQuant's.
        rope: whether keys are taken before RoPE; False: after it, where no RoPE is known.
    """

    parts: ClassVar[Mapping[str, str]] = {
        "keys": ROW,
        "key_far": ROW,
        "key_at": ROW,
        "key_range": ONCE,
        "key_levels": ONCE,
        "values": ROW,
        "value_far": ROW,
        "value_at": ROW,
        "value_range": ROW,
        "value_levels": ONCE,
    }

    def __init__(self, bits: int = 2, share: float = 0.01, rope: bool = True) -> None:
        if type(bits) is not int or bits not in (2, 4):
            raise ValueError(f"bits of kvquant are 2 or 4, got {bits!r}")
        if not 0 <= share <= 0.1:
            raise ValueError(f"share is of the numbers of a row, 0 to 0.1, got {share!r}")
        self.bits, self.share, self.rope = bits, share, rope
        self.before_rope = rope

    def far(self, size: int) -> tuple[int, int]:
        """Return how many numbers of a key, and of a value of `size` channels, lie apart."""
        return math.ceil(self.share * size), 2 * math.ceil(self.share * size / 2)

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        keys, values = rows.unroped if self.rope else rows.keys.float(), rows.values.float()
        key_far, value_far = self.far(keys.shape[3])
        span = rows.once.get("key_range")
        span = self._key_range(keys, rows.real, rows.half)[:, :, None] if span is None else span
        units = _in_units(keys, span)
        at = units.abs().topk(key_far, 3).indices
        made = {"keys": self._rounded(units, at, rows, "key_levels"), "key_range": span, **_apart("key", keys, at)}
        made["key_levels"] = self._levels(units, at, rows, "key_levels")
        half = value_far // 2
        at = torch.cat([values.topk(half, 3).indices, values.topk(half, 3, largest=False).indices], 3)
        inner = values.scatter(3, at, values.median(3, keepdim=True).values.expand_as(at))
        low, high = inner.aminmax(dim=3)
        own = torch.stack([(high + low) / 2, (high - low) / 2], 3).to(rows.half)  # [B,H,n,2]
        units = _in_units(values, own[..., None])
        made |= {"value_range": own, "values": self._rounded(units, at, rows, "value_levels")}
        return {**made, "value_levels": self._levels(units, at, rows, "value_levels"), **_apart("value", values, at)}

    def _key_range(self, keys: Tensor, real: Tensor, half: torch.dtype) -> Tensor:
        """`[B,H,2,D]`: middle and reach of each channel of `keys`, padding apart."""
        tail = self.share / 2
        present = keys.masked_fill(~real[..., None], torch.nan)
        ends = torch.tensor([tail, 1 - tail], device=keys.device)
        low, high = present.nanquantile(ends, 2).nan_to_num(0.0)
        return torch.stack([(high + low) / 2, (high - low) / 2], 2).to(half)

    def _levels(self, units: Tensor, at: Tensor, rows: NewRows, name: str) -> Tensor:
        """`[B,H,1,2,2^bits]`: levels that numbers are rounded to, and that they are read as."""
        if name in rows.once:
            return rows.once[name]
        inside = torch.ones_like(units, dtype=torch.bool).scatter(3, at, False) & rows.real[..., None]
        made = torch.stack([torch.stack([self._learnt(x[i]) for x, i in zip(*heads, strict=True)])
                            for heads in zip(units, inside, strict=True)])  # fmt: skip
        return made[:, :, None].to(rows.half)

    def _learnt(self, numbers: Tensor) -> Tensor:
        """`[2,2^bits]` of the numbers `[n]` of a head."""
        count = 1 << self.bits
        numbers = numbers[_sample(len(numbers)).to(numbers.device)].sort().values
        if not len(numbers):
            return numbers.new_zeros(2, count)
        middle = (torch.arange(count, device=numbers.device) + 0.5) / count * len(numbers)
        levels = numbers[middle.long()]
        for _ in range(ROUNDS):
            name = _nearest(numbers, levels)
            many = torch.zeros_like(levels).index_add_(0, name, torch.ones_like(numbers))
            total = torch.zeros_like(levels).index_add_(0, name, numbers)
            levels = torch.where(many > 0, total / many.clamp(min=1), levels)
        if self.bits > 2:
            return torch.stack([levels, levels])
        read = levels[_nearest(numbers, levels)]
        deviation = read.std(correction=0)
        scale = numbers.std(correction=0) / torch.where(deviation > 0, deviation, 1.0)
        return torch.stack([levels, (levels - read.mean()) * scale + numbers.mean()])

    def _rounded(self, units: Tensor, at: Tensor, rows: NewRows, name: str) -> Tensor:
        levels = self._levels(units, at, rows, name)[:, :, :, 0].float()  # [B,H,1,K]
        return packed(_nearest(units, levels).to(torch.uint8), self.bits)

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            self._read(kept, name, span, row)
            for name, span in (("key", kept.of("key_range", row)), ("value", kept.of("value_range", row)[..., None]))
        )
        return (kept.roped(keys, row) if self.rope else keys), values

    def _read(self, kept: Kept, name: str, span: Tensor, row: Tensor) -> Tensor:
        codes = unpacked(kept.of(f"{name}s", row), self.bits, kept.size).long()  # [B,Hs,R,D]
        levels = kept.of(f"{name}_levels", row)[:, :, 1].float()  # [B,Hs,K]
        units = levels.gather(2, codes.flatten(2)).view(codes.shape)
        middle, reach = (span[:, :, None] if name == "key" else span).float().unbind(3)
        numbers = units * reach + middle
        return numbers.scatter(3, kept.of(f"{name}_at", row).long(), kept.of(f"{name}_far", row).float())

    def entry_bytes(self, size: int) -> dict[str, int]:
        codes, levels, (key_far, value_far) = width(size, self.bits), 4 << self.bits, self.far(size)
        return {
            "keys": codes,
            "key_far": 2 * key_far,
            "key_at": key_far,
            "key_range": 4 * size,
            "key_levels": levels,
            "values": codes,
            "value_far": 2 * value_far,
            "value_at": value_far,
            "value_range": 4,
            "value_levels": levels,
        }


def _in_units(numbers: Tensor, span: Tensor) -> Tensor:
    """`[B,H,n,D]`: numbers from their middle in units of their reach; span: `[B,H,1 or n,2,D or 1]`."""
    middle, reach = span.float().unbind(3)
    return (numbers - middle) / torch.where(reach > 0, reach, 1.0)


def _sample(count: int) -> Tensor:
    """Return places of `SAMPLE` numbers of `count`, or all.

    One at random of each stretch: equal steps would take the same channel of every row where they are as long as one.
    """
    if count <= SAMPLE:
        return torch.arange(count)
    first = torch.arange(SAMPLE + 1) * count // SAMPLE
    wide = first[1:] - first[:-1]
    return first[:-1] + (torch.rand(SAMPLE, generator=stream(0, "kvquant"), dtype=torch.float64) * wide).long()


def _nearest(numbers: Tensor, levels: Tensor) -> Tensor:
    """Return the nearest of ascending levels, int64: of numbers `[n]` and `[K]`, or `[B,H,n,D]` and `[B,H,1,K]`."""
    between = (levels[..., 1:] + levels[..., :-1]) / 2
    if numbers.ndim == 1:
        return torch.searchsorted(between, numbers)
    return (numbers[..., None] > between[..., None, :]).sum(-1)


def _apart(name: str, numbers: Tensor, at: Tensor) -> dict[str, Tensor]:
    """Return the numbers of channels `at` `[B,H,n,o]` in 16 bits, and these channels as bytes."""
    half = numbers.dtype if numbers.element_size() == 2 else torch.bfloat16
    return {f"{name}_far": numbers.gather(3, at).to(half), f"{name}_at": at.to(torch.uint8)}
