"""Store one more token of every sequence, in torch, which is the specification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sparseattn.kernels.token_rows.dispatch import Storage


def put(keys: Tensor, values: Tensor, storage: Storage, row: int, position: int) -> bool:
    """As `dispatch.put`."""
    if not math.isfinite(keys.sum()) or not math.isfinite(values.sum()):
        return False
    storage.keys.select(2, row).copy_(keys[:, :, 0])
    storage.values.select(2, row).copy_(values[:, :, 0])
    storage.positions[:, row] = position
    storage.rows.fill_(row + 1)
    storage.newest.fill_(position)
    return True
