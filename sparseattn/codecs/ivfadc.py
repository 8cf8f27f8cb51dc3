"""Rows as a bucket's centroid and product codes of what it leaves. IVFADC, https://doi.org/10.1109/TPAMI.2010.57."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import ONCE, ROW, Kept, NewRows, RowCodec
from sparseattn.kernels.attend_quantized.reference import packed, unpacked, width
from sparseattn.kernels.nearest_codes import dispatch as nearest_codes
from sparseattn.kernels.product_kmeans.dispatch import product_codebooks

SAMPLE = 1 << 14  # most rows of a head that centroids are learnt from, evenly over the prompt
SIDES = ("key", "value")


class IVFADC(RowCodec):
    """Keeps of a key and of a value the nearest of `lists` centroids, and product codes of the difference.

    The channels of a difference are cut into parts of `channels`. Each part is named by the nearest of `2^bits`
    centroids of that part. Keys are taken before RoPE, where SAAP's buckets lie (https://arxiv.org/abs/2502.08246 names
    product codes as what its rows could be kept in). All centroids are k-means of the prompt's rows, a head each, and
    code later rows too.

    IVFADC learns them once, for a whole collection, and sums a query's products with the centroids from tables. Here
    rows are read back. SAAP's buckets are those of a trained file; compose `KVCache("saap:...", rows="ivfadc")` for
    these. Its paper gives no codec of values, which are kept so too.

    Args:
        lists: centroids of whole rows, 16 or 256.
        channels: of a part, a divisor of the head size.
        bits: of the name of a part, 4 or 8.
        rope: whether keys are taken before RoPE; False: after it, where no RoPE is known.
        seed: of the first centroids.
    """

    parts: ClassVar[Mapping[str, str]] = {
        f"{side}_{part}": share
        for side in SIDES
        for part, share in (("list", ROW), ("names", ROW), ("centroids", ONCE), ("books", ONCE))
    }

    def __init__(self, lists: int = 16, channels: int = 2, bits: int = 4, rope: bool = True, seed: int = 0) -> None:
        for name, given, taken in (("lists", lists, (16, 256)), ("bits", bits, (4, 8))):
            if type(given) is not int or given not in taken:
                raise ValueError(f"{name} of ivfadc are {taken[0]} or {taken[1]}, got {given!r}")
        if type(channels) is not int or channels < 1:
            raise ValueError(f"channels of a part are 1 or more, got {channels!r}")
        self.lists, self.channels, self.bits, self.rope, self.seed = lists, channels, bits, rope, seed
        self.before_rope = rope

    def check_size(self, size: int) -> None:
        if size % self.channels:
            raise ValueError(
                f"{self} cuts heads into parts of {self.channels} channels, which {size} is no multiple of"
            )

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        keys = rows.unroped if self.rope else rows.keys.float()
        made: dict[str, Tensor] = {}
        for side, part in zip(SIDES, (keys, rows.values.float()), strict=True):
            made |= {f"{side}_{name}": tensor for name, tensor in self._coded(side, part, rows).items()}
        return made

    def _coded(self, side: str, part: Tensor, rows: NewRows) -> dict[str, Tensor]:
        """Return lists, names and centroids of one side of the rows, `part` `[B,H,n,D]` float32."""
        centroids, books = rows.once.get(f"{side}_centroids"), rows.once.get(f"{side}_books")
        if centroids is None:
            centroids = _learnt(part, rows.real, 1, self.lists.bit_length() - 1, self.seed).to(rows.half)
        own = nearest_codes.names(part, centroids[:, :, 0]).mT  # [B,H,n,1]
        left = part - _taken(centroids[:, :, 0, 0], own[..., 0])
        if books is None:
            books = _learnt(left, rows.real, part.shape[3] // self.channels, self.bits, self.seed).to(rows.half)
        names = packed(nearest_codes.names(left, books[:, :, 0]).mT, self.bits)
        return {"list": own, "names": names, "centroids": centroids, "books": books}

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (self._read(kept, side, row) for side in SIDES)
        return (kept.roped(keys, row) if self.rope else keys), values

    def _read(self, kept: Kept, side: str, row: Tensor) -> Tensor:
        parts = kept.size // self.channels
        names = unpacked(kept.of(f"{side}_names", row), self.bits, parts).long()  # [B,Hs,R,S]
        books = kept.of(f"{side}_books", row).float()  # [B,Hs,S,K,d]
        place = names + torch.arange(parts, device=names.device) * books.shape[3]
        centres = _taken(books.flatten(2, 3), place.flatten(2)).view(*row.shape, kept.size)
        return centres + _taken(
            kept.of(f"{side}_centroids", row)[:, :, 0].float(), kept.of(f"{side}_list", row)[..., 0]
        )

    def entry_bytes(self, size: int) -> dict[str, int]:
        each = {
            "list": 1,
            "names": width(size // self.channels, self.bits),
            "centroids": 2 * size * self.lists,
            "books": 2 * size << self.bits,
        }
        return {f"{side}_{name}": many for side in SIDES for name, many in each.items()}


def _learnt(part: Tensor, real: Tensor, parts: int, bits: int, seed: int) -> Tensor:
    """`[B,H,1,S,2^bits,d]`: centroids of each of S parts of the real rows of `part` `[B,H,n,D]`, 0 where none is."""
    count = torch.zeros(1, 1, part.shape[3], device=part.device)
    made = []
    for rows, there in zip(part.flatten(0, 1), real.flatten(0, 1), strict=True):
        mine = rows[there]
        mine = mine[:: max(len(mine) // SAMPLE, 1)][None] if len(mine) else count
        made.append(product_codebooks(mine, parts, bits, seed)[0])
    return torch.stack(made).unflatten(0, part.shape[:2])[:, :, None]


def _taken(table: Tensor, which: Tensor) -> Tensor:
    """`[B,H,n,d]`: of vectors `[B,H,K,d]` those named by `[B,H,n]`."""
    return table.gather(2, which.long()[..., None].expand(-1, -1, -1, table.shape[3]))
