"""What product codes miss of single rows' keys, in 4 bits a channel, and what that adds to the rows' logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_RECORD = 255  # all bytes of one, whose row is -1
HEADER = 8  # bytes of a record before its codes: the row and the scale
MULTIPLE = 8  # of which its codes take bytes
HIGHEST = 15  # code
MIDDLE = HIGHEST / 2  # where 0 lies, between two codes


def record_bytes(size: int) -> int:
    """Return W, the bytes of a row's record, of heads of D channels."""
    return HEADER + -(-size // (2 * MULTIPLE)) * MULTIPLE


def packed(ids: Tensor, missed: Tensor) -> Tensor:
    """Return records `[B,H,X,W]` uint8.

    Args:
        ids: `[B,H,X]`, rows; negative: none.
        missed: `[B,H,X,D]` float32, what codes miss of the rows' turned keys.
    """
    width = record_bytes(missed.shape[3])
    if not missed.numel():
        return torch.empty(*missed.shape[:3], width, dtype=torch.uint8, device=missed.device)
    scale = missed.abs().amax(3, keepdim=True) / MIDDLE
    codes = (missed / torch.where(scale > 0, scale, 1) + MIDDLE).round_().clamp_(0, HIGHEST).to(torch.uint8)
    low, high = torch.nn.functional.pad(codes, (0, 2 * (width - HEADER) - codes.shape[3])).chunk(2, 3)
    header = ids.int()[..., None].view(torch.uint8), scale.float().contiguous().view(torch.uint8)
    return torch.cat([*header, low | high << 4], 3)


@dataclass(frozen=True, slots=True, eq=False)
class MissedRows:
    """What codes miss of single rows.

    Args:
        records: `[B,H,X,W]` uint8, rows adjacent; of each row its number, int32, -1 for none, and none twice; a scale,
            float32; and codes of 4 bits, in byte i those of channels i, in its low bits, and i + W - 8.
        turn: `[B,H,D,D]`, the map of queries, see `Tables`.
    """

    records: Tensor
    turn: Tensor

    @property
    def ids(self) -> Tensor:
        """`[B,H,X]` int32."""
        return self.records[..., :4].view(torch.int32)[..., 0]

    def missed(self) -> Tensor:
        """Return what codes miss of the rows' turned keys, `[B,H,X,D]` float32, 0 where there is no row."""
        scale, codes = self.records[..., 4:HEADER].view(torch.float32), self.records[..., HEADER:]
        both = torch.cat([codes & HIGHEST, codes >> 4], 3)[..., : self.turn.shape[3]]
        return torch.where(self.ids[..., None] < 0, 0, (both.float() - MIDDLE) * scale)

    def more(self, query: Tensor) -> Tensor:
        """Return what is added to the rows' logits for queries `[B,H,G,D]` float32, divided by the temperature:
        `[B,H,G,X]` float32, 0 where there is no row."""
        return (query @ self.turn.float().mT) @ self.missed().mT

    def added(self, logits: Tensor, query: Tensor) -> Tensor:
        """Return logits `[B,H,G,N]` float32 of `query`, as of `more`, with it."""
        more = self.more(query)
        return logits.scatter_add(3, self.ids[:, :, None].clamp(min=0).long().expand_as(more), more)

    def reach(self, query: Tensor) -> Tensor:
        """Return the largest size of what is added, `[B,H,G]`."""
        more = self.more(query)
        return more.abs().amax(3) if more.shape[3] else more.new_zeros(more.shape[:3])
