"""How far the indexes that a model has of its own choose alike in different layers: which of them could share one."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.traces.trace import Trace


def native_overlap(trace: Trace) -> tuple[list[int], Tensor]:
    """Return the layers whose index a trace holds the choice of, and `[L,L]` float64, how far they agree.

    Entry i, j is the share of the rows chosen by layer i that layer j chose too, mean over tokens and lists; a layer
    whose heads choose apart is compared list by list. Layers that agree could read one choice, as some layers of GLM-5
    read that of an earlier one.

    Raises:
        ValueError: the trace holds the choice of no layer, or layers have other numbers of lists.
    """
    layers = [index for index in trace.layers if trace.shapes[index].native is not None]
    if not layers:
        raise ValueError(
            f"{trace.name} holds no choice of a model's own index: `sparseattn capture` records it of models with one"
        )
    lists = {index: shape[0] for index in layers if (shape := trace.shapes[index].native) is not None}
    if len(set(lists.values())) > 1:
        raise ValueError(f"layers are compared list by list, and those of {trace.name} have {lists} lists")
    chosen = [_mask(trace, index) for index in layers]  # [Hs,Q,T] each
    queries = min(mask.shape[1] for mask in chosen)
    chosen = [mask[:, -queries:] for mask in chosen]
    shares = [[((mask & other).sum(-1) / mask.sum(-1)).double().mean() for other in chosen] for mask in chosen]
    return layers, torch.stack([torch.stack(row) for row in shares])


def _mask(trace: Trace, index: int) -> Tensor:
    """Return `[Hs,Q,T]` bool: what the index of a layer chose."""
    trace.verify(index, ["native"])
    native, tokens = trace.layer(index).native, trace.tokens
    assert native is not None
    made = torch.zeros(*native.shape[:2], tokens + 1, dtype=torch.bool)
    return made.scatter_(2, torch.where(native < 0, tokens, native).long(), True)[..., :tokens]
