"""What full attention does at the last tokens of a text in every layer, and what an error there does to predictions.

To second order an error e of a layer's attention output changes the next-token distribution p by KL = e^T F e / 2,
where F = J^T (diag(p) - p p^T) J is the Fisher information of the outputs and J the derivative of the logits by them.
For a random u of covariance diag(p) - p p^T and its gradient g = J^T u, the mean of (g e)^2 is e^T F e: a few backward
passes weigh the error of every head of every layer, whatever method makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.models.attention_layers import AttentionLayer
from sparseattn.models.attention_routing import Call, name_of
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.errors import ModelError
from sparseattn.models.input_device import input_device
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_layer import Run, SparseLayer


@dataclass(frozen=True, eq=False)
class LayerSeen:
    """One layer at n tokens.

    Args:
        shape: what the layer is.
        query: `[1,H,G,n,D]`, after RoPE.
        keys, values: `[1,H,n,D]` of these tokens.
        out: `[1,H,G,n,D]` of full attention.
        gradients: `[S,H,G,n,D]` float32, of the logits along S random directions; see the module.
    """

    shape: AttentionLayer
    query: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    gradients: Tensor


def observe(prefill: Prefill, tokens: Sequence[int], draws: int = 8, seed: int = 0) -> dict[int, LayerSeen]:
    """Feed the tokens behind a prompt through full attention, and return what each whole-context layer saw.

    The prefill stays as it is.

    Args:
        prefill: one sequence, without padding.
        tokens: those that follow it.
        draws: S, backward passes.
        seed: of the random directions.

    Raises:
        ValueError: no token, or no draw.
        ModelError: a model with an index of its own, whose choice is part of what it computes.
    """
    if not tokens or draws < 1:
        raise ValueError(f"what is observed is 1 token or more by 1 draw or more, got {len(tokens)} and {draws}")
    cache = prefill.cache("window", None, sink=0, window=0)
    model, watched = cache.model, {}
    if any(layer.index is not None for layer in cache.prepared.layers.values()):
        raise ModelError(
            f"{name_of(model)} has an index of its own, so that gradients of full attention say nothing of its layers: "
            f"compare methods with it by `sparseattn eval` and `sparseattn bench`"
        )
    for index, layer in cache.sparse_layers.items():
        watched[index] = cache.layers[index] = _Watched(layer, cache.prepared.layers[index])
    ids = torch.tensor([list(tokens)], device=input_device(model))
    cache.sparse_from = prefill.tokens + len(tokens)  # nothing is sparse
    with torch.enable_grad():
        logits = model(input_ids=ids, use_cache=True, logits_to_keep=0, **cache_argument(cache)).logits[0].float()
    leaves = [layer.leaf for layer in watched.values()]
    with torch.no_grad():
        p = logits.softmax(-1)  # [n,V]
        draw = torch.Generator(device=logits.device).manual_seed(seed)
    gradients: list[tuple[Tensor, ...]] = []
    for s in range(draws):
        u = torch.randn(p.shape, generator=draw, device=p.device) * p.sqrt()
        u -= p * u.sum(-1, keepdim=True)  # of covariance diag(p) - p p^T
        gradients.append(torch.autograd.grad(logits, leaves, u, retain_graph=s < draws - 1))
    return {
        index: layer.seen(torch.cat([each[i] for each in gradients]))
        for i, (index, layer) in enumerate(watched.items())
    }


class _Watched(SparseLayer):
    """A layer that attends densely to a prompt's rows and new ones, and keeps what it saw."""

    def __init__(self, layer: SparseLayer, shape: AttentionLayer) -> None:
        super().__init__(layer.parts, None)
        self.columns, self.shape = layer.columns, shape

    def attend(self, call: Call, run: Run) -> Tensor:
        """Attend densely, and add a zero to the output by which gradients are taken."""
        with torch.no_grad():
            self._check(call)
        batch, named, new, size = call.query.shape
        heads = call.key.shape[1]
        rows = self.parts[0].rows
        keys, values = (torch.cat([old, own], 2) for old, own in ((rows.keys, call.key), (rows.values, call.value)))
        seen = torch.ones(new, keys.shape[2], dtype=torch.bool, device=keys.device).tril(keys.shape[2] - new)
        group = named // heads
        if each := keys.is_cuda:  # where a mask and grouped heads together leave only the kernel that stores all logits
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(
            call.query, keys, values, attn_mask=seen, scale=call.scale, enable_gqa=not each and group > 1
        )
        self.leaf = torch.zeros_like(out, dtype=torch.float32, requires_grad=True)
        shape = (batch, heads, group, new, size)
        self.saw = [x.detach() for x in (call.query.reshape(shape), call.key, call.value, out.reshape(shape))]
        self.columns += new
        self.unattended = None
        return (out + self.leaf.to(out.dtype)).transpose(1, 2)

    def seen(self, gradients: Tensor) -> LayerSeen:
        """Return what it saw, with the gradients `[S,HG,n,D]`."""
        query, keys, values, out = self.saw
        return LayerSeen(self.shape, query, keys, values, out, gradients.unflatten(1, query.shape[1:3]))
