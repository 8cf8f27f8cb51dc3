"""The attention layers of a transformers model: shapes, scale, window and RoPE, found by what the layers do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparseattn.core.rope import Rope
from sparseattn.models import rotary
from sparseattn.models.attention_routing import Call, beyond_softmax
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.capture import probe
from sparseattn.models.exclusive import quiet
from sparseattn.models.input_device import input_device
from sparseattn.models.native_index import CachedIndex, NativeIndex, native_index
from sparseattn.models.transformers_classes import DynamicCache

TOKENS = 4  # of the passes that look at a model


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One layer with softmax attention.

    Args:
        heads, group, size: H, G and D.
        scale: factor of the logits.
        window: rows of a sliding window, None for the whole context.
        beyond: what it does beyond softmax attention over keys and values, in words; None: nothing.
        rope: its RoPE; None where it applies none, or one whose frequencies follow the length.
        dtype, device: of its keys.
        index: the index of its own that it chooses rows by; None: it has none.
    """

    heads: int
    group: int
    size: int
    scale: float
    window: int | None
    beyond: str | None
    rope: Rope | None
    dtype: torch.dtype
    device: torch.device
    index: NativeIndex | None = None


def attention_layers(model: Any, original: str) -> dict[int, AttentionLayer]:
    """Return the softmax attention layers of a model by number, from three forward passes over a few tokens.

    Args:
        model: a causal LM of transformers.
        original: the name of its attention implementation.

    Raises:
        ModelError: none of its layers goes through transformers' AttentionInterface.
    """
    config = model.config.get_text_config(decoder=True)
    ids = (torch.arange(1, TOKENS + 1) % config.vocab_size)[None]
    with quiet(model):
        # With a cache, through which layers may share keys. The calls keep their tensors, so equal addresses are of
        # the same keys.
        cache = DynamicCache(config=model.config)
        cached = probe(model, original, ids, use_cache=True, **cache_argument(cache))
        keys = {index: call.key.data_ptr() for index, call in cached.items()}
        with rotary.Watch({index: call.module for index, call in cached.items()}) as watch:
            calls = probe(model, original, ids)
            masked = {index for index, call in calls.items() if _masks(call, watch.tensors.get(index, ()))}
            ropes = {index: rope for index, call in calls.items() if (rope := _rope(model, call, watch)) is not None}
            if ropes:
                # Beyond every length it was made for, a model whose frequencies follow the length applies others.
                far = 2 * config.max_position_embeddings + torch.arange(TOKENS)
                watch.outputs_too = False
                with _choosing_as_before(calls.values()):
                    probe(model, original, ids, position_ids=far[None].to(input_device(model)))
                ropes = {i: rope for i, rope in ropes.items() if _applied(rope, watch, i, far)}
    sharing = {index: [other for other in keys if keys[other] == keys[index]] for index in keys}
    described = {}
    for i, call in calls.items():
        kept = CachedIndex(cache, i, cached[i].key, folded=i in masked)
        index = native_index(call.module, call.options, kept)
        beyond = _beyond(call, sharing[i], index, i in masked)
        described[i] = _described(call, ropes.get(i), beyond, index)
    return described


@contextlib.contextmanager
def _choosing_as_before(calls: Iterable[Call]) -> Iterator[None]:
    """Let indexes that choose blocks put out within the block of code what they put out in `calls`.

    That of MiniMax-M3 numbers blocks by position, so that it takes no far position without the rows before it.
    """
    replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of an index, and its own `forward`, if any
    for call in calls:
        own, ids = getattr(call.module, "indexer", None), call.options.get("block_indices")
        if own is not None and ids is not None:
            attributes = vars(own)
            replaced.append((attributes, {"forward": attributes["forward"]} if "forward" in attributes else {}))
            attributes["forward"] = functools.partial(_put_out, ids)
    try:
        yield
    finally:
        for attributes, before in replaced:
            del attributes["forward"]
            attributes.update(before)


def _put_out(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return ids


def _masks(call: Call, given: Sequence[torch.Tensor]) -> bool:
    """Whether a layer attends by a mask that it was not `given` but has made."""
    if not isinstance(call.mask, torch.Tensor):
        return False
    return call.mask.untyped_storage().data_ptr() not in {x.untyped_storage().data_ptr() for x in given}


def _rope(model: Any, call: Call, watch: rotary.Watch) -> Rope | None:
    given, outputs = watch.embeddings.get(call.layer), watch.outputs.get(call.layer, [])
    positions = torch.arange(TOKENS, device=call.key.device)
    try:
        return rotary.find(rotary.ropes_of(model), given, positions, call.query[0], call.key[0], outputs)
    except rotary.NoRope:
        return None


def _applied(rope: Rope, watch: rotary.Watch, index: int, positions: torch.Tensor) -> bool:
    given = watch.embeddings.get(index)
    return given is not None and rotary.applied(rope, given, positions.to(given[0].device))


def _beyond(call: Call, sharing: Sequence[int], index: NativeIndex | None, masked: bool) -> str | None:
    """Return what a layer does beyond softmax attention over keys and values, in words."""
    size, narrow = call.key.shape[-1], call.value.shape[-1]
    if index is not None and index.fixed is not None:
        return f"has an index of its own that cannot be left out ({index.fixed})"
    if narrow > size or (narrow < size and index is None):
        return f"has keys of {size} dimensions and values of {narrow}"
    if len(sharing) > 1:
        return f"shares its keys with other layers (all of {', '.join(map(str, sharing))})"
    if masked and index is None:
        return "makes a mask of its own, by which it may choose among its rows or weigh them"
    return beyond_softmax(call)


def _described(call: Call, rope: Rope | None, beyond: str | None, index: NativeIndex | None) -> AttentionLayer:
    _, heads, _, size = call.key.shape
    group, where = call.query.shape[1] // heads, (call.key.dtype, call.key.device)
    return AttentionLayer(heads, group, size, call.scale, call.window, beyond, rope, *where, index)
