"""Traces: the queries, keys and values that a model's attention layers saw, in one safetensors file.

Letters: H KV heads, G query heads per KV head, T tokens, D head size.

The file, format version 1 (any safetensors reader opens it):

    layers.{i}.query    [H,G,T,D]   after RoPE, exactly as attention received it
    layers.{i}.keys     [H,T,D]     after RoPE; a row per token, also in sliding-window layers
    layers.{i}.values   [H,T,D]
    layers.{i}.ahead    [H,G,T,D]   in traces made with `capture(ahead=True)`, of all layers with a layer of attention
                                    before: the query that layer i makes of that layer's input, after RoPE
    layers.{i}.native   [Hs,T,S] i32  of a layer with an index of its own: the tokens that this chose for each query, -1
                                    for unused places; Hs lists, one for each KV head or one for all
    positions           [T] int64   the position of each token
    rope.{k}.inv_freq   [R/2] f32   frequencies of the k-th distinct RoPE

    metadata (strings, as safetensors requires):
    format    "sparseattn-trace"
    version   "1"
    layers    JSON list of {"index", "scale", "window", "rope"}: logits are `scale * q.k`; `window` is the width of a
              sliding window (row t sees rows t-window+1 .. t) or null; `rope` is a k or null
    ropes     JSON list of {"scaling", "interleaved"}, one for each k
    meta      JSON object: model id, config hash, `model_layers` (how many the model has), source of the text, versions,
              `native_row_bytes` (of layers with `native`, bytes of a token's keys in the index), what could not be
              recorded and why
    pieces    in traces made with `capture(pieces=)`, JSON list of T strings: the text of each token, empty where
              another token has its character; earlier releases leave it aside
    hashes    JSON object: name of each tensor -> its SHA-256, as `traces.trace_format.TensorHash` makes it; files of
              earlier releases have none

A trace may hold queries, and those ahead, of the last Q tokens alone (`layers.{i}.query` is `[H,G,Q,D]`, Q <= T).
`native` follows the queries. Earlier releases read files with `ahead` or `native` too, and leave them aside. All other
tensors of layers share one dtype, float32, float16 or bfloat16, and are finite.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseattn.traces.trace_file import TraceFile
from sparseattn.traces.trace_format import (
    VERSION,
    LayerShape,
    TraceError,
    check_pieces,
    each_once,
    integers,
    json_of,
)
from sparseattn.traces.trace_layer import TraceContents, TraceLayer
from sparseattn.traces.trace_writer import TraceWriter

__all__ = ["VERSION", "LayerShape", "Trace", "TraceError", "TraceLayer"]


class Trace:
    """The queries, keys and values of one text by layer, in memory or in a file that is read one layer at a time.

    Attributes:
        name: a short label, the file's stem.
        positions: `[T]` int64.
        layers: numbers of its layers, ascending.
        shapes: layer -> its `LayerShape`, known without loading the layer.
        ropes: layer -> its RoPE or None, known without loading the layer.
        dtype: of every tensor of its layers.
        meta: the origin of the trace (see the module).
        pieces: the text of each token, T of them; None: the trace holds no text.
        hashes: tensor's name -> its SHA-256; None in memory, and in files of earlier releases.
    """

    def __init__(
        self,
        name: str,
        contents: TraceContents,
        load: Callable[[int], TraceLayer],
        check: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.name = name
        self.positions = contents.positions
        self.shapes = dict(sorted(contents.shapes.items()))
        self.layers = tuple(self.shapes)
        self.ropes = {index: contents.ropes[index] for index in self.layers}
        self.dtype = contents.dtype
        self.meta = dict(contents.meta)
        self.pieces = check_pieces(contents.pieces, self.tokens)
        self.hashes = None if contents.hashes is None else dict(contents.hashes)
        self._load = load
        self._check = check
        self._right: set[str] = set()  # names of tensors that were compared with their hashes

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, tokens={self.tokens}, layers={self.layers})"

    @property
    def depth(self) -> int | None:
        """The number of layers of the model, including those not in the trace; None if unknown."""
        depth = self.meta.get("model_layers")
        return depth if type(depth) is int else None

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.positions)

    def layer(self, index: int) -> TraceLayer:
        """Load one layer only.

        Raises:
            TraceError: the trace has no such layer.
        """
        if index not in self.layers:
            raise self._lacks(index)
        return self._load(index)

    def first(self, tokens: int) -> Trace:
        """Return the trace of the text's first `tokens` tokens, as a capture that ended there would hold it.

        In a causal model a token's query, key and value do not depend on what follows, unless its RoPE changes with the
        length of the text. Layers are compared with their hashes and cut when they are loaded; a part has none.

        Raises:
            TraceError: not 1 to T tokens, or the trace holds no query of them.
        """
        if not 1 <= tokens <= self.tokens:
            raise TraceError(f"{self.name} has {self.tokens} tokens, its first {tokens} are not among them")
        if tokens == self.tokens:
            return self
        left = self.tokens - tokens
        firsts = {index: (shape.queries or self.tokens) - left for index, shape in self.shapes.items()}
        few = min(firsts.values())
        if few < 1:
            raise TraceError(
                f"{self.name} holds the queries of its last {few + left} tokens of {self.tokens}, none of them is "
                f"among the first {tokens}"
            )

        def load(index: int) -> TraceLayer:
            self.verify(index)  # here, as a part has no hash
            whole = self.layer(index)
            query, keys, values = whole.query[:, :, : firsts[index]], whole.keys[:, :tokens], whole.values[:, :tokens]
            ahead = None if whole.ahead is None else whole.ahead[:, :, : firsts[index]]
            native = None if whole.native is None else whole.native[:, : firsts[index]]
            return replace(whole, query=query, keys=keys, values=values, ahead=ahead, native=native)

        shapes = {index: replace(shape, queries=firsts[index]) for index, shape in self.shapes.items()}
        pieces = None if self.pieces is None else self.pieces[:tokens]
        contents = TraceContents(self.positions[:tokens], shapes, self.ropes, self.dtype, self.meta, pieces)
        return Trace(self.name, contents, load)

    def verify(self, index: int | None = None, names: Sequence[str] | None = None) -> None:
        """Compare the tensors of one layer, or of all, with the file's hashes; a correct tensor is not read again.

        Positions and ropes are compared when a file is opened. Without `hashes` there is nothing to compare.

        Args:
            index: the layer to compare; None: all layers.
            names: of "query", "keys", "values", "ahead" and "native", those to compare; None: all that the layer has.

        Raises:
            TraceError: no such layer, or a tensor that is not the one that was written.
        """
        if index is not None and index not in self.layers:
            raise self._lacks(index)
        for layer in self.layers if index is None else (index,):
            for name in (f"layers.{layer}.{name}" for name in names or self.shapes[layer].names):
                if self.hashes is not None and name not in self._right:
                    self._check(name)
                    self._right.add(name)

    def _lacks(self, index: int) -> TraceError:
        return TraceError(f"{self.name} has no layer {index}, it holds {', '.join(map(str, self.layers))}")

    @classmethod
    def build(
        cls,
        layers: Sequence[TraceLayer],
        positions: Tensor,
        meta: Mapping[str, Any] | None = None,
        name: str = "trace",
        pieces: Sequence[str] | None = None,
    ) -> Trace:
        """Return a trace in memory; `positions` is `[T]` of any integer dtype.

        Raises:
            TraceError: no layer, the same layer twice, layers of another number of tokens or of different dtypes,
                positions that are no integers, `meta` that JSON cannot hold, or `pieces` that are not T texts.
        """
        by_index = {layer.index: layer for layer in layers}
        each_once([layer.index for layer in layers])
        positions = integers(positions)
        json_of(meta or {})
        for layer in layers:
            if layer.keys.shape[1] != len(positions):
                raise TraceError(f"layer {layer.index} has {layer.keys.shape[1]} tokens for {len(positions)} positions")
            if layer.keys.dtype != layers[0].keys.dtype:
                raise TraceError(
                    f"the tensors of a trace share one dtype, layer {layers[0].index} has {layers[0].keys.dtype} and "
                    f"layer {layer.index} {layer.keys.dtype}"
                )
        shapes = {index: layer.shape for index, layer in by_index.items()}
        ropes = {index: layer.rope for index, layer in by_index.items()}
        contents = TraceContents(positions, shapes, ropes, layers[0].keys.dtype, meta or {}, pieces)
        return cls(name, contents, by_index.__getitem__)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, one layer in memory at a time; the file appears whole or not at all.

        Raises:
            TraceError: no such folder, not enough space, numbers that are not finite, or a trace that is damaged.
        """
        shapes = list(self.shapes.values())
        with TraceWriter(path, shapes, self.positions, self.dtype, self.meta, self.pieces) as writer:
            for index in self.layers:
                self.verify(index)  # what is written has hashes of its own, which no damage would show in
                layer = self.layer(index)
                writer.rope(index, layer.rope)
                for name, tensor in layer.tensors.items():
                    writer.write(index, name, 0, tensor)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """Open a trace file: its header is read and checked, rows are read when a layer is asked for.

        Raises:
            TraceError: missing, not a trace, truncated, of another version, or inconsistent.
        """
        file = TraceFile.open(Path(path))
        return cls(file.path.stem, file.contents, file.layer, file.check)
