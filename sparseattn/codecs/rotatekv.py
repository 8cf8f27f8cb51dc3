"""Keys and values turned by a Hadamard matrix and rounded by row. RotateKV, https://arxiv.org/abs/2501.16383."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import ROW, Kept, NewRows, RowCodec
from sparseattn.core.hadamard import walsh_hadamard
from sparseattn.kernels.attend_quantized.reference import check_bits, read_rows, round_rows, width


class RotateKV(RowCodec):
    """Turns keys as they are before RoPE, and values, by a Hadamard matrix, and rounds each row by itself.

    The turn spreads outlier channels over all, so that one pair of levels serves a whole row. Sinks stay exact, as the
    cache's sink. RotateKV's code turns four heads at once, behind a calibrated order of their channels, and finds sinks
    by massive activations. A codec reads one head's rows without the others', so that each head is turned alone; within
    one matrix an order of channels changes nothing but signs.

    Args:
        bits: 2, 4 or 8.
        clip: the share of a row's reach that its levels span; 0.8 with two bits and 1 with more in RotateKV's code.
        rope: whether keys are turned as they are before RoPE; False: after it, where no RoPE is known.
    """

    parts: ClassVar[Mapping[str, str]] = {"keys": ROW, "key_levels": ROW, "values": ROW, "value_levels": ROW}

    def __init__(self, bits: int = 2, clip: float = 0.8, rope: bool = True) -> None:
        check_bits(bits)
        if not 0 < clip <= 1:
            raise ValueError(f"clip is a share of a row's reach, above 0 and to 1, got {clip!r}")
        self.bits, self.clip, self.rope = bits, clip, rope
        self.before_rope = rope

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        keys = rows.unroped if self.rope else rows.keys
        for name, part in (("key", keys), ("value", rows.values)):
            turned = _turned(part.float())
            low, high = (self.clip * end for end in turned.aminmax(dim=3, keepdim=True))
            clipped = torch.minimum(torch.maximum(turned, low), high)
            made[f"{name}s"], made[f"{name}_levels"] = round_rows(clipped, self.bits, rows.half, turned.shape[3])
        return made

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            _turned(
                read_rows(kept.of(f"{name}s", row), kept.of(f"{name}_levels", row), self.bits, kept.size, kept.size)
            )
            for name in ("key", "value")
        )
        return (kept.roped(keys, row) if self.rope else keys), values

    def entry_bytes(self, size: int) -> dict[str, int]:
        codes = width(size, self.bits)
        return {"keys": codes, "key_levels": 4, "values": codes, "value_levels": 4}

    def check_size(self, size: int) -> None:
        if size & -size < 8:
            raise ValueError(
                f"{self} turns blocks of a power of two channels, 8 or more, which {size} is no multiple of"
            )


def _turned(x: Tensor) -> Tensor:
    """`[..,D]`: `x` in blocks of the largest power of two channels that divides D; twice it is x again."""
    block = x.shape[-1] & -x.shape[-1]
    return (walsh_hadamard(x.unflatten(-1, (-1, block))) * block**-0.5).flatten(-2)
