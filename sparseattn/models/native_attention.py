"""`attn_implementation="sparseattn"`: rows that a model's own index chose, read alone, with transformers' own caches.

    register()
    model.set_attn_implementation("sparseattn")

A token that is decoded reads what was chosen: what the layer passes, or what its mask leaves where it folds its choice
into that (QSA, GLM-5-Next). `SparseCache(native=True)` does so too and stores rows without copying
all of them at every step; where a model keeps latents (MLA), only it saves expanding them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sparseattn.models import attention_routing
from sparseattn.models.attention_routing import Call, beyond_softmax, delegate
from sparseattn.models.errors import ModelError
from sparseattn.models.native_choice import check_lists, choice_of, has_index

NAME = "sparseattn"


def register(name: str = NAME) -> str:
    """Tell transformers of this attention function under a name, and return the name; an import registers nothing."""
    attention_routing.register(name, native_attention, "sdpa")
    return name


def native_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Answer an attention call of transformers: sdpa, of a single token over the rows that the layer's index chose.

    Layers without an index of their own, and passes of several tokens, run sdpa behind their masks.

    Args:
        module, options: as transformers gives them.
        query: `[B,HG,n,D]`.
        key: `[B,H,N,D]`.
        value: `[B,H,N,V]`.
        attention_mask: `[B,1,n,N]`, of bool or added to logits, or None.

    Returns:
        Output `[B,n,HG,V]`, and no weights.

    Raises:
        ModelError: a choice that cannot be read, or a layer that does more than softmax attention over keys and values.
    """
    call = Call(module, query, key, value, attention_mask, options)
    if (beyond := beyond_softmax(call)) is not None:
        raise ModelError(
            f"layer {call.layer} {beyond}, which {NAME} does not compute: use SparseCache(native=True), or eager"
        )
    if query.shape[2] > 1 or not has_index(module, options):
        return delegate(call, "sdpa")[0], None
    columns, heads = key.shape[2], key.shape[1]
    choice = choice_of(module, options, attention_mask, 1, columns, padded=True)
    check_lists(call.layer, choice.lists, heads)
    rows = choice.listed(0).expand(-1, heads, -1)
    at = rows.clamp(min=0)[..., None]
    keys, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in (key, value))
    group = query.shape[1] // heads
    used = (rows >= 0).repeat_interleave(group, 1)[:, :, None]  # [B,HG,1,S]
    out = scaled_dot_product_attention(query, keys, values, used, scale=call.scale, enable_gqa=group > 1)
    return out.transpose(1, 2), None
