"""Keys without the channels that the prompt's queries need least. ThinK, https://arxiv.org/abs/2407.21018."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import ONCE, ROW, Kept, NewRows, RowCodec


class ThinK(RowCodec):
    """Drops a share of the key channels: those of which queries times keys have the smallest squares.

    A channel's score is the mean square of the prompt's last 32 queries times the mean square of its keys, as in
    ThinK's code. There every query head drops channels of its own, of keys repeated for it; here the query heads of a
    KV head share them, so that a key is kept once. The channels are chosen by the first seal and hold for later ones.
    Values, and what is kept of keys, stay in 16 bits.

    Args:
        ratio: of the channels that are dropped, 0 to 1, rounded down; 0.4 is ThinK's.
    """

    parts: ClassVar[Mapping[str, str]] = {"channels": ONCE, "keys": ROW, "values": ROW}
    last_queries = 32

    def __init__(self, ratio: float = 0.4) -> None:
        if not 0 <= ratio < 1:
            raise ValueError(f"ratio is of the channels that are dropped, 0 to below 1, got {ratio!r}")
        self.ratio = ratio

    def left(self, size: int) -> int:
        """Return how many of `size` channels are kept."""
        return size - int(size * self.ratio)

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        channels = rows.once.get("channels")
        channels = self._chosen(rows) if channels is None else channels  # [B,H,1,K]
        keys = rows.keys.gather(3, channels.long().expand(-1, -1, rows.keys.shape[2], -1))
        return {"channels": channels, "keys": keys.to(rows.half), "values": rows.values.to(rows.half)}

    def _chosen(self, rows: NewRows) -> Tensor:
        if rows.queries is None:
            raise RuntimeError(f"{self} goes by the prompt's last queries, and the first seal brought none")
        of_queries = rows.queries.float().square().sum((2, 3))  # [B,H,D]; padding is zero
        of_keys = rows.keys.float().square().masked_fill(~rows.real[..., None], 0.0).sum(2)
        best = (of_queries * of_keys).topk(self.left(rows.keys.shape[3]), 2).indices
        return best.sort(2).values[:, :, None].to(torch.uint8)

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        kept_keys, channels = kept.of("keys", row).float(), kept.of("channels", row).long()
        keys = kept_keys.new_zeros(*row.shape, kept.size)
        return keys.scatter(3, channels[:, :, None].expand_as(kept_keys), kept_keys), kept.of("values", row).float()

    def entry_bytes(self, size: int) -> dict[str, int]:
        left = self.left(size)
        return {"channels": left, "keys": 2 * left, "values": 2 * size}
