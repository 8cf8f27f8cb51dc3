"""How much attention rows received from given queries, exactly and in blocks: what evicting methods ask of a prompt.

The softmax of every query runs over all rows that it sees, those among them that no selector is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class QueryBlock(NamedTuple):
    """Queries whose logits are looked at together.

    Args:
        head: the KV head.
        asked: `[m]` int64, their positions, rising.
        place: `[n]` int64, the positions of the rows that one of them sees, rising.
        newest: `[]` int64, the position of the sequence's newest query.
    """

    head: int
    asked: Tensor
    place: Tensor
    newest: Tensor


# Logits [G,m,n], -inf where a row is not seen, to what each row gets [G,m,n].
Gives = Callable[[Tensor, QueryBlock], Tensor]

ROWS = 64  # of logits at a time: a prompt's keys are read once for so many, and these are 8 MiB at 32,768 tokens


def weights(logits: Tensor, block: QueryBlock) -> Tensor:
    """Return the softmax of `logits`."""
    return logits.softmax(-1)


def received(
    queries: Tensor,
    query_at: Tensor,
    stored: Sequence[tuple[Tensor, Tensor]],
    scale: float | None = None,
    gives: Gives = weights,
) -> list[Tensor]:
    """Return what each row gets, by default softmax weights, summed over queries and over the heads of a query group.

    A query sees the rows at its own and at earlier positions. Sums are in float32. Of the N times N logits of a prompt,
    64 rows lie in memory.

    Args:
        queries: `[B,H,G,m,D]`, after RoPE.
        query_at: `[B,m]` int64, their positions; a negative one is no query.
        stored: (keys `[B,H,n,D]`, positions `[B,n]`, negative for padding) of every part of the rows, in any order.
        scale: factor of the logits, default `1/sqrt(D)`.
        gives: what queries give to rows, of their logits.

    Returns:
        `[B,H,n]` float32 for each of the parts; 0 for padding.
    """
    batch, heads, group, _, size = queries.shape
    scale = size**-0.5 if scale is None else scale
    at = torch.cat([positions for _, positions in stored], 1)
    total = torch.zeros(batch, heads, at.shape[1], device=queries.device)
    for b in range(batch):
        place, order = at[b].sort()
        order, place = order[place >= 0], place[place >= 0]  # [N] rows by position
        places, turn = query_at[b].sort()
        turn, places = turn[places >= 0], places[places >= 0]  # [m] queries by position
        seen = torch.searchsorted(place, places, right=True).tolist()
        step = max(1, ROWS // group)
        for h in range(heads):
            keys = torch.cat([part[b, h] for part, _ in stored])[order].float()  # [N,D]
            got = torch.zeros(len(place), device=keys.device)
            for first in range(0, len(places), step):
                block = slice(first, min(first + step, len(places)))
                common, most = seen[block.start], seen[block.stop - 1]
                query = queries[b, h].index_select(1, turn[block]).float()  # [G,m,D]
                logits = query @ keys[:most].T * scale  # [G,m,most]
                later = place[common:most] > places[block, None]
                logits[..., common:].masked_fill_(later, -torch.inf)
                of = QueryBlock(h, places[block], place[:most], places[-1])
                got[:most] += gives(logits, of).sum((0, 1))
            total[b, h, order] = got
    return list(total.split([positions.shape[1] for _, positions in stored], 2))
