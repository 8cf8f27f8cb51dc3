"""Every measure of one decode step against full attention over all rows; `measure_table.py` says what each is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparseattn.cache.all_rows import all_bounds, bytes_named, everything
from sparseattn.cache.decode import attend_chosen
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.mass import Promise
from sparseattn.core.selection import Bounds, Selection, Tail
from sparseattn.evaluation.full_attention import RECALLS, FullAttention
from sparseattn.kernels.attend import reference as attend_reference

ROUNDING = 1e-5  # of sums of weights in float32
# What `compare` gives of a step, in the order of the records; `measure_table.py` says what each is.
MEASURES = (
    *(f"recall@{k}" for k in RECALLS),
    *("mass", "indexed_mass", "recovered", "lookups", "lookup_hits", "relative_error", "denominator_error", "mse"),
    *("attended", "attended_share", "kept", "oracle_kept", "promised", "fulfilled", "distinct_rows", "scanned"),
    *("scanned_share", "bytes_share"),
)
# Measures that are means over other things than tokens -> the measure that counts those.
COUNTED = {"lookup_hits": "lookups"}


def check_steps(measures: Sequence[str]) -> None:
    """ValueError for what is no measure of a single token: there may be no lookup at one, say."""
    known = [name for name in MEASURES if name not in COUNTED]
    unknown = [name for name in measures if name not in known]
    if unknown or isinstance(measures, str):
        raise ValueError(f"what can be measured step by step is {', '.join(known)}; got {measures!r}")


def compare(
    query: Tensor,
    cache: KVCache,
    selection: Selection,
    scale: float,
    full_attention: Callable[[Tensor, Tensor], FullAttention] | None = None,
) -> dict[str, Tensor]:
    """Every measure of one decode step of one sequence against full attention: measure -> `[H*G]` float64.

    A selector that observes is told what its selection got, as in `decode`. Rows of its tail count as rows attended and
    read, and its biases as bytes read.

    Args:
        query: `[1,H,G,D]` float32 or float64.
        cache: one unpadded sequence, after `select`; with a codec, one that keeps the rows as they came too (`exact`).
        selection: what it selected for this query.
        scale: factor of the logits.
        full_attention: gives that of the query and the rows `[1,H,N,D]`, keys and values, where it may be known
            already.
    """
    _check_comparable(cache)
    keys, values, bounds, reads = rows_read(query, cache, selection)
    rows, indexed = keys.shape[2], slice(bounds.base, int(bounds.sealed[0]))
    full = FullAttention.of(query, keys, values, scale) if full_attention is None else full_attention(keys, values)
    far = full.indexed(indexed)
    error = attend_chosen(query, cache, selection, scale=scale) - full.output
    weights_read = full.weights * reads
    mass, far_mass, far_reads = weights_read.sum(-1), weights_read[..., indexed].sum(-1), reads[..., indexed]
    row_bytes = 2 * keys.shape[3] * cache.selector.bytes_of(keys)  # a key and a value
    always = int(bounds.dense(rows).sum()) * row_bytes  # of rows that every query reads
    attended, distinct, of_rows = _cost_of_attending(cache, selection, reads, row_bytes)
    scanned, read = _cost_of_choosing(query, selection)
    tail = cache.search.latest_tail
    if selection.bias is None and tail is None:
        off = mass - 1
    else:
        off = (_log_sum(query, full.logits, reads, selection, indexed, tail, scale) - full.total).expm1()
    measured = {
        "mass": mass,
        "indexed_mass": far.mass,
        "recovered": torch.where(far.mass > 0, far_mass / far.mass, 1.0),
        "lookups": far.lookups,
        "lookup_hits": (far.sought & far_reads).sum(-1) / far.lookups,  # NaN without any
        "relative_error": error.norm(dim=-1) / full.output.norm(dim=-1).clamp(min=1e-30),
        "denominator_error": off.abs(),
        "mse": error.square().mean(-1),
        "attended": attended,
        "attended_share": attended / rows,
        "kept": far_reads.sum(-1),
        **_promised(cache.search.latest_promise, full.weights, mass, indexed),
        "distinct_rows": distinct,
        "scanned": scanned.expand_as(attended),
        "scanned_share": scanned.expand_as(attended) / rows,
        "bytes_share": ((always + of_rows + read) / (rows * row_bytes)).expand_as(attended),
    }
    hit = far_reads.gather(-1, far.best)  # [1,H,G,k], best first
    measured |= {f"recall@{k}": hit[..., :k].double().mean(-1) for k in RECALLS}
    return {name: measured[name].double().flatten() for name in MEASURES}


def _check_comparable(cache: KVCache) -> None:
    """ValueError where rows that a step is compared with are not there, or not where it looks."""
    if cache.sealed_device is not None:
        raise ValueError("compare reads every row where it lies: give it a cache without sealed_device")
    if cache.freed:
        raise ValueError(f"compare reads every row, and compact has freed {cache.freed} of each head of this cache")
    if cache.codec is not None and not cache.stored.sealed.exact:
        raise ValueError("compare needs the rows as they came: give a cache with rows= exact=True too")


def _cost_of_attending(
    cache: KVCache, selection: Selection, reads: Tensor, row_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows attended to and distinct ones among them, `[1,H,G]`, the tail's with them; and bytes `[1,H,1]` of the
    selection's rows and the tail's, and of their biases. reads: `[1,H,G,N]` bool, without the tail's."""
    heads = reads.shape[1]
    attended = reads.sum(-1)
    distinct = reads.any(2).sum(-1)[..., None].expand_as(attended)
    read = (bytes_named(cache, selection) + selection.bias_bytes(heads))[..., None]
    if (tail := cache.search.latest_tail) is not None:
        attended = attended + tail.selection.attended.unflatten(1, (heads, -1))
        own = tail.selection.distinct(heads, tail.keys.shape[2])[..., None]
        distinct, read = distinct + own, read + own * row_bytes + tail.selection.bias_bytes(heads)[..., None]
    return attended, distinct, read


