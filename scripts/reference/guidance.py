"""The loss that guides a few heads' attention to where an induction circuit must look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

from scripts.reference.curriculum import Batch

# Heads 0 to 6 of layer 0 are guided to the byte 1 to 7 back, so that later layers match up to eight bytes; heads of
# those, one to a key-value head, to where a span at hand went on before.
SHIFT_HEADS = range(7)
RETRIEVAL_LAYERS = (1, 2)
RETRIEVAL_HEADS = (0, 4)
GUIDED_LAYERS = (0, *RETRIEVAL_LAYERS)


class AttentionInputs:
    """What goes into some layers' attention while a model runs within ``with``: hidden states and RoPE."""

    def __init__(self, model: LlamaForCausalLM, layers: Sequence[int]) -> None:
        self.attention = {index: model.model.layers[index].self_attn for index in layers}
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.hooks: list[Any] = []

    def __enter__(self) -> AttentionInputs:
        for index, module in self.attention.items():

            def keep(_module: Any, _inputs: tuple, given: dict[str, Any], index: int = index) -> None:
                self.seen[index] = (given["hidden_states"], *given["position_embeddings"])

            self.hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def log_attention(self, layer: int, heads: Sequence[int], rows: Tensor) -> Tensor:
        """Return ``[B,heads,R,T]``, the logarithm of the attention of queries ``rows`` ``[B,R]``."""
        module = self.attention[layer]
        hidden, cos, sin = self.seen[layer]  # [B,T,C], [B,T,D] twice
        size, group = module.head_dim, module.num_key_value_groups

        def roped(part: Tensor, weight: Tensor, at: Tensor | None) -> Tensor:  # [B,h,n,D]
            c, s = (x if at is None else x.gather(1, at[..., None].expand(-1, -1, size)) for x in (cos, sin))
            x = torch.nn.functional.linear(part, weight).unflatten(-1, (-1, size)).transpose(1, 2)
            return x * c[:, None] + rotate_half(x) * s[:, None]

        asking = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        wanted = torch.tensor(list(heads))
        query = roped(asking, module.q_proj.weight.unflatten(0, (-1, size)).index_select(0, wanted).flatten(0, 1), rows)
        key = roped(hidden, module.k_proj.weight, None).index_select(1, wanted // group)
        logits = (query @ key.mT).float() * module.scaling
        later = torch.arange(hidden.shape[1]) > rows[..., None]  # [B,R,T]
        return logits.masked_fill(later[:, None], -torch.inf).log_softmax(-1)


def guidance(inputs: AttentionInputs, batch: Batch) -> Tensor:
    """Return minus the log of the attention that guided heads give to where they should look, averaged.

    Without guidance a head that matches one byte formed after 900 steps, and one that matches several had not after
    2,100.
    """
    positions, rows = batch.positions, batch.guided
    losses = []
    log_attention = inputs.log_attention(0, SHIFT_HEADS, rows)
    for head in SHIFT_HEADS:
        back = (rows - head - 1).clamp(min=0)  # [B,R]
        adjacent = positions.gather(1, rows) - positions.gather(1, back) == head + 1
        losses.append(-log_attention[:, head].gather(2, back[..., None])[..., 0][adjacent].mean())
    there = where_it_went_on(batch, len(SHIFT_HEADS) + 1)
    useful = there.any(-1)
    for layer in RETRIEVAL_LAYERS:
        log_attention = inputs.log_attention(layer, RETRIEVAL_HEADS, rows)
        for head in range(len(RETRIEVAL_HEADS)):
            found = log_attention[:, head].masked_fill(~there, -torch.inf)[useful]
            losses.append(-found.logsumexp(-1).mean())
    return torch.stack([loss for loss in losses if loss.isfinite()]).mean()


def where_it_went_on(batch: Batch, deep: int) -> Tensor:
    """Return ``[B,R,T]``: whether the span at hand at a guided query went on before, to that key.

    The bytes up to the query and those up to before the key are equal, as many as the copy has so far and ``deep`` at
    most, and the key is the byte that comes next, so that no wrong continuation is rewarded.
    """
    tokens, positions, rows = batch.tokens, batch.positions, batch.guided
    length = tokens.shape[1]
    following = (rows + 1).clamp(max=length - 1)
    offset = batch.offset.gather(1, rows)
    going_on = (batch.offset.gather(1, following) > 0) & (rows + 1 < length)
    match = going_on[..., None] & (positions.gather(1, rows)[..., None] > positions[:, None])
    match &= tokens.gather(1, following)[..., None] == tokens[:, None]
    for back in range(deep):
        theirs = torch.nn.functional.pad(tokens, (back + 1, 0), value=-1)[:, :length]  # the byte back + 1 before a key
        mine = tokens.gather(1, (rows - back).clamp(min=0))
        match &= (mine[..., None] == theirs[:, None]) | (offset < back)[..., None]
    return match
