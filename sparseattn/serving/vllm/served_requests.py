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
        pages, near: `[R]`, pages to choose from, and rows that a KV head reads in any case.
        held: rows of all of them.
        known: what `read` said of other layers.
    """

    tokens: Tensor
    count: int
    in_order: bool
    table: Tensor
    always: Tensor
    tails: Tensor
    rest: Any
    pages: Any
    near: Any
    held: int
    known: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def entries(self, page: int, unit: int) -> int:
        """Entries of the index that all requests score, of pages of `page` rows and entries of `unit`."""
        return int(self.pages.sum()) * page // unit

    def read(self, page: int, most: int) -> int:
        """Rows that a KV head of a layer reads, of all requests, which chooses `most` pages of `page` rows at most."""
        if (page, most) not in self.known:
            self.known[page, most] = int((np.minimum(self.pages, most) * page + self.near).sum())
        return self.known[page, most]
