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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.traces.trace_format import (
    AHEAD,
    CODES,
    FORMAT,
    NAMES,
    NATIVE,
    VERSION,
    LayerShape,
    TraceError,
    check_meta,
    check_pieces,
    each_once,
    hash_of,
    integers,
    is_whole,
    json_of,
    read_header,
)
from sparseattn.traces.trace_writer import TraceWriter
from sparseattn.utils.json_text import JsonError, parse_entry

__all__ = ["VERSION", "LayerShape", "Trace", "TraceError", "TraceLayer"]


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
        held = {"query": self.query, "keys": self.keys, "values": self.values}
        more = {AHEAD: self.ahead, NATIVE: self.native}
        return held | {name: tensor for name, tensor in more.items() if tensor is not None}

    @property
    def shape(self) -> LayerShape:
        """What a writer must know of this layer beforehand."""
        heads, group, queries, size = self.query.shape
        native = None if self.native is None else (self.native.shape[0], self.native.shape[2])
        ahead = self.ahead is not None
        return LayerShape(self.index, heads, group, size, self.scale, self.window, queries, ahead, native)


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
        positions: Tensor,
        shapes: Mapping[int, LayerShape],
        ropes: Mapping[int, Rope | None],
        dtype: torch.dtype,
        meta: Mapping[str, Any],
        load: Callable[[int], TraceLayer],
        hashes: Mapping[str, str] | None = None,
        check: Callable[[str], None] = lambda name: None,
        pieces: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.positions = positions
        self.shapes = dict(sorted(shapes.items()))
        self.layers = tuple(self.shapes)
        self.ropes = {index: ropes[index] for index in self.layers}
        self.dtype = dtype
        self.meta = dict(meta)
        self.pieces = check_pieces(pieces, len(positions))
        self.hashes = None if hashes is None else dict(hashes)
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
        length of the text. Layers are cut when they are loaded; there are no hashes.

        Raises:
            TraceError: not 1 to T tokens, or the trace holds no query of them.
        """
        if not 1 <= tokens <= self.tokens:
            raise TraceError(f"{self.name} has {self.tokens} tokens, its first {tokens} are not among them")
        if tokens == self.tokens:
            return self
        left = self.tokens - tokens
        held = {index: (shape.queries or self.tokens) - left for index, shape in self.shapes.items()}
        few = min(held.values())
        if few < 1:
            raise TraceError(
                f"{self.name} holds the queries of its last {few + left} tokens of {self.tokens}, none of them is "
                f"among the first {tokens}"
            )

        def load(index: int) -> TraceLayer:
            whole = self.layer(index)
            query, keys, values = whole.query[:, :, : held[index]], whole.keys[:, :tokens], whole.values[:, :tokens]
            ahead = None if whole.ahead is None else whole.ahead[:, :, : held[index]]
            native = None if whole.native is None else whole.native[:, : held[index]]
            return replace(whole, query=query, keys=keys, values=values, ahead=ahead, native=native)

        shapes = {index: replace(shape, queries=held[index]) for index, shape in self.shapes.items()}
        pieces = None if self.pieces is None else self.pieces[:tokens]
        return Trace(self.name, self.positions[:tokens], shapes, self.ropes, self.dtype, self.meta, load, pieces=pieces)

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
        held = {layer.index: layer for layer in layers}
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
        shapes = {index: layer.shape for index, layer in held.items()}
        ropes = {index: layer.rope for index, layer in held.items()}
        return cls(name, positions, shapes, ropes, layers[0].keys.dtype, meta or {}, held.__getitem__, pieces=pieces)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, one layer in memory at a time; the file appears whole or not at all.

        Raises:
            TraceError: no such folder, not enough space, or numbers that are not finite.
        """
        shapes = list(self.shapes.values())
        with TraceWriter(path, shapes, self.positions, self.dtype, self.meta, self.pieces) as writer:
            for index in self.layers:
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
        path = Path(path)
        tensors, metadata = read_header(path)
        if metadata.get("format") != FORMAT:
            raise TraceError(f"{path} is a safetensors file, but not a trace (`sparseattn capture` makes one)")
        if metadata.get("version") != str(VERSION):
            raise TraceError(
                f"{path} has trace format version {metadata.get('version')}, this sparseattn reads version {VERSION}"
            )
        from safetensors import SafetensorError

        file = _mapped(path)
        try:
            positions = integers(file.get_tensor("positions"))
            ropes = [
                Rope(file.get_tensor(f"rope.{k}.inv_freq"), entry["scaling"], entry["interleaved"])
                for k, entry in enumerate(parse_entry(metadata, "ropes"))
            ]
            entries = parse_entry(metadata, "layers")
            each_once([entry["index"] for entry in entries])
            layers = {entry["index"]: _read_layer(entry, tensors, len(positions), ropes) for entry in entries}
            meta = parse_entry(metadata, "meta")
            check_meta(meta)
            pieces = check_pieces(parse_entry(metadata, "pieces", "null"), len(positions))
            held = [f"layers.{index}.{name}" for index, (shape, _) in layers.items() for name in shape.names]
            dtypes = {tensors[name]["dtype"] for name in held if not name.endswith(f".{NATIVE}")}
            if len(dtypes) != 1 or not dtypes <= set(CODES.values()):
                raise TraceError(f"its layers are of {' and '.join(sorted(dtypes))}")
            hashes: dict[str, str] = parse_entry(metadata, "hashes", "{}")
            if "hashes" in metadata:
                if not isinstance(hashes, dict) or hashes.keys() != tensors.keys():
                    raise TraceError("its hashes are not those of its tensors")
                for name in ("positions", *(f"rope.{k}.inv_freq" for k in range(len(ropes)))):
                    _check_hash(file, name, hashes)
        except (TraceError, JsonError) as error:
            raise TraceError(f"{path} is a damaged trace: {error}") from error
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise TraceError(f"{path} is a damaged trace: its metadata and tensors do not fit together") from error

        def load(index: int) -> TraceLayer:
            shape, rope = layers[index]
            # A mapping that stayed would keep every page read resident, layer after layer and prompt after prompt.
            rows = _mapped(path)
            read = {name: rows.get_tensor(f"layers.{index}.{name}") for name in shape.names}
            return TraceLayer(index, scale=shape.scale, rope=rope, window=shape.window, **read)

        def check(name: str) -> None:
            try:
                _check_hash(_mapped(path), name, hashes)
            except TraceError as error:
                raise TraceError(f"{path} is a damaged trace: {error}") from error

        dtype = next(dtype for dtype, code in CODES.items() if code in dtypes)
        known = {index: shape for index, (shape, _) in layers.items()}
        turns = {index: rope for index, (_, rope) in layers.items()}
        return cls(path.stem, positions, known, turns, dtype, meta, load, hashes or None, check, pieces)


