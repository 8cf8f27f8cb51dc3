"""Rows that the prompt's queries attended to in more bits than the others. ZipCache, https://arxiv.org/abs/2405.14256."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from sparseattn.codecs.base import OWN, ROW, SEAL, Kept, NewRows, RowCodec
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend_quantized.reference import (
    between,
    check_bits,
    packed,
    read_rows,
    round_rows,
    unpacked,
    width,
)
from sparseattn.kernels.encode_keys.levels import levels_of_16_bits

PROBES = 128  # of the prompt's newest queries
CLASSES = ("high", "low")


class ZipCacheRows(RowCodec):
    """Rounds the prompt's salient rows to `high` bits and the others to `low`.

    A row's saliency is the attention that it got from the prompt's newest queries, over the number of tokens that see
    it. Keys are rounded by channel over all rows of a class; values by row, each channel divided by the root of its
    largest number first ("channel-separable tokenwise").

    ZipCache's probes are the newest 5 % of the prompt's queries and 5 % at random; here they are the newest 128. Its
    levels of a value span all heads, here a head. Of what is generated, the last token's attention decides; here rows
    that are sealed later have `high` bits, as no queries come with them. `score=sum` leaves the division out: the
    accumulated attention by which MiKV (https://arxiv.org/abs/2402.18096) tells rows apart.

    Args:
        high, low: 2, 4 or 8 bits.
        share: of the prompt's rows that are salient, 0 to 1, rounded up; 0.6 is ZipCache's.
        score: "normalised" or "sum".
    """

    parts: ClassVar[Mapping[str, str]] = {
        "place": ROW,
        "key_levels": SEAL,
        "channels": SEAL,
        "high_keys": OWN,
        "high_values": OWN,
        "high_levels": OWN,
        "low_keys": OWN,
        "low_values": OWN,
        "low_levels": OWN,
    }
    last_queries = PROBES
    wants_weights = True

    def __init__(self, high: int = 4, low: int = 2, share: float = 0.6, score: str = "normalised") -> None:
        check_bits(high)
        check_bits(low)
        if not 0 <= share <= 1:
            raise ValueError(f"share is of the prompt's rows, 0 to 1, got {share!r}")
        if score not in ("normalised", "sum"):
            raise ValueError(f"score is normalised or sum, got {score!r}")
        self.high, self.low, self.share, self.score = high, low, share, score

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        salient = self._salient(rows)  # [B,H,n]
        scale = rows.values.float().abs().amax(2, keepdim=True).sqrt().to(rows.half)
        divided = rows.values.float() / torch.where(scale > 0, scale, 1.0).float()
        made, levels = {"channels": scale}, []
        place = torch.zeros_like(salient, dtype=torch.int32)
        for name, mine in (("high", salient), ("low", ~salient)):
            number = mine.cumsum(2) - 1 + rows.entries[f"{name}_keys"]
            place = torch.where(mine, number if name == "high" else -1 - number, place).int()
            count = int(mine.sum(2).max()) if mine.numel() else 0
            taken = mine.byte().argsort(dim=2, descending=True, stable=True)[:, :, :count]  # [B,H,E]
            keys, own = self._by_channel(rows.keys.float(), mine & rows.real, getattr(self, name), rows.half)
            levels.append(own)
            values, of_values = round_rows(divided, getattr(self, name), rows.half, divided.shape[3])
            for part, whole in (("keys", keys), ("values", values), ("levels", of_values.flatten(3))):
                made[f"{name}_{part}"] = whole.gather(2, taken[..., None].expand(-1, -1, -1, whole.shape[3]))
        return {**made, "place": place, "key_levels": torch.stack(levels, 2)[:, :, None]}

    def _salient(self, rows: NewRows) -> Tensor:
        """`[B,H,n]` bool: as many rows of each head as the share says; all where nothing tells."""
        if rows.weights is None or rows.seen is None:
            return torch.ones_like(rows.real)
        score = rows.weights if self.score == "sum" else rows.weights / rows.seen.clamp(min=1)
        order = score.masked_fill(~rows.real, -1.0).sort(dim=2, descending=True, stable=True).indices
        count = (rows.real.sum(2, keepdim=True).double() * self.share).ceil()
        ranks = torch.arange(order.shape[2], device=order.device).expand_as(order)
        return torch.zeros_like(rows.real).scatter(2, order, ranks < count)

    @staticmethod
    def _by_channel(keys: Tensor, mine: Tensor, bits: int, half: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes `[B,H,n,W]` of all rows by levels `[B,H,2,D]` that span those of `mine` `[B,H,n]`."""
        other = ~mine[..., None]
        least, most = keys.masked_fill(other, torch.inf).amin(2), keys.masked_fill(other, -torch.inf).amax(2)
        none = ~mine.any(2)[..., None]
        low, step = levels_of_16_bits(least.masked_fill(none, 0.0), most.masked_fill(none, 0.0), bits, "ends", half)
        by = torch.where(step > 0, step, 1.0).float()[:, :, None]
        codes = ((keys - low.float()[:, :, None]) / by).round().clamp(0, (1 << bits) - 1)
        return packed(codes.to(torch.uint8), bits), torch.stack([low, step], 2)

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        place, levels = kept.of("place", row), kept.of("key_levels", row)  # [B,Hs,R,2,2,D]
        high, parts = (place >= 0)[..., None], []
        for c, (name, entry) in enumerate(zip(CLASSES, (place, -1 - place), strict=True)):
            bits, entry = getattr(self, name), entry.clamp(min=0).long()
            keys = between(unpacked(kept.at(f"{name}_keys", entry), bits, kept.size), levels[:, :, :, c])
            of_values = kept.at(f"{name}_levels", entry).unflatten(3, (2, 1))
            parts.append((keys, read_rows(kept.at(f"{name}_values", entry), of_values, bits, kept.size, kept.size)))
        keys, values = (torch.where(high, a, b) for a, b in zip(*parts, strict=True))
        return keys, values * kept.of("channels", row).float()

    def entry_bytes(self, size: int) -> dict[str, int]:
        codes = {"high": width(size, self.high), "low": width(size, self.low)}
        own = {f"{name}_{part}": each for name, each in codes.items() for part in ("keys", "values")}
        return {"place": 4, "key_levels": 8 * size, "channels": 2 * size, "high_levels": 4, "low_levels": 4, **own}

    def nbytes(self, size: int, seals: Sequence[int]) -> int:
        each = self.entry_bytes(size)
        high = math.ceil(seals[0] * self.share) + sum(seals[1:]) if seals else 0
        count = {"high": high, "low": sum(seals) - high}
        whole = sum(seals) * each["place"] + len(seals) * (each["key_levels"] + each["channels"])
        return whole + sum(
            count[name] * each[f"{name}_{part}"] for name in CLASSES for part in ("keys", "values", "levels")
        )

    def bytes_read(self, kept: Kept, selection: Selection) -> Tensor:
        named, each = kept.named(selection), self.entry_bytes(kept.size)
        high = kept.part("place") >= 0
        total = named.sum(-1) * each["place"]
        total = total + kept.touched("channels", named) * (each["key_levels"] + each["channels"])
        for name, mine in zip(CLASSES, (high, ~high), strict=True):
            row = sum(each[f"{name}_{part}"] for part in ("keys", "values", "levels"))
            total = total + (named & mine).sum(-1) * row
        return total
