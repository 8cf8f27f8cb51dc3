"""The tokens of one step of the CPU backend that decode sparsely, as its sparse layers read them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass
class ServedRequests:
    """The tokens that decode sparsely in a step, and what they may read. A request has one, or one for each token of a
    draft and one behind it.

    Args:
        tokens: `[R]` int64, their rows of the query.
        count: R.
        in_order: whether these are all tokens of the step.
        table, always, tails: see `attend_vllm_blocks.blocks.StepPages`.
        rest: vLLM's metadata of the other requests, in which ours attend to their new rows; None: there are no others.
        choice, near: `[R]`, rows to choose from, and rows that a KV head reads in any case.
        rows: `[R]`, of each.
        budgets: `[R]`, rows that each asks for instead of the engine's budget, -1 for none; None: none does.
        known: what `read` said of other layers.
    """

    tokens: Tensor
    count: int
    in_order: bool
    table: Tensor
    always: Tensor
    tails: Tensor
    rest: Any
    choice: Any
    near: Any
    rows: Any
    budgets: Any = None
    known: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def entries(self, unit: int) -> int:
        """Entries of the index, of `unit` rows, that all requests score."""
        return int(self.choice.sum()) // unit

    @property
    def held(self) -> int:
        """Rows of all requests."""
        return int(self.rows.sum())

    def most(self, page: int, pages: int) -> Any:
        """Pages of `page` rows that each request chooses at most, `[R]` or one number, by an engine's `pages`."""
        return pages if self.budgets is None else np.where(self.budgets < 0, pages, self.budgets // page)

    def read_each(self, page: int, pages: int) -> Any:
        """`[R]`: rows that a KV head of a layer reads, which chooses `pages` at most."""
        return np.minimum(self.choice // page, self.most(page, pages)) * page + self.near

    def read(self, page: int, most: int) -> int:
        """Rows that a KV head of a layer reads, of all requests, which chooses `most` pages of `page` rows at most."""
        if (page, most) not in self.known:
            self.known[page, most] = int(self.read_each(page, most).sum())
        return self.known[page, most]
