"""Blocks of channels that share an exponent, channels in order of size. K-sort, https://arxiv.org/abs/2403.20137."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import ONCE, ROW, Kept, NewRows, RowCodec
from sparseattn.kernels.attend_quantized.reference import packed, unpacked, width

ZERO = 128  # the byte of exponent 0


class BlockFloat(RowCodec):
    """Keeps rows as block floating point: signed mantissas of a few bits, and an exponent of 8 bits for each block.

    Key channels are put in the order of their size first, so that those with large numbers share blocks. The paper
    sorts by the norms of the key projection's rows, once for a model; here the prompt's keys decide, by their mean
    squares, once for a prompt. The paper is about keys; values are kept in blocks too, in their own order.

    Args:
        bits: of a mantissa with its sign, 4 (the paper's BFP12) or 8.
        block: channels that share an exponent, 8 to 128; the paper finds 32 and 64 good.
        sort: whether key channels are ordered.
    """

    parts: ClassVar[Mapping[str, str]] = {
        "order": ONCE,
        "keys": ROW,
        "key_exponents": ROW,
        "values": ROW,
        "value_exponents": ROW,
    }

    def __init__(self, bits: int = 4, block: int = 32, sort: bool = True) -> None:
        if type(bits) is not int or bits not in (4, 8):
            raise ValueError(f"bits of a mantissa are 4 or 8, got {bits!r}")
        if type(block) is not int or not 8 <= block <= 128:
            raise ValueError(f"block is 8 to 128 channels that share an exponent, got {block!r}")
        self.bits, self.block, self.sort = bits, block, sort

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        order = rows.once.get("order")  # [B,H,1,D]
        if order is None:
            size = rows.keys.float().square().masked_fill(~rows.real[..., None], 0.0).sum(2)
            order = (size if self.sort else torch.zeros_like(size)).sort(dim=2, descending=True, stable=True).indices
            order = order[:, :, None].to(torch.uint8)
        keys = rows.keys.float().gather(3, order.long().expand_as(rows.keys))
        made = {"order": order}
        for name, part in (("key", keys), ("value", rows.values.float())):
            made[f"{name}s"], made[f"{name}_exponents"] = self._rounded(part)
        return made

    def _rounded(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[B,H,n,W]` and exponents `[B,H,n,blocks]` of numbers `[B,H,n,D]`."""
        size = numbers.shape[3]
        blocks = torch.nn.functional.pad(numbers, (0, -size % self.block)).unflatten(3, (-1, self.block))
        most = blocks.abs().amax(4)
        exponent = torch.where(most > 0, torch.frexp(most).exponent - 1, -ZERO + 1).clamp(-ZERO + 1, ZERO - 1)
        half = 1 << (self.bits - 1)
        mantissa = torch.round(blocks / self._scale(exponent)[..., None]).clamp(-half, half - 1) + half
        codes = mantissa.to(torch.uint8).flatten(3)[..., :size]
        return packed(codes, self.bits), (exponent + ZERO).to(torch.uint8)

    def _scale(self, exponent: Tensor) -> Tensor:
        """Return what a mantissa counts: of the largest number's exponent e, `2^(e + 2 - bits)`."""
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent.int() + 2 - self.bits)

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (self._read(kept, name, row) for name in ("key", "value"))
        order = kept.of("order", row).long()[:, :, None].expand_as(keys)
        return torch.empty_like(keys).scatter_(3, order, keys), values

    def _read(self, kept: Kept, name: str, row: Tensor) -> Tensor:
        mantissa = unpacked(kept.of(f"{name}s", row), self.bits, kept.size).float() - (1 << (self.bits - 1))
        scale = self._scale(kept.of(f"{name}_exponents", row).int() - ZERO)
        return mantissa * scale.repeat_interleave(self.block, 3)[..., : kept.size]

    def entry_bytes(self, size: int) -> dict[str, int]:
        codes, blocks = width(size, self.bits), -(-size // self.block)
        return {"order": size, "keys": codes, "key_exponents": blocks, "values": codes, "value_exponents": blocks}
