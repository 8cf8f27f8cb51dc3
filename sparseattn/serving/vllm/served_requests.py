"""The tokens of one step of the CPU backend that decode sparsely, as its sparse layers read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from sparseattn.core.activity import NAMES
from sparseattn.kernels.attend_vllm_blocks.blocks import StepPages


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
        known: what was made for other layers of the step.
        layers: how many have served the step so far; the last of them counts for all.
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
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    layers: int = 0

    def entries(self, unit: int) -> int:
        """Entries of the index, of `unit` rows, that all requests score."""
        return int(self.choice.sum()) // unit

    @property
    def held(self) -> int:
        """Rows of all requests."""
        return int(self.rows.sum())

    def most(self, page: int, pages: int) -> Any:
        """Pages of `page` rows that each request chooses at most, `[R]` or one number, by an engine's `pages`."""
        if self.budgets is None or pages == 0:  # a window chooses none
            return pages
        return np.where(self.budgets < 0, pages, self.budgets // page)

    def read_each(self, page: int, pages: int) -> Any:
        """`[R]`: rows that a KV head of a layer reads, which chooses `pages` at most."""
        return np.minimum(self.choice // page, self.most(page, pages)) * page + self.near

    def pages(self, page: int, unit: int) -> StepPages:
        """Return what layers may read whose pages have `page` rows and whose entries have `unit`."""
        if (pages := self.known.get((page, unit))) is None:
            pages = self.known[page, unit] = StepPages(page, unit, self.table, self.always, self.tails, self.tokens)
        return pages

    def counts(self, page: int, pages: int, unit: int, row: int, entry: int, once: int) -> Any:
        """Return the counts of a layer that serves the step, `[7]` int64 of numpy, in the order of `activity.NAMES`.

        Args:
            page, pages: rows of a page, and pages that a layer chooses at most.
            unit: rows of an entry.
            row, entry, once: bytes of a row of keys and values, of an entry, and of what a query reads once.
        """
        key = page, pages, unit, row, entry, once
        if (counts := self.known.get(key)) is None:
            read, held = int(self.read_each(page, pages).sum()), self.held
            named = {
                "sparse_steps": self.count,
                "rows_read": read,
                "rows_held": held,
                "bytes_read": read * row + self.entries(unit) * entry + self.count * once,
                "bytes_held": held * row,
            }
            counts = self.known[key] = np.array([named.get(name, 0) for name in NAMES], np.int64)
        return counts
