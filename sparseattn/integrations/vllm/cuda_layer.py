"""One sparse layer over a cache of plain rows: its index, and how it chooses pages by it and reads them. By Triton."""

from __future__ import annotations

from torch import Tensor

from sparseattn.integrations.vllm.cuda_step import Step
from sparseattn.integrations.vllm.plain import PlainIndex
from sparseattn.kernels import attend
from sparseattn.kernels.scoring import best_pages
from sparseattn.selection import Selection
from sparseattn.selectors.paged import PageSelector
from sparseattn.selectors.window import Window


class SparseLayer:
    """What a sparse layer has that a dense one has not.

    Args:
        selector: shared by the layers.
        block: rows of a block.
        budget: rows beyond sink and window.
    """

    def __init__(self, selector: PageSelector | Window, block: int, budget: int) -> None:
        self.index = PlainIndex(selector, block) if isinstance(selector, PageSelector) else None
        self.budget = budget

    def fit(self, keys: Tensor) -> None:
        """Allocates the index of a cache, see `PlainIndex.fit`."""
        if self.index is not None:
            self.index.fit(keys)

    @property
    def bytes(self) -> int:
        """Of the index."""
        return 0 if self.index is None else self.index.bytes

    def update(self, keys: Tensor, places: Tensor | None) -> None:
        """Brings the index up to date with the rows that this step wrote, see `PlainIndex.update`."""
        if self.index is not None and places is not None:
            self.index.update(keys, places)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float) -> Tensor:
        """`[n,H,G,D]`: attention over sink, chosen pages and recent rows. Shapes are those of the arguments.

        Args:
            query: `[n,H,G,D]`, after RoPE.
            keys, values: `[blocks,H,block,D]`, any strides but the last.
        """
        chosen = self.select(query, step)
        out, _ = attend(query, keys, values, chosen, step.bounds, scale=scale, impl="triton", block_table=step.blocks)
        return out

    def select(self, query: Tensor, step: Step) -> Selection:
        """The pages of each KV head (or query head) of the n requests, counted from `step.bounds.base`."""
        if self.index is None or not step.table.shape[1]:
            return Selection.none(query.shape[0], query.shape[1], query.device)
        selector = self.index.selector
        scores = selector.scores_at(query, self.index.store, step.table)
        start, length = best_pages(scores, self.budget // selector.page, selector.page)
        return Selection(start, length, selector.page, whole=True)
