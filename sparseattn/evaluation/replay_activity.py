"""What a replay counted, in the fields that every command's records have: each step of it is a sparse one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from sparseattn.core.activity import Activity, LayerActivity
from sparseattn.traces.trace import Trace


def replay_activity(
    trace: Trace, layers: Sequence[int], heads: Mapping[str, Tensor], last: int, every: int
) -> Activity:
    """Return the counts of the steps that a replay measured.

    Args:
        trace: what was replayed.
        layers: of the model, in the order of the first dimension of `heads`.
        heads: measure -> `[layers,H*G]`, means over the measured steps; of `attended` and `bytes_share`.
        last: tokens decoded, the last of the trace.
        every: one of so many was measured.

    Returns:
        Rows and bytes to the nearest whole number, since they come from means. `bytes_read` is None where the method
        does not say what it reads to choose.
    """
    first = trace.tokens - last
    stored = sum(first + t + 1 for t in range(last) if (t + 1) % every == 0)  # rows, the token's own among them
    steps = last // every
    by_layer = {}
    for at, layer in enumerate(layers):
        shape = trace.shapes[layer]
        bytes_held = stored * shape.heads * 2 * shape.size * trace.dtype.itemsize
        share = float(heads["bytes_share"][at].mean())
        by_layer[layer] = LayerActivity(
            sparse_steps=steps,
            rows_read=round(float(heads["attended"][at].mean()) * steps),
            rows_held=stored,
            bytes_read=None if math.isnan(share) else round(share * bytes_held),
            bytes_held=bytes_held,
        )
    return Activity(by_layer)
