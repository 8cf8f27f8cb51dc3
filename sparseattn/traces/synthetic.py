"""Synthetic traces that behave like attention: queries look where keys vary least.

The recipe, per KV head. A key is `U diag(sqrt(spectrum)) z`: an eigenbasis U, a power-law spectrum 1/i, and whitened
coordinates z that are two independent mixtures of `clusters` Gaussians, one over the high-variance half of the
directions and one over the low. A query aims at one earlier key and takes its coordinates, re-weighted by
`spectrum ** -gap`: `q = U diag(spectrum ** -gap) z`. So its score is a sum of `spectrum ** (0.5 - gap) * z * z'`, which
at `gap = -0.5` is the product of two keys and at larger gaps lives ever more in the low half, while an index that
clusters keys, or links them to their neighbours, sees the high half. That real queries lie off the distribution of the
keys is the finding of RetrievalAttention, https://arxiv.org/abs/2409.10516.

Measured at 131,072 keys, one head, the defaults (gap 0.26, 512 clusters, spread 0.28, no RoPE), the keys beyond the
sinks, seeds 0 to 2, 256 queries at the end, k-means by faiss 1.15 over all keys (512 spherical lists, inner product):

                                                        D = 64, seeds 0-2      D = 128, seeds 0-2
    IVF, keys scanned for recall 0.95, queries to keys  32, 28, 29 % (mean 30) 29, 20, 28 % (mean 25)
    IVF, keys scanned for recall 0.95, keys to keys     6.1, 7.3, 6.0 %        5.0, 4.0, 5.3 %
    HNSW, recall at 20 % scanned, queries to keys       0.71, 0.72, 0.78       0.75, 0.82 (seeds 0, 1)
    HNSW, recall at 42-47 % scanned, queries to keys    0.75, 0.76, 0.82       0.78, 0.85

Recall is recall@100; HNSW has M = 32 and efConstruction = 200, and never arrives at 0.95.

The spectrum's exponent (1) and `spread` come from a sweep for these figures: with `i ** -0.5` keys to keys take 7 % at
spread 0.3, but queries at gap 0.26 take 38 %; with `i ** -1.5` keys to keys take 13 %. Left out: real attention also
looks at recent tokens, and its keys have a large mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.utils.hashing import stream
from sparseattn.utils.tensors import STORED

BLOCK = 2**22  # scores held at once while sink shares are set, 16 MiB in float32


def synthetic(
    tokens: int,
    heads: int = 1,
    group: int = 1,
    size: int = 64,
    *,
    layers: int = 1,
    clusters: int = 512,
    gap: float = 0.26,
    spread: float = 0.28,
    sinks: int = 4,
    sink_share: float = 0.3,
    concentration: float = 0.9,
    rope: bool | float = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    queries: int | None = None,
) -> Trace:
    """Return a synthetic trace in memory, of any length and number of heads; equal arguments give equal traces.

    Keys, values and the keys aimed at do not change when `tokens`, `heads` or `layers` grow; queries keep their
    direction but for the sinks' part.

    Args:
        tokens: T.
        heads: H.
        group: G; every query head of a group aims at keys of its own.
        size: D, even and at least 8. With sinks, two dimensions serve them and the recipe has D - 2.
        layers: independent layers.
        clusters: Gaussians of each of the two mixtures.
        gap: how far queries look away from the directions in which keys vary; -0.5 for queries like keys.
        spread: share of a whitened coordinate's variance that lies within a cluster, 0 to 1.
        sinks: the first keys, which have small values and draw a constant share of every query's attention.
        sink_share: that share, 0 to 1 exclusive, exact before rounding to `dtype`.
        concentration: share of the mass beyond the sinks that the best 1 % of the rows hold, in the mean over the last
            64 queries of a head; sets how large queries are.
        rope: rotate queries and keys (not the sinks' two dimensions); a number is theta, True is 10,000.
        seed: any integer.
        dtype: of queries, keys and values; float32, float16 or bfloat16.
        queries: make queries for the last tokens alone (all by default): `query` is `[H,G,Q,D]`. Time grows as tokens
            x queries: 1 s per query head for all of 8,192 tokens, 3 s for the last 256 of 131,072, on two busy cores.

    Raises:
        ValueError: an argument out of its range.
    """
    queries = tokens if queries is None else queries
    _check_sizes(tokens, heads, group, size, layers, clusters, sinks, dtype, queries)
    _check_recipe(gap, spread, sink_share, concentration, rope)
    positions = torch.arange(tokens)
    content = size - 2 if sinks else size
    turn = Rope.of(content, 10000.0 if rope is True else float(rope)) if rope else None
    made = []
    for layer in range(layers):
        query = torch.empty(heads, group, queries, size, dtype=dtype)
        keys = torch.empty(heads, tokens, size, dtype=dtype)
        values = torch.empty(heads, tokens, size, dtype=dtype)
        for head in range(heads):
            place = (seed, layer, head)
            spectrum = _spectrum(content)
            basis = torch.linalg.qr(_normal(content, content, *place, "basis")).Q
            z = _whitened(tokens, content, clusters, spread, place)
            key = torch.zeros(tokens, size)
            key[:, :content] = (z * spectrum.sqrt()) @ basis.T
            key[:sinks] = 0.0
            if turn is not None:
                key = turn.rotate(key, positions)
            key[:sinks, -1] = size**0.5
            value = _normal(tokens, size, *place, "values")
            value[:sinks] *= 0.01
            keys[head], values[head] = key, value
            for member in range(group):
                aim = _aims(tokens, sinks, (*place, member))[-queries:]
                q = torch.zeros(queries, size)
                q[:, :content] = (z[aim] * spectrum**-gap) @ basis.T
                if turn is not None:
                    q = turn.rotate(q, positions[-queries:])
                q *= _size(q, key, sinks, concentration)
                if sinks:
                    q[:, -1] = _sink_logit(q, key, sinks, sink_share)
                query[head, member] = q
        made.append(TraceLayer(layer, query, keys, values, size**-0.5, turn))
    recipe = {
        "heads": heads,
        "group": group,
        "size": size,
        "clusters": clusters,
        "gap": gap,
        "spread": spread,
        "sinks": sinks,
        "sink_share": sink_share,
        "concentration": concentration,
        "rope": rope,
        "seed": seed,
    }
    return Trace.build(made, positions, {"model": "synthetic", "recipe": recipe}, f"synthetic-{tokens}")


def _spectrum(size: int) -> Tensor:
    """`[D]` variances 1/i of the keys' eigen-directions, scaled to mean 1."""
    spectrum = 1.0 / torch.arange(1, size + 1, dtype=torch.float32)
    return spectrum * (size / spectrum.sum())


def _whitened(tokens: int, size: int, clusters: int, spread: float, place: tuple[int, ...]) -> Tensor:
    """`[T,D]` whitened coordinates, a mixture over each half of the directions."""
    halves = []
    for name, width in (("high", size // 2), ("low", size - size // 2)):
        centers = _normal(clusters, width, *place, name, "centers")
        member = (_uniform(tokens, *place, name, "members") * clusters).long().clamp(max=clusters - 1)
        noise = _normal(tokens, width, *place, name, "noise")
        halves.append(centers[member] * (1 - spread) ** 0.5 + noise * spread**0.5)
    return torch.cat(halves, -1)


def _aims(tokens: int, sinks: int, place: tuple[int, ...]) -> Tensor:
    """`[T]` the key that each token's query aims at: any earlier one or its own, no sink but for want of others."""
    token = torch.arange(tokens)
    choices = (token - sinks + 1).clamp(min=1)
    aim = sinks + (_uniform(tokens, *place, "aims").double() * choices).long().minimum(choices - 1)
    return aim.minimum(token)


def _size(query: Tensor, keys: Tensor, sinks: int, concentration: float) -> float:
    """Return the factor on queries at which the best 1 % of the rows hold `concentration` of the mass beyond the
    sinks."""
    logits = _logits(query[-64:], keys, sinks)  # [n,N]
    rows = (logits > -torch.inf).sum(-1)
    logits = logits[rows > 0].sort(-1, descending=True).values
    best = torch.arange(logits.shape[-1]) < (rows[rows > 0, None] / 100).ceil()
    if not best.numel():
        return 1.0
    low, high = -10.0, 10.0  # exponents of two; the share grows with the factor
    for _ in range(16):
        middle = (low + high) / 2
        share = (logits * 2.0**middle).softmax(-1).mul(best).sum(-1).mean().item()
        low, high = (middle, high) if share < concentration else (low, middle)
    return float(2.0**high)


def _sink_logit(query: Tensor, keys: Tensor, sinks: int, share: float) -> Tensor:
    """`[Q]` what each sink's logit must be for all of them to hold `share` of the attention.

    A sink is `sqrt(D)` in the last dimension and 0 elsewhere, so under the scale `1 / sqrt(D)` the query's last
    dimension is that logit.
    """
    step = max(1, BLOCK // len(keys))
    parts: list[Tensor] = []
    end = len(keys) - len(query)
    for block in query.split(step):
        end += len(block)  # later keys are out of this block's sight
        parts.append(torch.logsumexp(_logits(block, keys[:end], sinks), -1))
    rest = torch.cat(parts)
    odds = share / (1 - share) / sinks
    return torch.where(rest.isinf(), 0.0, rest + torch.tensor(odds).log())


def _logits(query: Tensor, keys: Tensor, sinks: int) -> Tensor:
    """`[n,N]` causal logits of the last n tokens' queries on the keys beyond the sinks."""
    logits = (query * keys.shape[-1] ** -0.5) @ keys[sinks:].T
    row, token = torch.arange(sinks, len(keys)), torch.arange(len(keys) - len(query), len(keys))
    return logits.masked_fill_(row > token[:, None], -torch.inf)


def _normal(rows: int, width: int, *place: int | str) -> Tensor:
    # torch draws normals sixteen at a time and redraws the last ones of any other number: with rows drawn by sixteen,
    # a longer tensor begins with the shorter one.
    return torch.randn(rows + -rows % 16, width, generator=stream(*place))[:rows]


def _uniform(rows: int, *place: int | str) -> Tensor:
    return torch.rand(rows + -rows % 16, generator=stream(*place))[:rows]


def _check_sizes(
    tokens: int,
    heads: int,
    group: int,
    size: int,
    layers: int,
    clusters: int,
    sinks: int,
    dtype: torch.dtype,
    queries: int,
) -> None:
    for name, number in {
        "tokens": tokens,
        "heads": heads,
        "group": group,
        "layers": layers,
        "clusters": clusters,
    }.items():
        if number < 1:
            raise ValueError(f"{name} is at least 1, got {number}")
    if size < 8 or size % 2:
        raise ValueError(f"size is even and at least 8, got {size}")
    if not 0 <= sinks < tokens:
        raise ValueError(f"sinks is between 0 and tokens - 1 ({tokens - 1}), got {sinks}")
    if not 1 <= queries <= tokens:
        raise ValueError(f"queries is between 1 and tokens ({tokens}), got {queries}")
    if dtype not in STORED.values():
        raise ValueError(f"dtype is float32, float16 or bfloat16, got {dtype}")


def _check_recipe(gap: float, spread: float, sink_share: float, concentration: float, rope: bool | float) -> None:
    if not math.isfinite(gap):
        raise ValueError(f"gap is a finite number, got {gap}")
    if not 0 <= spread <= 1:
        raise ValueError(f"spread is a share of variance, 0 to 1, got {spread}")
    for name, share in {"sink_share": sink_share, "concentration": concentration}.items():
        if not 0 < share < 1:
            raise ValueError(f"{name} lies between 0 and 1, got {share}")
    if rope is not False and not 0 < rope < math.inf:
        raise ValueError(f"rope is True, False or a positive finite theta, got {rope}")
