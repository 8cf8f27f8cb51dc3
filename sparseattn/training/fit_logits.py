"""Fits scale and offset of a selector's estimates to what full attention weighs, on the last tokens of traces.

Maximum likelihood of the true weights under the estimated ones, over what a selector weighs (rows or pages) and one
further class, the rows that every query reads. At the maximum the mean promised mass of these is the mean that they
hold: two equations for two numbers, and convex, so that Newton's steps find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.context import LayerContext
from sparseattn.evaluation.replay import append_rows
from sparseattn.evaluation.replay_settings import Replay, check_replay, usable_layers
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.base import Selector
from sparseattn.selectors.parameters.logit_fit import Estimates
from sparseattn.selectors.registry import as_selector
from sparseattn.traces.trace import Trace

BEGIN = (2.0, 1.0, 0.5, 0.25, 0.1, 0.03)  # scales: far from the best, bounds of logits leave no slope to go by
STEPS = 50  # of Newton, at most
ENOUGH = 1e-5  # of a gradient, in nats
LEAST, LARGEST = 1e-3, 1e3  # scales
TINY = 1e-9  # of a share, so that it has a logarithm


def fit(
    traces: Sequence[Trace],
    selector: Selector | str,
    *,
    sink: int = 4,
    window: int = 64,
    last: int = 32,
    layers: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Estimates:
    """Return a scale and an offset for every layer and query head.

    Args:
        traces: of one model.
        selector: a selector that estimates mass, or its name.
        sink, window: as in later use; the weight of these rows is known exactly.
        last: number of last tokens of each trace to replay.
        layers: by default all that attend to the whole context.
        progress: called with 1 after every token of a layer.

    Raises:
        ValueError: no trace, traces of several models, a selector that does not estimate, or what `evaluate` refuses.
    """
    made = as_selector(selector)
    if not made.estimates:
        raise ValueError(f"{made} does not estimate what its rows weigh, so there is nothing to fit")
    models = {str(trace.meta.get("model")) for trace in traces}
    if len(models) != 1:
        raise ValueError(f"estimates are fitted on one trace or more of one model, got {', '.join(models) or 'none'}")
    indices = usable_layers(traces[0], layers)
    for trace in traces:
        check_replay(trace, [None], made, Replay(sink, window, last, usable_layers(trace, indices)))
    fits = {}
    for index in indices:
        seen = [_seen(trace, made, index, sink, window, last, progress) for trace in traces]
        shape = traces[0].shapes[index]
        pairs = [_newton([[part[head] for part in step] for step in seen]) for head in range(shape.heads * shape.group)]
        scale, offset = torch.tensor(pairs, dtype=torch.float32).T.reshape(2, shape.heads, shape.group)
        fits[index] = (scale.contiguous(), offset.contiguous())
    meta = {
        "model": models.pop(),
        "traces": [{"name": trace.name, "tokens": trace.tokens} for trace in traces],
        "sink": sink,
        "window": window,
        "last": last,
    }
    return Estimates(repr(made), fits, meta)


def _seen(
    trace: Trace, selector: Selector, index: int, sink: int, window: int, last: int, progress: Callable[[int], None]
) -> list[Tensor]:
    """Of each decoded token: estimates of slots and logarithms of their rows `[H*G,T,S+1]`, and true weights, padded;
    the last class is what every query reads."""
    trace.verify(index)
    layer = trace.layer(index)
    mine = selector.for_layer(LayerContext(index, trace.depth, rope=layer.rope, scale=layer.scale))
    assert isinstance(mine, EstimatesMass)  # `fit` refuses others
    cache = KVCache(mine, sink=sink, window=window, seal=mine.unit, check=True)
    positions = trace.positions
    append_rows(cache, layer, positions, 0, trace.tokens - last)
    steps = []
    for t in range(trace.tokens - last, trace.tokens):
        append_rows(cache, layer, positions, t, t + 1)
        query = layer.query[None, :, :, t - trace.tokens].float()
        allowed = cache.prepare(query, None)
        weighed = mine.weigh(query, cache.search.step(), allowed.rows)
        heads, group = query.shape[1:3]
        chosen, logits = weighed.selection, (query @ cache.keys.mT * layer.scale).flatten(1, 2)[0]  # [H*G,N]
        at, first = cache.bounds, cache.bounds.base
        far = logits[:, first : int(at.sealed[0])]
        rows = chosen.rows.view(1, *chosen.start.shape[1:], chosen.span)  # [1,Hs,S,span]
        rows = rows.repeat_interleave(heads * group // rows.shape[1], 1)[0]
        true = far.gather(1, rows.clamp(min=0).flatten(1)).view(rows.shape).masked_fill(rows < 0, -torch.inf)
        unsealed = cache.search.unsealed_lse(query).flatten()[:, None]
        size = chosen.length.repeat_interleave(heads * group // chosen.length.shape[1], 1)[0].float().log()
        weights = torch.cat([true.logsumexp(-1), unsealed], 1).softmax(-1)
        steps.append((torch.cat([weighed.weights[0] - size, unsealed], 1), torch.cat([size, unsealed * 0], 1), weights))
        progress(1)
    most = max(step[0].shape[1] for step in steps)
    filler = (0.0, -torch.inf, 0.0)  # of the slots that shorter contexts lack: they weigh nothing
    return [torch.stack([_padded(step[i], most, filler[i]) for step in steps], 1).double() for i in range(3)]


def _padded(part: Tensor, classes: int, value: float) -> Tensor:
    """With as many slots as `classes` less one, the last class in its place."""
    lacking = classes - part.shape[1]
    slots = torch.nn.functional.pad(part[:, :-1], (0, lacking), value=value)
    return torch.cat([slots, part[:, -1:]], 1)


def _newton(traces: Sequence[Sequence[Tensor]]) -> tuple[float, float]:
    """Scale and offset of one head, from estimates, sizes and weights `[T,S+1]` of each trace."""
    parameters = min((_began(traces, scale) for scale in BEGIN), key=lambda start: _loss(traces, start))
    value = _loss(traces, parameters)
    for _ in range(STEPS):
        gradient, curve = _slope(traces, parameters)
        if float(gradient.abs().max()) < ENOUGH:
            break
        step = torch.linalg.solve(curve + 1e-9 * torch.eye(2, dtype=torch.float64), gradient)
        size = 1.0
        while size > 1e-6:  # a step that does not help is halved
            tried = parameters - size * step
            tried[0] = tried[0].clamp(LEAST, LARGEST)
            if (new := _loss(traces, tried)) <= value:
                break
            size /= 2
        if size <= 1e-6:
            break
        parameters, value = tried, new
    return float(parameters[0]), float(parameters[1])


def _began(traces: Sequence[Sequence[Tensor]], scale: float) -> Tensor:
    """Return this scale, with the offset by which the slots weigh what they truly do, in the mean of logarithms."""
    lacking = []
    for estimates, sizes, weights in traces:
        unsealed = weights[:, -1].clamp(TINY, 1 - TINY)
        spoken = _logits(estimates, sizes, torch.tensor([scale, 0.0], dtype=torch.float64))
        lacking.append((1 - unsealed).log() - unsealed.log() + spoken[:, -1] - spoken[:, :-1].logsumexp(-1))
    return torch.tensor([scale, float(torch.cat(lacking).mean())], dtype=torch.float64)


def _logits(estimates: Tensor, sizes: Tensor, parameters: Tensor) -> Tensor:
    """`[T,S+1]`: the last class, what every query reads, stays as it is."""
    slots = torch.where(sizes[:, :-1].isneginf(), -torch.inf, parameters[0] * estimates[:, :-1] + parameters[1])
    return torch.cat([slots + sizes[:, :-1].clamp(min=0), estimates[:, -1:]], 1)


def _loss(traces: Sequence[Sequence[Tensor]], parameters: Tensor) -> float:
    total = 0.0
    for estimates, sizes, weights in traces:
        spoken = _logits(estimates, sizes, parameters).log_softmax(-1)
        total -= float(torch.where(weights > 0, weights * spoken, 0.0).sum())
    return total


def _slope(traces: Sequence[Sequence[Tensor]], parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient `[2]` and second derivatives `[2,2]` of the loss."""
    gradient, curve = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for estimates, sizes, weights in traces:
        share = _logits(estimates, sizes, parameters).softmax(-1)
        known = torch.where(sizes.isneginf(), 0.0, estimates)
        known[:, -1] = 0
        ones = torch.ones_like(known)
        ones[:, -1] = 0
        features = torch.stack([known, ones], -1)  # [T,S+1,2]
        mean = (share[..., None] * features).sum(1)  # [T,2]
        gradient += (mean - (weights[..., None] * features).sum(1)).sum(0)
        curve += torch.einsum("ts,tsi,tsj->ij", share, features, features) - mean.T @ mean
    return gradient, curve
