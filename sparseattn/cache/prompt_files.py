"""Prompt caches: all that a `KVCache` holds, in a file, so that a context prefilled once is decoded again later.

One form for a cache and for all layers of a model (`models.prompt_files`): safetensors with the SHA-256 of everything
in it (`tensor_files`). Of each cache the tensors are, under a prefix of its own:

    near/...       keys and values `[B,H,n,D]` of sink and recent rows, in this order, and their positions `[B,n]`
    sealed/...     the sealed rows in stored order, `[B,H,N,D]` or a codec's parts, and which of them are real
    queries/...    queries of the prompt that wait for a seal
    selector/...   the selector's index, by the names of `Selector.buffers`

and `said`, in the metadata, is JSON: settings, zones, and the selector as index files name it (`selector_state`). Of
one cache it has the layer's RoPE too, if that is known, of a model's that of each layer (`rope_facts`). Rows
lie in the file as if apart from each other, whatever the cache that wrote it, so that one that keeps sealed rows in
host memory takes what another kept on a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.layout import Zones
from sparseattn.cache.ranks import Ranks
from sparseattn.cache.rope_facts import ROPE, check_rope, rope_said
from sparseattn.cache.rows import StoredRows
from sparseattn.cache.selector_state import (
    check_described,
    counted,
    described,
    restore_states,
    saved_states,
    set_counted,
)
from sparseattn.codecs.base import RowCodec
from sparseattn.core.row_buffer import State
from sparseattn.kernels.attend.dispatch import DTYPES
from sparseattn.selectors.base import Selector
from sparseattn.utils.json_text import parse_entry
from sparseattn.utils.tensor_files import load_tensors, save_tensors

FORMAT, VERSION = "sparseattn-prompt", "1"
WHAT = "a prompt cache of sparseattn"


class SavedCache(Protocol):
    """What is looked at of a `KVCache`."""

    selector: Selector
    codec: RowCodec | None
    stored: StoredRows
    ranks: Ranks | None
    sink: int
    window: int
    seal_rows: int

    @property
    def batch(self) -> int: ...

    @property
    def begun(self) -> bool: ...

    def resume(self, begun: bool) -> None: ...

    def reset(self) -> None: ...


class PromptFileError(ValueError):
    """A prompt cache that cannot be written or read, in one sentence."""


def save(cache: SavedCache, path: str | os.PathLike[str]) -> None:
    """Write what one cache holds, see `KVCache.save`."""
    tensors, said = written(cache)
    said[ROPE] = rope_said(cache.selector.layer_context.rope)
    save_tensors(path, tensors, {"format": FORMAT, "version": VERSION, "said": json.dumps(said)})


def load(cache: SavedCache, path: str | os.PathLike[str], device: torch.device | str) -> None:
    """Make an empty cache hold what `path` does, see `KVCache.load`."""
    metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
    try:
        said = parse_entry(metadata, "said")
        if not isinstance(said, dict) or "layers" in said:
            raise ValueError("holds the layers of a model: SparseCache.load reads it")
        check(cache, said)
        context = cache.selector.layer_context
        if context.rope is not None and said.get(ROPE) is not None:  # a cache need not know its layer's
            check_rope(said, context.rope, context.layer)
        fill(cache, said, tensors, torch.device(device))
    except ValueError as error:
        raise PromptFileError(f"{os.fspath(path)}: {error}") from error


# -- what is written ---------------------------------------------------------------------------------------------------


def written(cache: SavedCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a cache holds as tensors, and what is said of it.

    Raises:
        RuntimeError: it holds nothing, or is void.
        ValueError: a selector whose index is not in tensors, or a cache over ranks.
    """
    check_whole(cache)
    cache.stored.require()
    stored, zones = cache.stored, cache.stored.zones
    unsealed = {"keys": stored.keys.data, "values": stored.values.data, "positions": stored.positions.data}
    tensors = {
        f"near/{name}": _without_sealed(part, 1 if part.ndim == 2 else 2, zones) for name, part in unsealed.items()
    }
    try:
        tensors |= saved_states(_states(cache))
    except ValueError as error:
        raise PromptFileError(f"{cache.selector!r} cannot be saved: {error}") from error
    if not zones.apart and zones.zone:
        for name, part in zip(("keys", "values"), stored.sealed_rows(), strict=True):
            tensors[f"sealed/{name}/rows"] = part
    said = {
        **described(cache.selector),
        "source": cache.selector.source(),
        "layer": cache.selector.layer,
        "counted": counted(cache.selector),
        "settings": _settings(cache),
        "zones": {"zone": zones.zone, "freed": zones.freed, "begun": cache.begun, "dropped": stored.sealed.dropped},
        "sequences": {"count": zones.count, "sealed": zones.sealed, "next": zones.next},
        "shape": [*stored.keys.full.shape[:2], stored.keys.full.shape[3]],
        "dtype": str(stored.keys.full.dtype),
    }
    return tensors, said


def _without_sealed(part: Tensor, dim: int, zones: Zones) -> Tensor:
    """Return the sink's and the recent rows of one that holds the sealed ones between them, or lacks these."""
    end = max(zones.end)
    sink, recent = part.narrow(dim, 0, zones.sink), part.narrow(dim, zones.start, end - zones.start)
    return torch.cat([sink, recent], dim)


def _states(cache: SavedCache) -> dict[str, State]:
    """Return what is saved of a cache as it is kept, by name; rows that lie between others are not among it."""
    sealed, queries = cache.stored.sealed, cache.stored.queries
    states: dict[str, State] = {f"sealed/{name}": state for name, state in sealed.states().items()}
    if not sealed.apart:
        states = {name: state for name, state in states.items() if not name.endswith(("/keys", "/values"))}
    states |= {"queries/sampled": queries.sampled, "queries/last": queries.last}
    return states | {f"selector/{name}": state for name, state in cache.selector.buffers()}


