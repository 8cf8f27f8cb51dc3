"""One sparse layer over a cache of plain rows: its index, and how it chooses pages by it and reads them. By Triton."""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.serving.vllm.cuda_rows import rows_at
from sparseattn.serving.vllm.cuda_step import Step
from sparseattn.serving.vllm.page_index import Store


class SparseCUDALayer:
    """What a sparse layer has that a dense one has not.

    Args:
        selector: keeps nothing itself, so that layers may share it.
        block: rows of a block.
        pages: that are read beyond sink and window.
    """

    def __init__(self, selector: PageSelector | Window, block: int, pages: int) -> None:
        self.selector, self.block, self.pages = selector, block, pages
        self.store: Store | None = None

    def fit(self, keys: Tensor) -> None:
        """Allocates the index of a cache of keys `[blocks,H,block,D]`, anew if there was one.

        Raises:
            ValueError: blocks of another size.
        """
        blocks, heads, block, size = keys.shape
        if block != self.block:
            raise ValueError(f"the index is of blocks of {self.block} rows, got a cache with blocks of {block}")
        if isinstance(self.selector, PageSelector):
            places = blocks * block // self.selector.unit
            self.store = Store(self.selector, places, heads, size, keys.dtype, keys.device)

    def update(self, keys: Tensor, places: Tensor | None) -> None:
        """Compute the entries at `places` `[n]` int64 anew from their rows of `keys` `[blocks,H,block,D]`."""
        if self.store is not None and places is not None:
            self.store.update(places, rows_at(keys, places, self.store.selector.unit))

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
        """Return the pages of each KV head (or query head) of the n requests, counted from `step.bounds.base`."""
        if self.store is None or not step.table.shape[1]:
            return Selection.none(query.shape[0], query.shape[1], query.device)
        page = self.store.selector.page
        start, length = best_pages(self.store.scores(query, step.table), self.pages, page)
        return Selection(start, length, page, whole=True)
