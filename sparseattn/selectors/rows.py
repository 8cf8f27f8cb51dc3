"""What a seal shows to a selector: rows, and the queries that it learns from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a seal shows to a selector. A later need adds a field here, not an argument to `append`.

    The tensors are views of the cache's storage, valid during the call: what a selector keeps, it copies (`RowBuffer`
    does).

    Args:
        keys: `[B,H,n,D]`, after RoPE.
        values: `[B,H,n,D]`.
        positions: `[B,n]` int64 token positions; negative marks a row of padding, never to be selected. Padding comes
            in whole units of the selector: a page is all padding or none.
        queries: `[B,H,G,m,D]` of those of the rows that are sampled for `LearnsFromQueries.queries_share`, 0 or more of
            them; None where the share is 0, or of a later seal of a method that learns once. Zero for padding.
        query_positions: `[B,m]` int64, the token positions of `queries`; negative marks padding.
        last_queries: `[B,H,G,n,D]`, the prompt's n newest queries, the newest last, at the first seal of a selector
            whose `LearnsFromQueries.last_queries` is n (more where its `queries_share` is 1); else None. The prompt is
            what is stored then, sink and window included, without the row of the step that is being decoded. Zero where
            a prompt is shorter than n, in front.
        last_positions: `[B,n]` int64, the token positions of `last_queries`; negative marks padding.
        unsealed: `[B,H,u,D]`, with `last_queries`: the keys of those of the prompt's rows that are not sealed (sink,
            window and what waits), so that a causal softmax of `last_queries` over all of the prompt is exact.
            Zero for padding.
        unsealed_positions: `[B,u]` int64, the token positions of `unsealed`; negative marks padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    last_queries: Tensor | None = None
    last_positions: Tensor | None = None
    unsealed: Tensor | None = None
    unsealed_positions: Tensor | None = None
