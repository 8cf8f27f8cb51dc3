"""What methods share that rank rows by codes of four bits a subspace, of maps of keys and queries that were learned."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.step_cost import Launch
from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import ProductCodes
from sparseattn.selectors.base import Rows
from sparseattn.selectors.parameters.learned_index import NIBBLE
from sparseattn.selectors.tokens.calibrated_base import PROMPT, FromCalibration
from sparseattn.utils.hashing import stream

CHUNK = 1 << 14  # rows that are coded at a time


class LearnedCodes(FromCalibration):
    """Reads the rows with the largest sums of table entries, one for each code of four bits that is kept of a key.

    Args:
        artefact: a file of `sparseattn train`; "prompt" (default): no file, and maps that are drawn at random. They say
            what learning is worth.
        seed: of the maps that are drawn.
        group: how a query group votes, see `vote`.

    `scan_bytes`: the codes of every row, and the maps of queries once per KV head.
    """

    by_row = ("codes",)
    operators = 20

    def __init__(self, artefact: str, seed: int, group: str) -> None:
        super().__init__(group)
        self.seed = seed
        self.codes = RowBuffer(3, spare=0)  # [B,H,R,N] uint8, two codes a byte, each byte of all rows together
        self.known = RowBuffer(1)
        self.read_from(artefact)

    @abstractmethod
    def subspaces(self, size: int) -> int:
        """Return S, codes that are kept of a key of this size."""

    @abstractmethod
    def named(self, keys: Tensor) -> Tensor:
        """Return the codes `[B,H,n,S]` uint8 of keys `[B,H,n,D]` float32."""

    @abstractmethod
    def tables(self, query: Tensor) -> Tensor:
        """Return what codes add to the scores of queries `[B,H,G,D]` float32: `[B,H,G,S,16]`."""

    @abstractmethod
    def drawn(self, heads: int, size: int) -> dict[str, Tensor]:
        """Return maps that were not learned, by the names of their row buffers: `[H,..]` each."""

    def normal(self, name: str, *shape: int) -> Tensor:
        """Return standard normal numbers of a shape, those of this layer and part."""
        return torch.randn(shape, generator=stream(self.seed, self.layer, name))

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys = rows.keys[0]
        if self.artefact != PROMPT:
            return self.filed(keys)
        every = self.drawn(self._every(len(keys)), keys.shape[2])
        own = list(self.head_numbers(len(keys)))
        return {name: part[own].to(keys.device) for name, part in every.items()}

    def append(self, rows: Rows) -> None:
        self.learn(rows)
        packed = [self._packed(part) for part in rows.keys.split(CHUNK, 2)]
        self.codes.append(torch.cat(packed, 2).mT)

    def _packed(self, keys: Tensor) -> Tensor:
        """Return the codes `[B,H,n,R]` of keys `[B,H,n,D]`, two a byte."""
        codes = self.named(keys.float())
        if codes.shape[3] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[..., ::2] | codes[..., 1::2] << NIBBLE

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        tables = self.tables(query.float())
        return product_codes.logits(tables, ProductCodes(self.codes.visible, NIBBLE, valid))

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a key's codes."""
        return -(-self.subspaces(size) // 2)

    @abstractmethod
    def map_bytes(self, group: int, size: int) -> int:
        """Return the bytes of the maps that the queries of a KV head read."""

    def reads(self, query: Tensor) -> tuple[int, int]:
        return self.row_bytes(query.shape[3]), self.map_bytes(*query.shape[2:])

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        size = query.shape[3]
        looked_up = query.shape[:3].numel() * sealed * self.subspaces(size)
        return Launch("names", flops=2.0 * query.shape[:3].numel() * self.map_bytes(1, size) / 4, entries=looked_up)
