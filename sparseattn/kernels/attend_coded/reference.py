"""One after the other in torch, which is the specification."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from sparseattn.core.selection import Bounds, Chosen, Selection
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import RankedCodes
from sparseattn.kernels.quantized_keys.dispatch import best
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys


def coded_step(
    query: Tensor, coded: QuantizedKeys | RankedCodes, count: int, keys: Tensor, values: Tensor, bounds: Bounds,
    scale: float,
) -> Callable[[Tensor, int], tuple[Tensor, Chosen] | None]:  # fmt: skip
    """As `dispatch.coded_step`."""

    def step(query: Tensor, recent: int) -> tuple[Tensor, Chosen] | None:
        if not math.isfinite(query.sum()):
            return None
        if isinstance(coded, RankedCodes):
            found = product_codes.best(coded.tables(query), coded.keys, count, impl="torch")
            selection = Selection(*found, 1, whole=True)
        else:
            selection = Selection.pages(best(query, coded, "softmax", count, impl="torch"), 1)
        return attend(query, keys, values, selection, bounds, scale=scale, impl="gather")[0], Chosen.of(selection)

    return step
