"""Methods that read the levels of a cache's rounded keys (`KVCache(rows="kivi")`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseattn.kernels.attend_quantized.reference import CodedRows


class ReadsRoundedKeys:
    """A method that keeps nothing of a key but reads the levels that the cache rounded it to.

    Attributes:
        rounded_group: rows of a group of keys that share levels; a cache of other groups, or without such
            levels, refuses the method.
        rounded: the sealed rows as the cache keeps them, in stored order, kept current. None outside a cache.
    """

    rounded_group: int
    rounded: CodedRows | None = None

    def forget_view(self) -> None:
        """Let go of what a cache showed."""
        self.rounded = None
