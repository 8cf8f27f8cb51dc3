"""What selectors share that keep a row's key as bytes, names of centroids learned from the prompt's own keys."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.step_cost import Launch
from sparseattn.kernels import codebooks
from sparseattn.selectors.base import Rows
from sparseattn.selectors.tokens.base import LEARNED_HERE, Ranked


class Coded(Ranked):
    """Reads the rows with the largest products of the query with the centroids that stand for their keys.

    A sequence's codebooks, "centroids" of what is `learned`, are its prompt's. Rows of equal codes score alike: which
    of them are read where the budget ends is left open.

    `scan_bytes`: the codes of every row, and the codebooks once per KV head.
    """

    by_row: tuple[str, ...] = ("codes",)

    def __init__(self, group: str) -> None:
        super().__init__(group)
        self.codes = RowBuffer(2, spare=0)  # [B,H,N,M] uint8; spare names must be there, too
        self.centroids = RowBuffer(2)  # [B,H,..,d] 16 bits, centroids of d channels
        self.known = RowBuffer(1)

    def why_not_compared(self) -> str | None:
        return LEARNED_HERE

    @abstractmethod
    def encode(self, keys: Tensor) -> Tensor:
        """`[B,H,n,M]` uint8: the codes of keys `[B,H,n,D]`, of any of a sequence without codebooks."""

    @abstractmethod
    def tables(self, query: Tensor) -> Tensor:
        """`[B,H,G,M,K]` float32: what each code adds to the product of queries `[B,H,G,D]` with a key."""

    def append(self, rows: Rows) -> None:
        self.learn(rows)
        self.codes.append(self.encode(rows.keys))

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        return codebooks.logits(self.scaled_tables(query), self.codes.visible, valid)

    def scaled_tables(self, query: Tensor) -> Tensor:
        """Return `tables` of queries `[B,H,G,D]`, of what codes add to the logit."""
        return self.tables(query.float() / self.temperature(query.shape[3]))

    @abstractmethod
    def names(self, size: int) -> tuple[int, int]:
        """Of keys of `size` channels: bytes of a row's names, and numbers in a KV head's codebooks."""

    def reads(self, query: Tensor) -> tuple[int, int]:
        row, books = self.names(query.shape[3])
        return row, 2 * books

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        row, books = self.names(query.shape[3])
        every = query.shape[:3].numel()
        return Launch("names", flops=2.0 * every * books, entries=every * sealed * row)
