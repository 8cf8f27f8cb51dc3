"""What kernels read: product codes of the stored rows, a step's tables, and these tables rounded to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.kernels import codebooks
from sparseattn.kernels.product_codes.missed_rows import MissedRows

MORE = 2  # candidates for every row that is chosen: with as many the vote chooses as among all (the log, 2026-11-25)
BLOCK = 64  # rows that kernels take at once
APART, FEW = 16, 32  # blocks, see `blocks_apart`
LEVELS = 255  # steps of a rounded table
HIGHEST = 32_512  # sum of 16 bits with what is added to it
MOST = 128  # subspaces: a sum of so many rounded numbers fits 15 bits
MOST_BESIDE = 112  # with a `Turning`, which has room for 3,952 steps then


@dataclass(frozen=True, slots=True, eq=False)
class ProductCodes:
    """The codes of N stored rows.

    Args:
        codes: `[B,H,R,N]` uint8: byte r of every row. With 4 bits it holds the codes of subspaces 2r, in its low bits,
            and 2r + 1; with 8 the code of subspace r.
        bits: of a code, 4 or 8.
        valid: `[B,N]` bool, rows that are no padding.
    """

    codes: Tensor
    bits: int
    valid: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Turning:
    """A key that each row has beside what its codes say, turned to the row's position.

    Args:
        rope: what turns it.
        key: `[B,H,D]` float32, before RoPE.
        at: `[B,N]` int32, positions of rows; what is below 0 counts as 0.
        first: row i of every sequence is at position `first + i`; None: only `at` says where rows are.
        missed: what is added for single rows besides; None: nothing is.
    """

    rope: Rope
    key: Tensor
    at: Tensor
    first: int | None = None
    missed: MissedRows | None = None

    def products(self, query: Tensor) -> Tensor:
        """Return those of queries `[B,H,G,D]` float32, divided by the temperature, with it, and what is added besides,
        `[B,H,G,N]` float32."""
        found = self.rope.products_at(query, self.key, self.at.clamp(min=0).long())
        return found if self.missed is None else self.missed.added(found, query)

    def bounds(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest that `products` can be at any position, `[B,H,G]` float32 each, or less and
        more."""
        least, most = self.rope.bounds(query, self.key)
        if self.missed is None:
            return least, most
        reach = self.missed.reach(query)
        return least - reach, most + reach


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What each code of a subspace adds to a step's logits, by what that is made of.

    Args:
        query: `[B,H,G,D]`, of a stored dtype.
        turn: `[B,H,D,D]`, the map of queries to the space of the centroids, of stored dtypes.
        centroids: `[B,H,M,2^bits,D/M]`, of the same dtype; where a key is a sum of M of them, `[B,H,M,2^bits,D]`.
        temperature: what queries are divided by.
        beside: what each row has beside its codes; None: nothing.
    """

    query: Tensor
    turn: Tensor
    centroids: Tensor
    temperature: float = 1.0
    beside: Turning | None = None

    def numbers(self) -> Tensor:
        """Return them, `[B,H,G,M,2^bits]` float32."""
        return codebooks.products((self.query.float() / self.temperature) @ self.turn.float().mT, self.centroids)

    def steps_beside(self, step: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """Return what is added for each row in whole steps `[B,H]` from the least of `bounds`, `[B,H,G,N]` float32;
        None: nothing."""
        if self.beside is None or bounds is None:
            return None
        scaled = self.query.float() / self.temperature
        (least, _), unit = bounds, torch.where(step > 0, step, 1)[:, :, None, None]
        return ((self.beside.products(scaled) - least[..., None]) / unit).round_()

    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Return the least and the largest that can be added for a row, `[B,H,G]` each; None: nothing is."""
        return None if self.beside is None else self.beside.bounds(self.query.float() / self.temperature)


@dataclass(frozen=True, slots=True, eq=False)
class RankedCodes:
    """Stored rows and all that ranks them for a query: `product_codes.dispatch.best` of `tables` and `keys`.

    Args:
        turn, centroids, temperature, beside: see `Tables`.
        keys: the rows.
    """

    turn: Tensor
    centroids: Tensor
    temperature: float
    keys: ProductCodes
    beside: Turning | None = None

    def tables(self, query: Tensor) -> Tables:
        """Return those of queries `[B,H,G,D]`."""
        return Tables(query, self.turn, self.centroids, self.temperature, self.beside)

    @property
    def valid(self) -> Tensor:
        """`[B,N]` bool, rows that are no padding."""
        return self.keys.valid


def rounded(tables: Tensor, bounds: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables rounded to 8 bits, with one step for all query heads of a KV head, so that these compare.

    Each subspace's least number is taken from its numbers, so a logit is `least + step * sum` of the rounded ones,
    within `M * step / 2`: every one of the M numbers is off by half a step at most.

    Args:
        tables: `[B,H,G,M,K]` float32.
        bounds: least and largest `[B,H,G]` float32 of what is added for a row: steps are so long that it fits sums of
            16 bits.

    Returns:
        `[B,H,G,M,K]` uint8, the step `[B,H]` float32, and the sum of the least numbers `[B,H,G]` float32.
    """
    least, most = tables.aminmax(dim=4, keepdim=True)
    step = (most - least).amax((2, 3, 4)) / LEVELS  # [B,H]
    if bounds is not None:
        low, high = bounds
        step = torch.maximum(step, (high - low).amax(2) / room_beside(tables.shape[3]))
    scale = torch.where(step > 0, step, 1)[:, :, None, None, None]
    return ((tables - least) / scale).round_().clamp_(max=LEVELS).to(torch.uint8), step, least.sum((3, 4))


def room_beside(subspaces: int) -> int:
    """Return the largest number of steps that can be added to a sum of so many rounded numbers."""
    return HIGHEST - LEVELS * subspaces


def blocks_apart(rows: int) -> int:
    """Return how many blocks on the next block of the sample is: 16; fewer where these would be fewer than 32."""
    return max(1, min(rows // BLOCK // FEW, APART))


def sampled(rows: int, device: torch.device) -> Tensor:
    """Return the rows `[n]` int64 that tell what a query head weighs in all: those of every 16th block of 64; where
    there are fewer than 512 blocks those of more, of fewer than 64 all."""
    apart, blocks = blocks_apart(rows), -(-rows // BLOCK)
    first = torch.arange(0, blocks, apart, device=device) * BLOCK
    drawn = (first[:, None] + torch.arange(BLOCK, device=device)).flatten()
    last = (blocks - 1) // apart * apart * BLOCK  # the first row of the last block, of which not all need be there
    return drawn[: len(drawn) - max(last + BLOCK - rows, 0)]


def spans(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return start and length, int32, of single rows `ids`, negative for none."""
    return ids.clamp(min=0).int(), (ids >= 0).int()
