"""The sentences that refuse bad input at the cache's door, before anything is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.cache.disk_rows import folder_of
from sparseattn.codecs.base import RowCodec
from sparseattn.core.rope import Rope
from sparseattn.kernels.attend.dispatch import DTYPES
from sparseattn.selectors.abilities import (
    EstimatesMass,
    Evicts,
    FollowsChecks,
    FollowsMoves,
    HasTail,
    LearnsFromQueries,
    Observes,
    ReadsKeys,
    ReadsRoundedKeys,
)
from sparseattn.selectors.base import Selector
from sparseattn.selectors.checks import other_heads
from sparseattn.utils.tensors import only_tensors


def check_sizes(**given: int) -> None:
    """Numbers of rows, by the names of their options; else ValueError."""
    for name, size in given.items():
        if type(size) is not int or size < 0:
            raise ValueError(f"{name} is 0 or more rows, an int, got {size!r}")


def check_unused(selector: Selector) -> None:
    """Check for a selector that no cache and no caller has filled; else ValueError."""
    if any(part.rows_of_cache for part in selector.tree()) or any(state.rows for _, state in selector.buffers()):
        raise ValueError(
            f"this {selector!r} holds the rows of another cache: one selector serves one cache, so give each layer its "
            f"own with selector.for_layer(i)"
        )


def check_reachable(selector: Selector, device: torch.device, sealed_device: torch.device | None) -> None:
    """Check that the selector can work where its rows will lie; else ValueError."""
    if selector.host and (sealed_device or device).type != "cpu":
        raise ValueError(
            f"{selector!r} works in host memory, these rows are on {device}: keep the sealed ones there with "
            f'KVCache(..., sealed_device="cpu")'
        )


def check_tensors(keys: object, values: object, queries: object, positions: object) -> None:
    """Keys and values are tensors, and queries and positions where they are given; else ValueError."""
    given = {"keys": keys, "values": values, "queries": queries, "positions": positions}
    for name, part in given.items():
        if not isinstance(part, Tensor) and (part is not None or name in ("keys", "values")):
            only_tensors(**{name: part})


def check_rows(keys: Tensor, values: Tensor, stored: Tensor | None) -> None:
    """Check that new rows fit each other and the stored keys `stored` `[B,H,N,D]`, and are finite; else ValueError."""
    if keys.ndim != 4 or keys.shape != values.shape or not (keys.shape[0] and keys.shape[1]):
        raise ValueError(
            f"append takes keys and values of one shape [B,H,n,D], got {list(keys.shape)} and {list(values.shape)}"
        )
    if not 1 <= keys.shape[3] <= 256:
        raise ValueError(f"the head size D is 1 to 256, got {keys.shape[3]}")
    if keys.dtype != values.dtype or keys.device != values.device or keys.dtype not in DTYPES:
        raise ValueError(
            f"append takes keys and values of one floating dtype and device, float32, float16, bfloat16 or float64; "
            f"got {keys.dtype} on {keys.device} and {values.dtype} on {values.device}"
        )
    if stored is not None:
        if (keys.shape[0], keys.shape[1], keys.shape[3]) != (stored.shape[0], stored.shape[1], stored.shape[3]):
            raise ValueError(
                f"this cache's storage is [B,H,N,D] = {[*stored.shape[:2], 'N', stored.shape[3]]}, got keys "
                f"{list(keys.shape)}"
            )
        if keys.dtype != stored.dtype or keys.device != stored.device:
            raise ValueError(
                f"this cache's storage is {stored.dtype} on {stored.device}, got keys of {keys.dtype} on {keys.device}"
            )
    if not keys.is_cuda or keys.shape[2] > 1:  # a check at every step would make the host wait for the GPU
        check_finite(keys=keys, values=values)


def check_not_fixed(selector: Selector) -> None:
    """Check for a selector whose storage no cache has fixed; else ValueError."""
    if any(part.fixed_for_cache for part in selector.tree()):
        raise ValueError(
            f"the storage of this {selector!r} was fixed for another cache: one selector serves one cache, so give "
            f"each layer its own with selector.for_layer(i)"
        )


def check_fixed(sink: int, unit: int, capacity: int, sealed_device: torch.device | None) -> None:
    """Check for a capacity for the sink and a unit of rows, and all rows on one device; else ValueError."""
    if sealed_device is not None or capacity < sink + unit:
        apart = "" if sealed_device is None else f' and sealed_device="{sealed_device}"'
        raise ValueError(
            f"fixed=True takes a capacity for the sink and a unit, {sink + unit} rows or more, all on one device; got "
            f"capacity={capacity}{apart}"
        )


def capturing(rows: Tensor) -> bool:
    """Whether what is done to `rows` now goes into a CUDA graph."""
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


def check_repeatable(rows: Tensor, what: str) -> None:
    """Not inside the capture of a CUDA graph, whose replays would not do `what` as it is meant; else RuntimeError."""
    if capturing(rows):
        raise RuntimeError(f"{what} goes by counts on the host, which no CUDA graph repeats: do it between the replays")


def check_queries(given: Tensor | None, keys: Tensor, who: Selector | RowCodec, buffer: Tensor | None) -> None:
    """Check that queries `[B,H,G,n,D]` of the rows `keys` fit them and the stored queries `buffer`; else ValueError."""
    if given is None:
        raise ValueError(f"{who!r} learns from queries: append(keys, values, queries [B,H,G,n,D])")
    batch, heads, new, size = keys.shape
    group = "G" if buffer is None else buffer.shape[2]
    fits = given.ndim == 5 and given.shape[:2] == (batch, heads) and given.shape[3:] == (new, size) and given.shape[2]
    if not fits or (buffer is not None and given.shape[2] != group):
        raise ValueError(
            f"queries of keys {list(keys.shape)} are [B,H,G,n,D] = {[batch, heads, group, new, size]}"
            f"{', G 1 or more' if buffer is None else ''}, got {list(given.shape)}"
        )
    if given.dtype != keys.dtype or given.device != keys.device:
        raise ValueError(f"queries are of the keys' {keys.dtype} on {keys.device}, got {given.dtype} on {given.device}")
    if not given.is_cuda or new > 1:
        check_finite(queries=given)


def checked_positions(at: Tensor, batch: int, new: int, after: Sequence[int]) -> Tensor:
    """Positions `[B,n]` on the CPU as int64, if they rise and are at least `after` of B; else ValueError."""
    if tuple(at.shape) != (batch, new) or at.is_floating_point():
        raise ValueError(
            f"positions of {new} rows of {batch} sequences are integers [B,n] = {[batch, new]}, got "
            f"{at.dtype} {list(at.shape)}"
        )
    at = at.to("cpu", torch.int64)
    for b in range(batch):
        real = at[b][at[b] >= 0]
        if real.numel() and (int(real[0]) < after[b] or bool((real.diff() <= 0).any())):
            raise ValueError(
                f"the positions of a sequence rise from row to row (padding, negative, apart) and continue after "
                f"{after[b] - 1}; sequence {b} got {real[:8].tolist()}..."
            )
    return at


def checked_drop(given: int | Tensor, batch: int) -> list[int]:
    """Rows to drop from each of B sequences, given as one integer or as integers `[B]`; else ValueError."""
    drop = torch.tensor(given) if isinstance(given, Integral) else given
    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(drop, Tensor) or drop.dtype not in whole or [*drop.shape] not in ([], [1], [batch]):
        raise ValueError(f"crop takes the rows to drop as an int or as integers [B] = [{batch}], got {given!r}")
    each: list[int] = drop.expand(batch).tolist()
    return each


def check_indices(given: Tensor, batch: int) -> None:
    """`[B']` int64 numbers of sequences below `batch`, one or more; else ValueError."""
    only_tensors(index=given)
    shaped = given.ndim == 1 and given.dtype == torch.int64 and len(given)
    if not shaped or not bool(((given >= 0) & (given < batch)).all()):
        raise ValueError(f"reorder takes int64 [B'] indices below the batch of {batch}, B' 1 or more, got {given}")


def queries_wanted(selector: Selector) -> tuple[float, int]:
    """Return the share of the prompt's queries, and how many of its newest, that the selector learns from; else
    ValueError."""
    for part in selector.find(LearnsFromQueries):
        share, last = part.queries_share, part.last_queries
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(f"queries_share of {part!r} is a share of the rows from 0 to 1, got {share!r}")
        if type(last) is not int or last < 0:
            raise ValueError(f"last_queries of {part!r} is a number of queries, 0 or more, got {last!r}")
    return selector.queries_wanted


CALLED: tuple[type, ...] = (EstimatesMass, Evicts, FollowsChecks, FollowsMoves, HasTail, Observes)


def check_parts(selector: Selector) -> None:
    """Every selector that a method keeps in an attribute is named in `part_names`, and every ability whose methods it
    has is among its bases; else ValueError."""
    for part in selector.tree():
        for kind in CALLED:
            has = [name for name in getattr(kind, "__abstractmethods__") if callable(getattr(type(part), name, None))]  # noqa: B009
            if has and not isinstance(part, kind):
                raise ValueError(
                    f"{type(part).__name__} has {has[0]}, which nobody calls unless the class names {kind.__name__} in "
                    f"its bases (sparseattn.selectors.abilities)"
                )
        for name, value in vars(part).items():
            if isinstance(value, Selector) and name not in part.part_names:
                raise ValueError(
                    f"{type(part).__name__} keeps {value!r} in its attribute {name!r}: a class made of other methods "
                    f'names them, part_names = ("{name}",), so that they are cloned, moved and reset with it'
                )


def check_held(given: Tensor, real: Tensor, selector: Selector) -> None:
    """Return what a selector says it holds is `[B,H,N]` bool as `real` is, where that lies; else ValueError."""
    only_tensors(held=given)
    if given.shape != real.shape or given.dtype != torch.bool or given.device != real.device:
        raise ValueError(
            f"held of {selector!r} is bool [B,H,N] = {list(real.shape)} on {real.device} or None, got {given.dtype} "
            f"{list(given.shape)} on {given.device}"
        )


def check_codec(selector: Selector, codec: RowCodec | None, fixed: bool) -> None:
    """Check that a codec can keep the sealed rows of a cache with this selector, None as they come; else ValueError."""
    if codec is None:
        return
    if fixed:
        raise ValueError(
            f"rows={str(codec)!r} keeps sealed rows apart from the others, which a fixed cache cannot: leave "
            f"fixed=True out"
        )
    if selector.find(ReadsKeys):
        raise ValueError(
            f"{selector!r} scores the cache's own keys, which are not kept with rows={str(codec)!r}: take a method "
            f"with an index of its own, such as quest or lowbit, or leave rows out"
        )
    if selector.find(Observes):
        raise ValueError(
            f"{selector!r} learns from what its rows weigh, which attention over rows={str(codec)!r} does not tell: "
            f"leave rows out"
        )


def check_codec_fits(codec: RowCodec, keys: Tensor, rope: Rope | None) -> None:
    """Check that a codec can keep rows such as `keys` `[B,H,n,D]` of a layer with this RoPE, None for unknown; else
    ValueError."""
    codec.check_size(keys.shape[3])
    if codec.before_rope and rope is None:
        raise ValueError(
            f"rows={str(codec)!r} keeps keys as they are before RoPE, and the selector was not told the layer's: bind "
            f"it with selector.for_layer(LayerContext(i, rope=...)), as SparseCache does"
        )
    if codec.before_rope and rope is not None:
        rope.check_size(keys.shape[3])


def check_levels(selector: Selector, codec: RowCodec | None) -> None:
    """Check that the codec rounds keys in the groups whose levels the selector reads, if it reads any; else
    ValueError."""
    for part in selector.find(ReadsRoundedKeys):
        wanted = part.rounded_group
        if codec is None or not codec.shows_levels or codec.group != wanted:
            got = "rows as they come" if codec is None else f"rows={str(codec)!r}"
            raise ValueError(
                f"{selector!r} reads the levels of rounded keys in groups of {wanted} rows, got {got}: give the cache "
                f'rows="kivi:bits=4,group={wanted}", or other bits'
            )


def check_compactable(selector: Selector, fixed: bool, codec: RowCodec | None = None) -> None:
    """Rows that the selector drops can be freed; else ValueError."""
    if codec is not None:
        raise ValueError(f"rows={str(codec)!r} keeps rows together, so single ones cannot be freed: leave rows out")
    if not selector.find(Evicts):
        raise ValueError(f"{selector!r} drops no rows (Evicts), so there are none to free")
    if fixed:
        raise ValueError(
            "a fixed cache keeps its storage where a CUDA graph has found it, so no rows of it can be freed: build the "
            "KVCache without fixed=True"
        )
    if not _follows(selector):
        raise ValueError(
            f"{selector!r} does not say, or a part of it, how its state follows rows that move (FollowsMoves), so none "
            f"can be freed"
        )


def _follows(selector: Selector) -> bool:
    """Whether all of its parts that keep anything of the rows follow those that move."""
    return all(part.has(FollowsMoves) or not part.states() for part in selector.tree())


def disk_folder(given: object, codec: RowCodec | None) -> Path | None:
    """Return the folder of sealed rows in a file, None where they lie in memory; else ValueError."""
    folder = folder_of(given)
    if folder is not None and codec is not None:
        raise ValueError(
            f"sealed_device={given!r} keeps rows as they come, and rows={str(codec)!r} keeps codes of them in memory: "
            f"take one of the two"
        )
    return folder


def checked_device(given: torch.device | str | None) -> torch.device | None:
    """None, or host memory as a device; else ValueError."""
    if given is None or str(given).partition(":")[0] == "cpu":
        return None if given is None else torch.device("cpu")
    raise ValueError(
        f"sealed_device is None (sealed rows lie with the others), 'cpu' (host memory) or 'disk:FOLDER', got {given!r}"
    )


def check_query(query: Tensor, keys: Tensor) -> None:
    """Check that a query `[B,H,G,D]` fits the stored keys `keys` `[B,H,N,D]`; else ValueError."""
    if not isinstance(query, Tensor):
        only_tensors(query=query)
    if (
        query.ndim != 4
        or query.shape[:2] != keys.shape[:2]
        or query.shape[3] != keys.shape[3]
        or not query.shape[2]
        or (query.dtype != keys.dtype or query.device != keys.device)
    ):
        (batch, heads, _, size), hint = keys.shape, ""
        group = query.shape[1] // heads if query.ndim == 4 else 0
        if group > 1 and list(query.shape) == [batch, heads * group, 1, size]:
            hint = f"; transformers' [B,Hq,1,D] is query.view({batch}, {heads}, {group}, {size}) here"
        raise ValueError(
            f"a query of this cache is [B,H,G,D] = {[batch, heads, 'G', size]}, G 1 or more, {keys.dtype} on "
            f"{keys.device}, got {list(query.shape)} {query.dtype} on {query.device}{hint}"
        )


def check_group(query: Tensor, learned: Tensor) -> None:
    """Check that a query `[B,H,G,D]` has the G of the queries stored, `[B,H,G,m,D]`, or a multiple of it; else
    ValueError."""
    if query.shape[2] % learned.shape[2]:
        raise other_heads(learned.shape[2], query.shape[2])


def check_finite(**parts: Tensor) -> None:
    """No NaN and no infinity in any of the tensors `[B,H,...,D]`; else ValueError with the name and the place."""
    for name, part in parts.items():
        # NaN and infinity stay in a sum. A sum may also overflow: then each is looked at.
        if not math.isfinite(part.sum()) and not bool(torch.isfinite(part).all()):
            bad = (~torch.isfinite(part)).nonzero()[0].tolist()
            raise ValueError(f"{name} must be finite, got {part[tuple(bad)].item()} at [b,h,...,d] = {bad}")


def check_order(given: Tensor, stored: Tensor, new: int) -> None:
    """Check that a selector's order `[B,H,m]` permutes, in every head, the last m rows of the sealed keys `stored`
    `[B,H,N,D]`, at least the `new` ones; else ValueError."""
    batch, heads, rows = stored.shape[:3]
    fits = given.ndim == 3 and given.shape[:2] == (batch, heads) and new <= given.shape[2] <= rows
    if not fits or given.dtype != torch.int64:
        more = f", or of up to all {rows} sealed rows" if rows > new else ""
        raise ValueError(
            f"a selector's order is int64 [B,H,n] = {[batch, heads, new]}{more}, got {given.dtype} {list(given.shape)}"
        )
    moved = given.shape[2]
    seen = torch.zeros_like(given, dtype=torch.bool)
    if not bool(((given >= 0) & (given < moved)).all()) or not bool(seen.scatter_(2, given, True).all()):
        raise ValueError(f"a selector's order must be a permutation of the {moved} rows in every head")
