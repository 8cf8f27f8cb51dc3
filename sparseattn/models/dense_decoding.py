"""A decoded token's attention in a layer that is not sparse, over all rows of its context or window where they lie.

transformers asks torch for a group's attention without a mask, for which torch has no fast code on CPUs: one token over
4,096 rows of bfloat16, 8 KV heads of 4 and D 128, took 22 ms on 2 cores without AVX-512, and 2 here (the log,
2026-11-30). Under a mask that hides nothing torch is about as fast, but the call costs more around it. In float32 calls
stay torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.models.attention_routing import NAMELESS, Call, beyond_softmax
from sparseattn.models.dense_rows import DenseRows
from sparseattn.models.native_choice import passed

PAYS = 1 << 15  # numbers of keys of a sequence from which on our code takes less time


def decode_densely(call: Call, original: str, impl: str | None, stored: DenseRows) -> Tensor | None:
    """Return the output `[B,1,HG,D]` of one new token over all rows of the call, or None: the model's own attention is
    to run, as the call is of another kind or holds too few rows to gain anything.

    Args:
        call: of a layer that is not sparse.
        original: the name of the model's own implementation.
        impl: as in `attend`; "reference" and "gather" leave all calls to the model.
        stored: the rows of the cache's layers that are not sparse.
    """
    query, keys, options = call.query, call.key, call.options
    if impl not in (None, "numba") or query.shape[2] != 1 or keys.dtype.itemsize != 2 or query.device.type != "cpu":
        return None
    batch, query_heads, _, size = query.shape
    if query_heads == keys.shape[1] or keys[0].numel() < PAYS or original not in NAMELESS:
        return None
    if beyond_softmax(call) is not None or options.get("dropout") or passed(options) is not None:
        return None
    learns = query.requires_grad and torch.is_grad_enabled()
    if learns or torch.compiler.is_compiling() or not stored.hides_nothing(call.mask):
        return None
    grouped = query.reshape(batch, keys.shape[1], -1, size)
    out = stored.attend(call.layer, grouped, (keys, call.value), call.scale)
    return None if out is None else out.view(batch, 1, query_heads, size)
