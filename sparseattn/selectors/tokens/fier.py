"""FIER: every row ranked by its key in one bit a channel, least or largest of a group. https://arxiv.org/abs/2508.08256"""

from __future__ import annotations

from sparseattn.selectors.tokens.lowbit import LowBit


class Fier(LowBit):
    """Reads the rows whose keys, rounded to the least or the largest of their group in every channel, score highest.

    Of `rows` consecutive rows each channel keeps its least and largest number, and each row one bit: which of them is
    nearer. The score is the query's product with the key so rounded; the rows with the highest scores are read.

    Args:
        rows: a group that shares levels, a multiple of 16; 32 by default. Rows that wait for a full one are read
            densely.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.

    An index row takes `D / 8` bytes and its share of the levels, `4 D / rows`: at D = 64, 16 bytes, as Quest's bounds
    of bfloat16 (page 16) do. `LowBit(1, 32)` differs in its levels alone.

    Departures. Of the paper we could read the first page, and of its code what others report who rebuilt it: rounding
    to nearest between minimum and maximum, groups of 32 tokens for each channel, a choice of single tokens for each
    query head, layers 0 and 1 dense. So "each" is the vote nearest to it; one list per KV head is ours, for comparisons
    at equal rows. Which layers are dense is the caller's choice here, as are sink and window. Levels are rounded
    outwards to 16 bits. The CPU kernel rounds the query, times the steps, to 8 bits, see `LowBit`.

    `scan_bytes`: the codes and levels of every row.
    """

    def __init__(self, rows: int = 32, group: str = "softmax") -> None:
        super().__init__(1, rows, group=group)

    @property
    def levels(self) -> str:
        return "ends"
