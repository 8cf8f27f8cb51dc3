"""Why methods find or miss what a head needs: measures of the attention itself, token by token, for each query head.

Four questions, at the last tokens of a trace and for the rows beyond sink and window. How far do queries lie from the
keys, and how far do other keys (RetrievalAttention, https://arxiv.org/abs/2409.10516, section 2.3)? How much of the
attention do the best rows hold? Do the next tokens need the same rows? And how close are the bounds by which Quest
(https://arxiv.org/abs/2406.10774) ranks pages to the pages' largest logits? No selector is run:
`evaluation.replay` measures what one makes of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.evaluation.measure_table import BEFORE, BEST, HELD, NEEDED
from sparseattn.evaluation.rank_correlation import rank_correlation
from sparseattn.evaluation.replay_settings import Replay, check_replay, is_trace, usable_layers
from sparseattn.evaluation.result import json_number
from sparseattn.kernels.page_bounds.reference import page_bounds
from sparseattn.selectors.base import Rows
from sparseattn.selectors.pages.quest import Quest
from sparseattn.traces.trace import Trace, TraceLayer

COUNTS = (16, 64, 256, 1024)  # rows whose share of the attention is measured
PAGES = (16, 8)  # rows of a page

# What is measured for each query head, the mean over the tokens; `measure_table.py` says what each is.
MEASURES = (
    *("query_distance", "key_distance", "distance_ratio", "far_mass", "needed"),
    *(f"top_share@{k}" for k in COUNTS),
    *("overlap@1", f"overlap@{BEFORE}", f"rows@{BEFORE}"),
    *(f"{name}@{page}" for page in PAGES for name in ("slack", "rank", "hits", "best_share", "bound_share")),
)


@dataclass(frozen=True)
class Inspection:
    """What was measured on one trace.

    Args:
        trace: its name.
        settings: sink, window, last and tokens.
        heads: layer -> measure (`MEASURES`) -> `[H*G]` float64, query head `h*G + g` reading KV head h.
    """

    trace: str
    settings: dict[str, Any]
    heads: dict[int, dict[str, Tensor]] = field(repr=False)

    @property
    def layers(self) -> list[int]:
        """Model layers that were measured."""
        return list(self.heads)

    def mean(self, measure: str, layer: int | None = None) -> float:
        """Mean over the heads that are not NaN, of one layer or of all."""
        chosen = self.layers if layer is None else [layer]
        return float(torch.cat([self.heads[layer][measure] for layer in chosen]).nanmean())

    def extremes(self, measure: str) -> tuple[int, int]:
        """Return the layers with the least and the largest mean; of several, the first."""
        known = [layer for layer in self.layers if not math.isnan(self.mean(measure, layer))] or self.layers
        return min(known, key=lambda layer: self.mean(measure, layer)), max(
            known, key=lambda layer: self.mean(measure, layer)
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a flat JSON-able record a layer: the mean over its heads, and every head."""
        return [
            {
                "trace": self.trace,
                "layer": layer,
                **self.settings,
                "mean": {name: json_number(self.mean(name, layer)) for name in MEASURES},
                "heads": {name: [json_number(value) for value in heads[name].tolist()] for name in MEASURES},
            }
            for layer, heads in self.heads.items()
        ]


