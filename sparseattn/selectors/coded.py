"""What selectors share that keep a row's key as bytes, names of centroids learned from the prompt's own keys."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.kernels.scoring import best_rows
from sparseattn.selection import Selection
from sparseattn.selectors.base import Rows, Selector, check_group, vote
from sparseattn.storage import RowBuffer


class Coded(Selector):
    """Reads the rows with the largest products of the query with the centroids that stand for their keys.

    A sequence's codebooks are learned from the first real keys that it seals, its prompt's, and are not changed by
    those sealed later. Rows of equal codes score alike: which of them are read where the budget ends is left open.

    `scan_bytes`: the codes of every row, and the codebooks once per KV head.
    """

    def __init__(self, group: str) -> None:
        self.group = check_group(group)
        self.codes = RowBuffer(2)  # [B,H,N,M] uint8
        self.centroids = RowBuffer(2)  # [B,H,..,d] 16 bits, centroids of d channels
        self.known = RowBuffer(1)  # [B,1] bool, a sequence has codebooks
        self.real = RowBuffer(1, spare=False)  # [B,N] bool, not padding

    @abstractmethod
    def learned(self, keys: Tensor) -> dict[str, Tensor]:
        """What is learned from a sequence's first real keys.

        Args:
            keys: `[H,n,D]`, n >= 1.

        Returns:
            Attribute, "centroids" among them -> what its row buffer holds of the sequence, `[H,..]`.
        """

    @abstractmethod
    def encode(self, keys: Tensor) -> Tensor:
        """`[B,H,n,M]` uint8: the codes of keys `[B,H,n,D]`, of any of a sequence without codebooks."""

    @abstractmethod
    def tables(self, query: Tensor) -> Tensor:
        """`[B,H,G,M,256]` float32: what each code adds to the product of queries `[B,H,G,D]` with a key."""

    def fix(self, rows: int, seal: int) -> None:
        for _, buffer in self.buffers():
            if isinstance(buffer, RowBuffer):
                buffer.fix()
        for buffer in (self.codes, self.real):
            buffer.fix(rows)

    def append(self, rows: Rows) -> None:
        real = rows.positions >= 0
        if not self.known.rows:
            self.known.append(torch.zeros_like(real[:, :1]))
        fresh = real.any(1) & ~self.known.data[:, 0]
        for b in fresh.nonzero()[:, 0].tolist():
            for name, made in self.learned(rows.keys[b][:, real[b]]).items():
                buffer: RowBuffer = getattr(self, name)
                if not buffer.rows:
                    buffer.capacity = made.shape[1]
                    buffer.append(made.new_zeros(len(real), *made.shape))
                buffer.data[b] = made
        self.known.data[:, 0] |= fresh
        self.codes.append(self.encode(rows.keys))
        self.real.append(real)

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        batch, heads, group, size = query.shape
        if not self.real.rows:
            return Selection.none(batch, heads, query.device)
        real = self.real.visible
        logits = codebooks.logits(self.tables(query.float() / size**0.5), self.codes.visible, real)
        ids = best_rows(vote(logits, self.group), budget)
        books = self.centroids.visible
        scanned = real.sum(-1)[:, None]  # [B,1]
        read = scanned * self.codes.full.shape[3] + (scanned > 0) * (books[0, 0].numel() * books.element_size())
        chosen = heads * group if self.group == "each" else heads
        return Selection.tokens(ids, scanned.expand(-1, chosen), read.expand(-1, heads))
