"""Self-Indexing KVCache: every row ranked by the signs of its key, a centroid for those of four channels.

https://arxiv.org/abs/2603.14224
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.kernels import codebooks
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import half
from sparseattn.selectors.tokens.codebook_base import Coded

CHANNELS = 4  # of a pattern
PATTERNS = 1 << CHANNELS


class SelfIndex(Coded):
    """Reads the rows whose keys, as the mean keys of their sign patterns, have the largest product with the query.

    The median of the prompt's keys is taken from every key, channel by channel. The signs of four consecutive channels
    are a pattern, whose centroid is the mean of the prompt's keys that have it: 16 centroids for every four channels. A
    query's products with them are a table, and a row's score is the sum of what its patterns name.

    Args:
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.

    An index row takes `D / 8` bytes; the centroids of a KV head take 16 keys more.

    Departures, from the paper's code (LfieLike/selfindexingkv). Its query group chooses by the mean of its queries,
    which is "sum" here. It scores keys without their median, which changes no vote but "max". It keeps the 64 prompt
    rows that the last query scores highest in full, and every row of the answer: both are left to sink and window, and
    rows sealed later get codes by the prompt's median and centroids; a pattern that no key of the prompt has is the
    median plus or minus the channels' mean distance from it. There the same signs are also the top bit of the keys that
    attention reads, whose other bits and values are quantised; here attention reads keys and values as they are, and
    the codes are an index beside them. Channels are filled up with zeros to a multiple of four.

    `scan_bytes`: the codes of every row, and the centroids once per KV head.
    """

    def __init__(self, group: str = "softmax") -> None:
        super().__init__(group)
        self.centre = RowBuffer(2)  # [B,H,D'] float32, the median; D' is D filled up

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        kind, keys = half(rows.keys), _filled(rows.keys[0].float())  # [H,n,D']
        centre = keys.median(1).values  # [H,D']
        away = (keys - centre[:, None]).abs().mean(1).unflatten(1, (-1, 1, CHANNELS))  # [H,S,1,4]
        pattern = _patterns(keys >= centre[:, None])[..., None]  # [H,n,S,1]
        cut = keys.unflatten(2, (-1, CHANNELS))  # [H,n,S,4]
        bits = torch.arange(PATTERNS, device=keys.device)[:, None] >> torch.arange(CHANNELS, device=keys.device) & 1
        books = centre.unflatten(1, (-1, 1, CHANNELS)) + (2 * bits - 1) * away  # [H,S,16,4]
        for p in range(PATTERNS):
            has = pattern == p
            count = has.sum(1)  # [H,S,1]
            mean = torch.where(has, cut, 0.0).sum(1) / count.clamp(min=1)
            books[:, :, p] = torch.where(count > 0, mean, books[:, :, p])
        return {"centre": centre, "centroids": books.to(kind)}

    def encode(self, keys: Tensor) -> Tensor:
        return codebooks.paired(_patterns(_filled(keys.float()) >= self.centre.data[:, :, None]))

    def names(self, size: int) -> tuple[int, int]:
        patterns = -(-size // CHANNELS)
        return -(-patterns // 2), patterns * CHANNELS * PATTERNS

    def tables(self, query: Tensor) -> Tensor:
        return codebooks.tables(_filled(query), self.centroids.visible)


def _filled(x: Tensor) -> Tensor:
    """`x` `[..,D]` with zeros up to whole patterns."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % CHANNELS))


def _patterns(signs: Tensor) -> Tensor:
    """`[..,D/4]` uint8: the pattern of bool `signs` `[..,D]`, the first channel its lowest bit."""
    weight = (1 << torch.arange(CHANNELS, device=signs.device)).to(torch.uint8)
    return (signs.unflatten(-1, (-1, CHANNELS)) * weight).sum(-1, dtype=torch.uint8)
