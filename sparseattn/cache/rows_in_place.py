"""Keys and values of a layer that reads all of its rows or the newest of them, each token's written behind the last."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.attend_run.dispatch import ATTEND_RUN, RunStep, run_step
from sparseattn.kernels.implementations import choose
from sparseattn.utils.huge_pages import on_huge_pages
from sparseattn.utils.inference_mode import keeps_tensors


class RowsInPlace:
    """Storage of the rows `[B,H,n,D]` that are there, and room for more. Rows that were shown are never changed. What
    attends to them holds addresses, so that this is not copied.

    Args:
        keys, values: the rows, which are copied.
        room: rows that may come.

    Attributes:
        end: rows stored.
        room: more rows that there is storage for.
    """

    def __init__(self, keys: Tensor, values: Tensor, room: int) -> None:
        self.end, self.room = keys.shape[2], room
        self._keys, self._values = (_stored(rows, self.end + room) for rows in (keys, values))
        self._step: RunStep | None = None
        self._of: tuple[object, ...] = ()

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store a token's `[B,H,1,D]`; there must be room."""
        self._keys.narrow(2, self.end, 1).copy_(keys)
        self._values.narrow(2, self.end, 1).copy_(values)
        self.end, self.room = self.end + 1, self.room - 1

    def newest(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the newest rows, views."""
        first = self.end - rows
        return self._keys.narrow(2, first, rows), self._values.narrow(2, first, rows)

    def attend(self, query: Tensor, rows: int, most: int, scale: float) -> Tensor | None:
        """Return the attention `[B,H,G,D]` of a token over the newest rows, of which tokens read `most` at most; None
        where no compiled code is for it."""
        of = query.shape, query.dtype, most, scale
        if self._step is None or of != self._of:
            if not _compiled(query, self._keys):
                return None
            self._step, self._of = run_step(query, self._keys, self._values, most, scale=scale), of
        return self._step(query, self.end - rows, self.end)


def _compiled(query: Tensor, keys: Tensor) -> bool:
    """Whether compiled code attends to such keys with `[B,H,G,D]` queries."""
    if query.dtype != keys.dtype or query.shape[3] != keys.shape[3] or keys.shape[3] > 256:
        return False
    return choose(None, keys.device, keys.dtype, ATTEND_RUN.names, ATTEND_RUN.fallback) == "numba"


@keeps_tensors
def _stored(rows: Tensor, most: int) -> Tensor:
    """Return storage of `most` rows, of which the first are these."""
    batch, heads, count, size = rows.shape
    storage = on_huge_pages(torch.empty(batch, heads, most, size, dtype=rows.dtype, device=rows.device))
    storage.narrow(2, 0, count).copy_(rows)
    return storage
