"""Pages by their mean key and the directions along which their keys differ most: what `Mean`, `Quad`, `Clse` and
`Ellipsoid` share. What an entry holds and how it scores is in `kernels.page_directions.reference`."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.page_directions import dispatch as page_directions
from sparseattn.kernels.page_directions import reference as page_directions_reference
from sparseattn.kernels.page_directions.reference import Form
from sparseattn.selectors.checks import half
from sparseattn.selectors.pages.base import Entries, PageSelector


class Directions(PageSelector):
    """Reads the pages that score highest by a `Form`.

    Args:
        form: what an entry is made of.
        group: how a query group votes, see `vote`.
    """

    def __init__(self, form: Form, group: str) -> None:
        if form.bits not in page_directions_reference.BITS:
            raise ValueError(f"bits is one of {', '.join(map(str, page_directions_reference.BITS))}, got {form.bits}")
        self.entry_names = form.names
        super().__init__(form.page, group)
        self.form = form

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return page_directions_reference.encode(keys, self.form, half(keys))

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        return page_directions.scores(query, entries, real, self.form, self.group, self.temperature(query.shape[-1]))

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        return page_directions.scores_at(query, store, table, self.form, self.group, self.temperature(query.shape[-1]))


def check_rank(rank: int, page: int) -> int:
    """`rank`, if a page has so many directions; else ValueError."""
    if not 1 <= rank < page:
        raise ValueError(
            f"rank is 1 to {page - 1}: the rows of a page of {page} differ from their mean in no more directions, got "
            f"{rank}"
        )
    return rank
