"""A decode step in one compiled call, of a method that says by which bounds it chooses pages."""

from __future__ import annotations

from torch import Tensor

from sparseattn.cache.rows import StoredRows
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.dispatch import is_scale
from sparseattn.kernels.attend_bounded.dispatch import ATTEND_BOUNDED, BoundedStep, bounded_step
from sparseattn.kernels.implementations import choose
from sparseattn.selectors.abilities import ChoosesByBounds
from sparseattn.selectors.base import Selector


class StepAtOnce:
    """Chooses and attends in one call, which is prepared anew where rows were sealed or storage has grown.

    Args:
        selector: whose bounds it goes by.
        stored: the rows of the cache.
    """

    def __init__(self, selector: ChoosesByBounds, stored: StoredRows) -> None:
        self.selector, self.stored = selector, stored
        self.let_go()

    def let_go(self) -> None:
        """Keep no storage alive that is about to be replaced."""
        self._step: BoundedStep | None = None
        self._of: tuple[object, ...] = (None, None, None, None)  # the bounds, keys, values and zones that it is of
        self._asked: tuple[object, ...] = ()

    @classmethod
    def of(cls, selector: Selector, stored: StoredRows) -> StepAtOnce | None:
        """Return that of a selector which has the ability by itself, not in a part; None for others."""
        return cls(selector, stored) if isinstance(selector, ChoosesByBounds) else None

    def __call__(
        self, query: Tensor, rows: int, scale: float | None, impl: str | None
    ) -> tuple[Tensor, Selection] | None:
        """Return the attention output `[B,H,G,D]` of a step and what was chosen, or None where that takes two calls.

        Args:
            query: `[B,H,G,D]`, which fits the cache.
            rows: that a head may choose.
            scale, impl: as of `attend`.
        """
        stored, selector = self.stored, self.selector
        keys, values, bounds, zones = stored.keys.storage, stored.values.storage, stored.bounds, stored.zones
        if keys is None or values is None or not zones.zone or rows < selector.page:
            return None
        if query.requires_grad or keys.requires_grad or values.requires_grad:
            return None
        voted = selector.voted_bounds(stored.sealed.valid.visible, query.shape[3])
        if voted is None:
            return None
        pages = min(rows // selector.page, voted.bounds.minimum.shape[2])
        asked, of = (pages, scale, impl, query.shape), self._of
        same = voted is of[0] and keys is of[1] and values is of[2] and bounds is of[3] and asked == self._asked
        if self._step is None or not same:
            if not _compiled(query, impl) or not (scale is None or is_scale(scale)):
                return None
            factor = query.shape[3] ** -0.5 if scale is None else scale
            self._step = bounded_step(query, voted, pages, selector.page, keys, values, bounds, scale=factor)
            self._of, self._asked = (voted, keys, values, bounds), asked
        recent = zones.count[0] - zones.sealed[0] if len(zones.count) == 1 else max(stored.near_counts)
        return self._step(query, recent)


def _compiled(query: Tensor, impl: str | None) -> bool:
    """Whether the code that `impl` means is the compiled one."""
    if impl not in (None, "numba"):
        return False
    return choose(impl, query.device, query.dtype, ATTEND_BOUNDED.names, ATTEND_BOUNDED.fallback) == "numba"
