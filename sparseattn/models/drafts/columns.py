"""The columns of a `SparseCache` whose sequences keep different numbers of a pass's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.models.sparse_layer import SparseLayer


def keep_first(cache: Any, fed: int, kept: Tensor) -> None:
    """Keep, of each sequence, the first `kept` `[B]` of the `fed` columns that came last, and forget the others.

    Columns that another sequence keeps become padding: where they lie, layers of transformers mask them.
    """
    most = int(kept.max())
    cache.crop(most - fed)
    real = cache._real
    tokens = cache._tokens()
    if real.real is None and int(kept.min()) == most:
        return
    now = real.count(tokens - most, tokens).expand(len(kept))
    drop = now - kept
    if not bool(drop.any()):
        return
    if bool((drop < 0).any()):
        raise ValueError(f"sequences keep at most the tokens that they were fed, {now.tolist()}, got {kept.tolist()}")
    for layer in cache.sparse_layers.values():
        for part in layer.parts:
            part.rows.crop(drop)
    real.hide(torch.where(drop > 0, most - kept, 0), tokens)


def lay_out(cache: Any, real: Tensor) -> None:
    """Let the columns be those of `real` `[B,C]` bool: of each sequence as many real ones as it holds, in their order.

    Rows of sparse layers lie without padding, so that nothing moves; full layers of transformers are copied once.

    Raises:
        ValueError: a sequence holds another number of tokens.
    """
    tokens = cache._tokens()
    before = cache._real.real
    if before is None:
        before = torch.ones(len(real), tokens, dtype=torch.bool)
    counts, wanted = before.sum(1), real.sum(1)
    if not torch.equal(counts, wanted):
        raise ValueError(f"the sequences hold {counts.tolist()} tokens, and their columns are for {wanted.tolist()}")
    source = torch.zeros(real.shape, dtype=torch.int64)
    source[real] = before.nonzero()[:, 1]  # in both, sequence by sequence
    for layer in cache.layers:
        if isinstance(layer, SparseLayer):
            layer.columns = real.shape[1]
        elif getattr(layer, "is_initialized", False):
            at = source.to(layer.keys.device)[:, None, :, None]
            layer.keys, layer.values = (
                x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in (layer.keys, layer.values)
            )
    cache._real.real = None if bool(real.all()) else real
