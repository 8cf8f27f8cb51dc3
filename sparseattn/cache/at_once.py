"""A decode step in one compiled call, of a method that says by which bounds or codes it chooses."""

from __future__ import annotations

from torch import Tensor

from sparseattn.cache.rows import StoredRows
from sparseattn.core.selection import Chosen
from sparseattn.kernels.attend.dispatch import is_scale
from sparseattn.kernels.attend_bounded.dispatch import ATTEND_BOUNDED, BoundedStep, bounded_step
from sparseattn.kernels.attend_coded.dispatch import ATTEND_CODED, CodedStep, coded_step
from sparseattn.kernels.implementations import Operation, choose
from sparseattn.kernels.page_bounds.bounds import VotedBounds
from sparseattn.selectors.abilities import ChoosesAtOnce
from sparseattn.selectors.base import Selector


class StepAtOnce:
    """Chooses and attends in one call, which is prepared anew where rows were sealed or moved (`let_go`) or storage has
    grown.

    Args:
        selector: by whose bounds or codes it goes.
        stored: the rows of the cache.
    """

    def __init__(self, selector: ChoosesAtOnce, stored: StoredRows) -> None:
        self.selector, self.stored = selector, stored
        self.let_go()

    def let_go(self) -> None:
        """Keep no storage alive that is about to be replaced."""
        self._step: BoundedStep | CodedStep | None = None
        self._of: tuple[object, ...] = (None, None, None)  # keys, values and zones that it is of
        self._asked: tuple[object, ...] = ()

    def __getstate__(self) -> tuple[ChoosesAtOnce, StoredRows]:
        """Leave out what was looked up: a copy looks up where its own rows lie."""
        return self.selector, self.stored

    def __setstate__(self, state: tuple[ChoosesAtOnce, StoredRows]) -> None:
        self.selector, self.stored = state
        self.let_go()

    @classmethod
    def of(cls, selector: Selector, stored: StoredRows) -> StepAtOnce | None:
        """Return that of a selector which has the ability by itself, not in a part; None for others."""
        return cls(selector, stored) if isinstance(selector, ChoosesAtOnce) else None

    def __call__(self, query: Tensor, rows: int, scale: float | None, impl: str | None) -> tuple[Tensor, Chosen] | None:
        """Return the attention output `[B,H,G,D]` of a step and what was chosen, or None where that takes two calls, or
        where the query, or its sum, is not finite.

        Args:
            query: `[B,H,G,D]`, which fits the cache.
            rows: that a head may choose.
            scale, impl: as of `attend`.
        """
        stored, selector = self.stored, self.selector
        keys, values, bounds, zones = stored.keys.storage, stored.values.storage, stored.bounds, stored.zones
        if query.requires_grad or not zones.zone:
            return None
        asked, of = (rows, scale, impl, query.shape), self._of
        if (
            self._step is None
            or keys is not of[0]
            or values is not of[1]
            or bounds is not of[2]
            or asked != self._asked
        ):
            if keys is None or values is None or rows < selector.page or keys.requires_grad or values.requires_grad:
                return None
            chosen_by = selector.chosen_by(stored.sealed.valid.visible, query.shape[3])
            if chosen_by is None or not (scale is None or is_scale(scale)):
                return None
            count = rows // selector.page
            factor = query.shape[3] ** -0.5 if scale is None else scale
            if isinstance(chosen_by, VotedBounds):
                if not _compiled(query, impl, ATTEND_BOUNDED):
                    return None
                self._step = bounded_step(query, chosen_by, count, selector.page, keys, values, bounds, scale=factor)
            else:
                if not _compiled(query, impl, ATTEND_CODED):
                    return None
                self._step = coded_step(query, chosen_by, count, keys, values, bounds, scale=factor)
                if self._step is None:
                    return None
            self._of, self._asked = (keys, values, bounds), asked
        recent = zones.count[0] - zones.sealed[0] if len(zones.count) == 1 else max(stored.near_counts)
        return self._step(query, recent)


def _compiled(query: Tensor, impl: str | None, operation: Operation) -> bool:
    """Whether the code that `impl` means is the compiled one."""
    if impl not in (None, "numba"):
        return False
    return choose(impl, query.device, query.dtype, operation.names, operation.fallback) == "numba"
