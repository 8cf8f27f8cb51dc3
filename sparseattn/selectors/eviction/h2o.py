"""H2O: the rows that have got the most attention so far, and the newest ones. https://arxiv.org/abs/2306.14048"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import Rows, vote
from sparseattn.selectors.eviction.summed_base import Summed
from sparseattn.selectors.newest import newest

SCORES = ("prompt", "decode")


class H2O(ReadsKeys, Summed):
    """Holds heavy hitters, the rows with the largest sum of attention weights, and a share of the budget's newest rows.

    Args:
        scores: "prompt" (default): the sums begin with every query of the prompt, as in the paper, exact and computed
            in blocks; "decode": they begin with decoding, as in Quest's runs of long prompts
            (https://arxiv.org/abs/2406.10774).
        recent: share of the budget for the newest rows, 0 to 1; the paper's is half.

    One choice per KV head, by the sum over its query group; the paper's models have one query head per KV head. With
    "decode" nothing is known of the prompt at the first step, which in Quest's runs reads every row: here the budget
    holds, and the first step's choice is by its own weights, for which it reads every key.

    What a row gets from a step's query while it lies in the cache's window is not counted: behind a window of more than
    the step's token, a decoded row comes to be chosen among with nothing, and goes when it leaves the newest share. So
    compare with `H2O.paper()` (`--sink 0 --window 1 --seal 1`), where everything is counted, at equal total rows. The
    cache's window comes on top of `recent`. Queries of rows that are appended together after the first seal, such as a
    second turn's, are not counted either.

    Where a fused kernel attends, the weights of a step are computed after it, from the keys of the rows selected, which
    are read twice. `scan_bytes` does not count that.
    """

    def __init__(self, scores: str = "prompt", recent: float = 0.5) -> None:
        super().__init__(recent)
        if scores not in SCORES:
            raise ValueError(f"scores is one of {', '.join(SCORES)}, got {scores!r}")
        self.scores = scores
        # Whether a step was observed that had sealed rows. Sequences of a batch step together, so they agree, and the
        # host knows without waiting: all keys are read at one step alone.
        self.watched = False
        if scores == "decode":
            self.queries_share, self.last_queries = 0.0, 0

    def has(self, ability: type) -> bool:
        return super().has(ability) and (self.scores == "decode" or ability is not ReadsKeys)

    @classmethod
    def paper(cls, scores: str = "prompt") -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: half of the budget heavy hitters, half newest rows, no
        sink.

        The token of the step is the window's one row, on top of the budget.
        """
        return {"selector": cls(scores), "sink": 0, "window": 1, "seal": 1}

    def reset(self) -> None:
        super().reset()
        self.watched = False

    def fix(self, rows: int, seal: int) -> None:
        if self.scores == "decode":
            raise ValueError(f"{self} has another first step than the rest: with fixed=True, scores is 'prompt'")
        super().fix(rows, seal)

    def of_prompt(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if self.scores == "decode" else super().of_prompt(rows)

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        rank, more, there = worth, 0, worth > -torch.inf
        if self.scores == "decode" and not self.watched and worth.shape[2] > budget:
            rank, more = self._by(query), query.shape[3] * self.bytes_of(query)
            rank = rank.masked_fill(~there, -torch.inf)
        return rank.masked_fill(newest(there, int(budget * self.recent)), torch.inf), more

    def _by(self, query: Tensor) -> Tensor:
        """`[B,H,N]`: the query's own weights among the rows held."""
        logits = query.float() @ self.stored_keys().float().mT / self.temperature(query.shape[-1])
        return vote(logits.masked_fill((self.worth.visible == -torch.inf)[:, :, None], -torch.inf), "softmax")

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        self.watched = True
        super().observe(selection, weights, total)