def _mapped(path: Path) -> Any:
    """The safetensors file `path`, mapped into memory until this and all its tensors are let go of."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _check_hash(file: Any, name: str, hashes: Mapping[str, str]) -> None:
    if hash_of(name, file.get_tensor(name)) != hashes[name]:
        raise TraceError(f"its {name} is not what was written")


def _read_layer(
    entry: dict[str, Any], tensors: dict[str, Any], tokens: int, ropes: Sequence[Rope]
) -> tuple[LayerShape, Rope | None]:
    """What the metadata's entry of a layer says, checked against the tensors' shapes."""
    index, k = entry["index"], entry["rope"]
    missing = [name for name in NAMES if f"layers.{index}.{name}" not in tensors]
    if missing:
        raise TraceError(f"layer {index} lacks its {' and '.join(missing)}")
    heads, group, queries, size = tensors[f"layers.{index}.query"]["shape"]
    ahead, chosen = f"layers.{index}.{AHEAD}" in tensors, tensors.get(f"layers.{index}.{NATIVE}")
    if chosen is not None and (chosen["dtype"] != "I32" or len(chosen["shape"]) != 3):
        raise TraceError(f"layer {index} has native {chosen['dtype']} {chosen['shape']}, which is I32 [Hs,Q,S]")
    native = None if chosen is None else (chosen["shape"][0], chosen["shape"][2])
    shape = LayerShape(index, heads, group, size, entry["scale"], entry["window"], queries, ahead, native)
    shape.check(tokens, [tensors[f"layers.{index}.{name}"]["shape"] for name in shape.names])
    if k is not None and not (is_whole(k, 0) and k < len(ropes)):
        raise TraceError(f"layer {index} names rope {k}, the file has {len(ropes)}")
    return shape, None if k is None else ropes[k]
