"""What one attention layer saw, and what is known of a trace of several without loading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.traces.trace_format import AHEAD, CODES, NATIVE, LayerShape, TraceError


@dataclass(frozen=True, eq=False)
class TraceLayer:
    """What one attention layer saw.

    Args:
        index: the layer's number in the model.
        query: `[H,G,Q,D]` after RoPE, of the last Q tokens; Q = T in a captured trace.
        keys: `[H,T,D]` after RoPE.
        values: `[H,T,D]`.
        scale: logits are `scale * q.k`.
        rope: the RoPE that the layer applied, or None: it applies none, or none that could be verified.
        window: width of the layer's sliding window (row t sees rows `t-window+1 .. t`), or None.
        ahead: `[H,G,Q,D]` after RoPE: of the same tokens, the queries that this layer makes of the input of the
            attention layer before; None: not recorded, or there is none before.
        native: `[Hs,Q,S]` int32, the tokens that the layer's own index chose for the same queries, best first where it
            ranks them, -1 for unused places; one list for each KV head or one for all. None: it has no index.

    Raises:
        TraceError: shapes or dtypes that do not fit together, or what `LayerShape` refuses.
    """

    index: int
    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    rope: Rope | None = None
    window: int | None = None
    ahead: Tensor | None = None
    native: Tensor | None = None

    def __post_init__(self) -> None:
        q, k, v = self.query, self.keys, self.values
        if q.ndim != 4 or k.ndim != 3:
            raise TraceError(
                f"a layer's query is [H,G,T,D] and its keys and values are [H,T,D], layer {self.index} has "
                f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        shape, tensors = self.shape, self.tensors
        shape.check(k.shape[1], [list(tensors[name].shape) for name in shape.names])
        chosen = tensors.pop(NATIVE, None)
        if chosen is not None and (chosen.dtype != torch.int32 or len(chosen) not in (1, len(k))):
            raise TraceError(
                f"a layer's native is int32 [Hs,Q,S] with Hs 1 or its {len(k)} KV heads, layer {self.index} has "
                f"{chosen.dtype} {list(chosen.shape)}"
            )
        if {x.dtype for x in tensors.values()} != {k.dtype} or k.dtype not in CODES:
            raise TraceError(
                f"a layer's tensors share one dtype of float32, float16 and bfloat16, layer {self.index} has "
                f"{q.dtype}, {k.dtype} and {v.dtype}" + ("" if self.ahead is None else f", ahead {self.ahead.dtype}")
            )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name in a file -> tensor."""
        parts = {"query": self.query, "keys": self.keys, "values": self.values}
        more = {AHEAD: self.ahead, NATIVE: self.native}
        return parts | {name: tensor for name, tensor in more.items() if tensor is not None}

    @property
    def shape(self) -> LayerShape:
        """What a writer must know of this layer beforehand."""
        heads, group, queries, size = self.query.shape
        native = None if self.native is None else (self.native.shape[0], self.native.shape[2])
        ahead = self.ahead is not None
        return LayerShape(self.index, heads, group, size, self.scale, self.window, queries, ahead, native)


@dataclass(frozen=True, eq=False)
class TraceContents:
    """What is known of a trace without loading a layer.

    Args:
        positions: `[T]` int64.
        shapes: layer -> its `LayerShape`.
        ropes: layer -> its RoPE or None.
        dtype: of every tensor of its layers.
        meta: the origin of the trace, see `traces.trace`.
        pieces: the text of each token, T of them; None: the trace holds no text.
        hashes: tensor's name -> its SHA-256; None: not known.
    """

    positions: Tensor
    shapes: Mapping[int, LayerShape]
    ropes: Mapping[int, Rope | None]
    dtype: torch.dtype
    meta: Mapping[str, Any]
    pieces: Sequence[str] | None = None
    hashes: Mapping[str, str] | None = None
