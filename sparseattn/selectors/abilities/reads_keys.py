"""Methods that score the cache's own keys."""

from __future__ import annotations

from torch import Tensor


class ReadsKeys:
    """A method that reads the sealed keys where the cache keeps them. A cache of rows of few bits refuses it.

    Attributes:
        stored: `[B,H,N,D]` the sealed keys in stored order, a view that the cache keeps current: while rows are
            appended, of the rows before them. With `KVCache(fixed=True)` all places behind the sink. None outside a
            cache.
    """

    stored: Tensor | None = None

    def stored_keys(self) -> Tensor:
        """Return `stored`; RuntimeError outside a cache."""
        if self.stored is None:
            raise RuntimeError(
                f"{self} scores the cache's own keys: use it in a KVCache without bits, or set `stored` to [B,H,N,D]"
            )
        return self.stored

    def forget_view(self) -> None:
        """Let go of what a cache showed."""
        self.stored = None