def inspect_trace(
    trace: Trace,
    *,
    sink: int = 4,
    window: int = 64,
    last: int = 32,
    layers: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """Every measure of `MEASURES` for every query head of a trace.

    Args:
        trace: queries, keys and values of a model.
        sink, window: first and last rows that every query reads; the others are far.
        last: tokens at the end of the trace that are measured.
        layers: model layers, default all that attend to the whole context.
        progress: called with 1 after every token of a layer.

    Raises:
        ValueError: settings that leave no page beyond sink and window, or a layer that is not there or slides.
        ImportError: scikit-learn is not installed.
    """
    chosen = check_inspection(trace, sink, window, last, layers)
    settings = {"sink": sink, "window": window, "last": last, "tokens": trace.tokens}
    heads = {}
    for index in chosen:
        trace.verify(index)
        heads[index] = inspect_layer(trace.layer(index), trace.positions, sink, window, last, progress)
    return Inspection(trace.name, settings, heads)


def check_inspection(trace: Trace, sink: int, window: int, last: int, layers: Sequence[int] | None) -> list[int]:
    """Return the layers that `inspect_trace` would measure; raises what it would raise, before any work."""
    is_trace(trace)
    estimator()
    chosen = usable_layers(trace, layers)
    check_replay(trace, [], Quest(max(PAGES)), Replay(sink, window, last))
    return chosen


def inspect_layer(
    layer: TraceLayer,
    positions: Tensor,
    sink: int,
    window: int,
    last: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Measure -> `[H*G]` float64 of one layer; `positions` `[T]` of its trace, the rest as in `inspect_trace`.

    One token's logits, `[H*G,T]` float32, are in memory at a time.
    """
    tokens = len(positions)
    keys, queries = layer.keys.float(), layer.query[:, :, -last:].float()
    input_checks.check_finite(queries=queries, keys=keys)
    known = keys[:, sink : tokens - last - window]  # far from all these tokens
    query_distance, key_distance = head_distances(queries, keys[:, -last:], known)
    bounds = [_Pages(layer, positions, sink, tokens - window, page) for page in PAGES]
    recent: deque[Tensor] = deque(maxlen=BEFORE)
    steps: list[dict[str, Tensor]] = []
    for t in range(tokens - last, tokens):
        query = queries[:, :, t - tokens]  # [H,G,D]
        products = (query @ keys[:, : t + 1].mT).flatten(0, 1)  # [H*G,t+1]
        weights = (products * layer.scale).softmax(-1)
        far = slice(sink, t + 1 - window)
        shares = top_shares(weights[:, far], COUNTS)
        step = {f"top_share@{k}": shares[:, i] for i, k in enumerate(COUNTS)}
        step["needed"] = rows_holding(weights[:, far], HELD)
        step["far_mass"] = weights[:, far].sum(-1, dtype=torch.float64)
        needed = top_rows(products[:, far], NEEDED)
        step |= _change(torch.nn.functional.pad(needed, (0, tokens - needed.shape[1])), recent)
        for pages in bounds:
            step |= pages.measure(query, products, weights, t + 1 - window)
        steps.append(step)
        if progress is not None:
            progress(1)
    means = {name: torch.stack([step[name] for step in steps]).nanmean(0) for name in steps[0]}
    means |= {
        "query_distance": query_distance,
        "key_distance": key_distance,
        "distance_ratio": query_distance / key_distance,
    }
    return {name: means[name] for name in MEASURES}


def mahalanobis(vectors: Tensor, keys: Tensor) -> Tensor:
    """How far vectors `[n,D]` lie from the distribution of keys `[N,D]`: `[n]` float64, in standard deviations of it.

    The square root of `(x - m) C^-1 (x - m)`, m the keys' mean and C their covariance. Its estimate is Ledoit and
    Wolf's (scikit-learn), which can be inverted however few the keys are; with thousands of keys it is the plain one to
    a few per mille.
    """
    fitted = estimator()().fit(keys.double().cpu().numpy())
    squared = torch.from_numpy(fitted.mahalanobis(vectors.double().cpu().numpy()))
    return squared.clamp(min=0).sqrt()


def head_distances(queries: Tensor, held_out: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean distance of queries, and of keys held out, from the distribution of other keys, for every query head.

    RetrievalAttention samples 5,000 queries and keys of the whole context; here both are those of the same few tokens,
    so that neither lies farther by its place in the context alone. `recall`'s control asks with the same keys.

    Args:
        queries: `[H,G,n,D]`.
        held_out: `[H,n,D]`, not among `keys`.
        keys: `[H,N,D]`.

    Returns:
        Of the queries and of the keys held out, each `[H*G]` float64; the second repeated for the group.
    """
    heads, group, count, _ = queries.shape
    distances = torch.stack(
        [mahalanobis(torch.cat([queries[h].flatten(0, 1), held_out[h]]), keys[h]) for h in range(heads)]
    )
    means = distances.unflatten(1, (group + 1, count)).mean(-1)  # [H,G+1]
    return means[:, :-1].flatten(), means[:, -1].repeat_interleave(group)


def top_shares(weights: Tensor, counts: Iterable[int]) -> Tensor:
    """Return the share of weights `[...,N]` that the k largest hold, for each k of `counts`: `[...,len(counts)]`
    float64.

    With k above N, of all of them. 0 of 0 is 1, as in `evaluate`: nothing is missing.
    """
    counts = list(counts)
    rows = weights.shape[-1]
    largest = weights.topk(min(max(counts), rows), dim=-1).values.double().cumsum(-1)
    masses = largest[..., [min(k, rows) - 1 for k in counts]]
    return _share(masses, weights.sum(-1, keepdim=True, dtype=torch.float64))


def rows_holding(weights: Tensor, share: float) -> Tensor:
    """Return the fewest of weights `[...,N]` that hold this share of their sum: `[...]` float64; 0 where the sum is
    0."""
    masses = weights.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    total = masses[..., -1:]
    return torch.where(total[..., 0] > 0, (masses < share * total).sum(-1) + 1.0, 0.0)


def top_rows(logits: Tensor, count: int) -> Tensor:
    """Whether each of N rows is among the `count` with the largest logits `[...,N]`: bool of that shape."""
    best = logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)


def overlap(rows: Tensor, others: Tensor) -> Tensor:
    """Return the share of `rows` `[...,N]` bool that are in `others` too: `[...]` float64."""
    return (rows & others).sum(-1) / rows.sum(-1).double()


class _Pages:
    """Quest's bounds of the whole pages of one size between sink and window."""

    def __init__(self, layer: TraceLayer, positions: Tensor, sink: int, end: int, page: int) -> None:
        self.sink, self.page = sink, page
        rows = slice(sink, sink + (end - sink) // page * page)
        quest = Quest(page)
        quest.append(
            Rows(layer.keys[None, :, rows].float(), layer.values[None, :, rows].float(), positions[None, rows])
        )
        self.low, self.high = quest.low.data, quest.high.data  # [1,H,P,D]

    def measure(self, query: Tensor, products: Tensor, weights: Tensor, end: int) -> dict[str, Tensor]:
        """Measure -> `[H*G]` for one token.

        Args:
            query: `[H,G,D]`.
            products: `[H*G,N]`, of the query with every key before.
            weights: `[H*G,N]`, full attention.
            end: one past the last row before the window.
        """
        count = (end - self.sink) // self.page
        rows = slice(self.sink, self.sink + count * self.page)
        logits = products[:, rows]
        largest = logits.unflatten(-1, (count, self.page)).amax(-1)  # [H*G,P]
        bound = page_bounds(query[None], self.low[:, :, :count], self.high[:, :, :count])[0].flatten(0, 1)
        deviation = logits.double().std(-1)
        page_masses = weights[:, rows].unflatten(-1, (count, self.page)).sum(-1, dtype=torch.float64)
        whole = page_masses.sum(-1)
        pages = NEEDED // self.page
        excess = (bound - largest).mean(-1, dtype=torch.float64)
        return {
            f"slack@{self.page}": torch.where(deviation > 0, excess / deviation, torch.nan),
            f"rank@{self.page}": rank_correlation(bound, largest),
            f"hits@{self.page}": overlap(top_rows(largest, BEST), top_rows(bound, BEST)),
            f"best_share@{self.page}": _share((page_masses * top_rows(largest, pages)).sum(-1), whole),
            f"bound_share@{self.page}": _share((page_masses * top_rows(bound, pages)).sum(-1), whole),
        }


def _change(needed: Tensor, recent: deque[Tensor]) -> dict[str, Tensor]:
    """How a token's rows `[H*G,T]` bool differ from those of the tokens before, to which they are then added."""
    unknown = torch.full(needed.shape[:1], math.nan, dtype=torch.float64)
    step = {"overlap@1": unknown, f"overlap@{BEFORE}": unknown, f"rows@{BEFORE}": unknown}
    if recent:
        step["overlap@1"] = overlap(needed, recent[-1])
    if len(recent) == BEFORE:
        union = torch.stack(list(recent)).any(0)
        step |= {f"overlap@{BEFORE}": overlap(needed, union), f"rows@{BEFORE}": union.sum(-1).double()}
    recent.append(needed)
    return step


def estimator() -> Any:
    """scikit-learn's estimate of a covariance. Raises ImportError naming the extra that brings it."""
    try:
        from sklearn.covariance import LedoitWolf
    except ImportError as error:
        raise ImportError("distances to keys need scikit-learn: pip install 'sparseattn[inspect]'") from error
    return LedoitWolf


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole, 1.0)