def _cost_of_choosing(query: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """Rows scanned `[1,H,1 or G]` and bytes read `[1,H,1]`, NaN where a selector does not say what it cost."""
    heads = query.shape[1]
    unknown = query.new_full((1, heads, 1), torch.nan, dtype=torch.float64)
    scanned = unknown if selection.scanned is None else selection.scanned.unflatten(1, (heads, -1))
    return scanned, unknown if selection.scan_bytes is None else selection.scan_bytes[..., None]


def rows_read(query: Tensor, cache: KVCache, selection: Selection) -> tuple[Tensor, Tensor, Bounds, Tensor]:
    """Return the rows of a cache as `compare` has them, in stored order: keys and values `[1,H,N,D]`, their zones, and
    which of them each query head reads, `[1,H,G,N]` bool."""
    _, heads, group, _ = query.shape
    keys, values, bounds = cache.keys, cache.values, cache.bounds
    if cache.codec is not None:
        (keys, values, _), bounds = everything(cache), all_bounds(cache)
    reads = attend_reference.named(selection, bounds, heads, keys.shape[2]).expand(-1, -1, group, -1)
    return keys, values, bounds, reads


def _log_sum(
    query: Tensor,
    logits: Tensor,
    reads: Tensor,
    selection: Selection,
    indexed: slice,
    tail: Tail | None,
    scale: float,
) -> Tensor:
    """`[1,H,G]`: log-sum-exp of the logits `[1,H,G,N]` of the rows that a step attends to, with biases and tail."""
    heads = query.shape[1]
    logits = logits.masked_fill(~reads, -torch.inf)
    if selection.bias is not None:
        bias = selection.row_bias(indexed.stop - indexed.start).unflatten(1, (heads, -1))
        logits = torch.cat([logits[..., : indexed.start], logits[..., indexed] + bias, logits[..., indexed.stop :]], -1)
    if tail is None:
        return logits.logsumexp(-1)
    own, bias = (
        part(tail.keys.shape[2]).unflatten(1, (heads, -1)) for part in (tail.selection.mask, tail.selection.row_bias)
    )
    more = (query @ tail.keys.mT * scale + bias).masked_fill(~own, -torch.inf)
    return torch.cat([logits, more], -1).logsumexp(-1)


def _promised(promise: Promise | None, weights: Tensor, mass: Tensor, indexed: slice) -> dict[str, Tensor]:
    """Return the measures `[1,H,G]` of a budget by mass; NaN for another.

    Args:
        weights: `[1,H,G,N]`, full attention's.
        mass: `[1,H,G]`, of the rows that are attended.
        indexed: the rows to choose from.
    """
    if promise is None:
        none = weights.new_full(weights.shape[:3], math.nan)
        return {"oracle_kept": none, "promised": none, "fulfilled": none}
    far = weights[..., indexed].sort(-1, descending=True).values
    before = 1 - far.sum(-1, keepdim=True) + far.cumsum(-1) - far  # with sink, unsealed rows and what is heavier
    return {
        "oracle_kept": (before < promise.wanted).sum(-1),
        "promised": promise.held.view(mass.shape),
        "fulfilled": (mass >= promise.wanted * (1 - ROUNDING)).double(),
    }
