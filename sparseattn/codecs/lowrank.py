"""Keys in the span of a prompt's leading directions. ShadowKV's keys, https://arxiv.org/abs/2410.21465."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import ONCE, ROW, Kept, NewRows, RowCodec


class LowRank(RowCodec):
    """Keeps keys, as they are before RoPE, as products with the leading right singular vectors of the prompt's keys.

    ShadowKV decomposes the keys of all KV heads of a layer together, 160 directions of 1,024 channels. A codec reads a
    head's rows without the others', in an order of its own, so that each head has its own vectors. ShadowKV keeps what
    is generated as it comes; here later rows are kept by the prompt's vectors too. Values stay in 16 bits; ShadowKV
    moves them to host memory.

    Args:
        rank: directions, to the head size.
        rope: whether keys are taken before RoPE; False: after it, where no RoPE is known.
    """

    parts: ClassVar[Mapping[str, str]] = {"directions": ONCE, "keys": ROW, "values": ROW}

    def __init__(self, rank: int = 32, rope: bool = True) -> None:
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank is 1 or more directions, got {rank!r}")
        self.rank, self.rope = rank, rope
        self.before_rope = rope

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        keys = rows.unroped if self.rope else rows.keys.float()
        directions = rows.once.get("directions")  # [B,H,1,D,r]
        if directions is None:
            inner = keys.double().masked_fill(~rows.real[..., None], 0.0)  # whose sums padding must not change
            leading = torch.linalg.eigh(inner.mT @ inner).eigenvectors.flip(-1)[..., : self.rank]
            directions = leading[:, :, None].to(rows.half)
        turned = keys @ directions[:, :, 0].float()
        return {"directions": directions, "keys": turned.to(rows.half), "values": rows.values.to(rows.half)}

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        keys = kept.of("keys", row).float() @ kept.of("directions", row).float().mT
        return (kept.roped(keys, row) if self.rope else keys), kept.of("values", row).float()

    def entry_bytes(self, size: int) -> dict[str, int]:
        return {"directions": 2 * size * self.rank, "keys": 2 * self.rank, "values": 2 * size}

    def check_size(self, size: int) -> None:
        if self.rank > size:
            raise ValueError(f"{self} takes heads of {self.rank} channels and more, got {size}")