def _settings(cache: SavedCache) -> dict[str, Any]:
    codec = cache.codec
    kept = {"rows": None if codec is None else repr(codec), "exact": codec is not None and cache.stored.sealed.exact}
    return {"sink": cache.sink, "window": cache.window, "seal": cache.seal_rows, **kept}


def check_whole(cache: SavedCache) -> None:
    """Refuse, by PromptFileError, a cache that keeps a part of a sequence's rows."""
    if cache.ranks is not None:
        raise PromptFileError("a cache over ranks holds a part of the rows: save and load one without a group")


# -- what is read ------------------------------------------------------------------------------------------------------


def check(cache: SavedCache, said: Mapping[str, Any]) -> None:
    """Refuse what was written of a cache with other settings than this one, which is empty: ValueError."""
    check_whole(cache)
    if cache.batch:
        raise ValueError("a prompt cache is loaded into an empty cache: reset() this one, or make a new one")
    kinds = [str(kind) for kind in DTYPES]
    if said.get("dtype") not in kinds:
        raise ValueError(f"its rows have the dtype {said.get('dtype')}, and a cache holds one of {', '.join(kinds)}")
    try:
        check_described(said, cache.selector, source=cache.selector.source())
    except ValueError as error:
        raise ValueError(f"it is {error}") from None
    layer = cache.selector.layer
    if said.get("layer") != layer:
        raise ValueError(f"it was written of layer {said.get('layer')}, and this selector serves layer {layer}")
    mine, theirs = _settings(cache), said.get("settings", {})
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ValueError(f"it was written with {name}={theirs.get(name)!r}, and this cache has {name}={value!r}")


def fill(cache: SavedCache, said: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Make an empty cache, whose settings were checked, hold these tensors. It is empty again if they do not fit:
    ValueError."""
    try:
        _fill(cache, said, tensors, device)
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        cache.reset()
        raise ValueError(f"its tensors do not fit what it says of them: {error}") from error


def _fill(cache: SavedCache, said: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    stored, parts = cache.stored, dict(tensors)
    there = stored.sealed.device or device
    unsealed = {name: parts.pop(f"near/{name}") for name in ("keys", "values", "positions")}
    like = unsealed["keys"][:, :, :0].to(device)
    _check_shapes(cache, said, unsealed)
    zones = Zones(len(like), cache.sink, stored.zones.apart)
    zones.resume(said["sequences"], said["zones"]["zone"], said["zones"]["freed"])
    stored.begin(zones, like)
    stored.as_they_came = not zones.zone  # files do not say it
    sealed = None
    if not zones.apart and zones.zone:
        sealed = {name: parts.pop(f"sealed/{name}/rows") for name in ("keys", "values")}
    _place(cache, unsealed, sealed, device)
    if stored.sealed.codes is not None:
        stored.sealed.codes.bind(cache.selector.layer_context)
    states = _states(cache)
    own = {name: state for name, state in states.items() if name.startswith("queries/")}
    restore_states(own, {name: part for name, part in parts.items() if name.startswith("queries/")}, device)
    others = {name: state for name, state in states.items() if name not in own}
    restore_states(others, {name: part for name, part in parts.items() if not name.startswith("queries/")}, there)
    set_counted(cache.selector, said["counted"])
    stored.sealed.dropped = bool(said["zones"]["dropped"])
    cache.resume(bool(said["zones"]["begun"]))


def _check_shapes(cache: SavedCache, said: Mapping[str, Any], unsealed: Mapping[str, Tensor]) -> None:
    keys, values, positions = (unsealed[name] for name in ("keys", "values", "positions"))
    if keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(f"keys and values are [B,H,n,D], got {list(keys.shape)} and {list(values.shape)}")
    if [*keys.shape[:2], keys.shape[3]] != said["shape"] or str(keys.dtype) != said["dtype"]:
        raise ValueError(f"keys are {keys.dtype} {list(keys.shape)}, it says {said['dtype']} {said['shape']}")
    if list(positions.shape) != [keys.shape[0], keys.shape[2]] or positions.dtype != torch.int64:
        raise ValueError(f"positions are int64 [B,n], got {positions.dtype} {list(positions.shape)}")
    cache.selector.check_shape(keys.shape[1], None, keys.shape[3])
    if cache.codec is not None:
        input_checks.check_codec_fits(cache.codec, keys, cache.selector.layer_context.rope)


def _place(
    cache: SavedCache, unsealed: Mapping[str, Tensor], sealed: Mapping[str, Tensor] | None, device: torch.device
) -> None:
    """Store sink and recent rows, with the sealed ones between them where they do not lie apart."""
    stored, zones = cache.stored, cache.stored.zones
    gap = 0 if zones.apart else zones.zone
    first, rows = zones.sink, unsealed["keys"].shape[2]
    for name, buffer in (("keys", stored.keys), ("values", stored.values), ("positions", stored.positions)):
        part = unsealed[name] if name == "positions" else unsealed[name].to(device)
        full = buffer.resize(rows + gap, part)
        full.narrow(buffer.dim, 0, first).copy_(part.narrow(buffer.dim, 0, first))
        full.narrow(buffer.dim, first + gap, rows - first).copy_(part.narrow(buffer.dim, first, rows - first))
        if gap and name == "positions":
            full[:, first : first + gap] = 0  # of sealed rows any will do
        elif gap and sealed is not None:
            full[:, :, first : first + gap] = sealed[name]
