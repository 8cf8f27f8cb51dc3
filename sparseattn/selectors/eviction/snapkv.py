"""SnapKV: the prompt's last queries vote, once, for the rows of the prompt to keep. https://arxiv.org/abs/2404.14469"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.attention_received import received
from sparseattn.selectors.eviction.base import Evicting, every_row, last_of

POOLS = ("max", "avg")


class SnapKV(Evicting):
    """Holds the prompt's rows with the most votes: weights of its last queries, pooled over neighbouring rows.

    Args:
        window: how many of the prompt's last queries vote, the observation window; their own rows are held anyway.
        kernel: rows that pooling joins, an odd number.
        pool: "max" (default), as the paper's code in its LongBench runs (window 32, kernel 7), or "avg", that code's
            default with kernel 5.

    One choice per KV head, by the group's sum of weights before pooling; the paper's code expands the keys, so that
    each query head has rows of its own.

    Votes and pooling are over the rows that the cache seals: with a sink, its rows, which the authors' code pools too,
    give none to their neighbours. `SnapKV.paper()` has no sink.

    Rows of the answer come before all rows of the prompt, the newest first. SnapKV holds every one of them in addition
    to its budget; `SnapKV.paper()` does so too, as it seals none of them. Where the cache seals them they count, and
    each takes the place of the prompt's row with the fewest votes.
    """

    def __init__(self, window: int = 32, kernel: int = 7, pool: str = "max") -> None:
        super().__init__()
        check_pooling(window, kernel)
        if pool not in POOLS:
            raise ValueError(f"pool is one of {', '.join(POOLS)}, got {pool!r}")
        self.window, self.kernel, self.pool = window, kernel, pool
        self.last_queries = window

    @classmethod
    def paper(cls, answer: int = 4096) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`, for answers of up to `answer` tokens, all of which are
        held.

        Its capacity counts the observation window: `budget=2048 - 32` is the paper's 2,048. Call `seal()` after the
        prefill: sealed with the first decoded token, the window's oldest row counts as one of the budget.
        """
        made = cls()
        return {"selector": made, "sink": 0, "window": made.window, "seal": answer}

    def first(self, rows: Rows) -> Tensor:
        return pooled_votes(rows, self.window, self.kernel, self.pool, self.layer_context.scale)


def check_pooling(window: int, kernel: int) -> None:
    """ValueError where no query would vote, or `kernel` rows cannot lie as many on either side."""
    check_least(window=(window, 1), kernel=(kernel, 1))
    if kernel % 2 == 0:
        raise ValueError(f"kernel is an odd number of rows, as many on either side, got {kernel}")


def pooled_votes(rows: Rows, window: int, kernel: int, pool: str = "max", scale: float | None = None) -> Tensor:
    """Return what newly sealed rows are worth: `[B,H,n]` float32, anything for padding.

    Rows of the prompt's last `window` queries and, without `last_queries`, all rows are worth more the newer they are,
    1 or more. The prompt's other rows are worth below 1, by their votes.
    """
    late = (1.0 + rows.positions)[:, None].expand(-1, rows.keys.shape[1], -1)
    if rows.last_queries is None:
        return late
    queries, at = last_of(rows, window)
    begin = at.masked_fill(at < 0, torch.iinfo(at.dtype).max).amin(1, keepdim=True)  # [B,1] of the window
    observing = (rows.positions >= begin)[:, None]  # [B,1,n]
    votes = received(queries, at, every_row(rows), scale)[0].masked_fill(observing, 0.0)
    pooled = torch.nn.functional.max_pool1d if pool == "max" else torch.nn.functional.avg_pool1d
    return torch.where(observing, late, _order(pooled(votes, kernel, 1, kernel // 2), votes))


def _order(votes: Tensor, own: Tensor) -> Tensor:
    """`[B,H,n]`, 0 for the fewest votes to below 1 for the most; of rows with as many, the more of its `own` the more.

    Pooling makes neighbours alike, and which of them is dropped must not depend on how many rows there are.
    """
    by_own = own.argsort(dim=-1, stable=True)
    order = by_own.gather(-1, votes.gather(-1, by_own).argsort(dim=-1, stable=True))
    return order.argsort(dim=-1).float() / votes.shape[-1]
