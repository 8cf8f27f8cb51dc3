"""The metric of the queries: a linear map of keys after which plain distances weigh errors as the queries do.

For queries with the second moment C, an error e of a key changes a logit by `q'e`, on average over the queries by
`e'Ce`. A2ATS weighs codes like this, https://arxiv.org/abs/2502.12665. The rotation behind it balances the parts'
variances, the parametric form of OPQ, https://doi.org/10.1109/TPAMI.2013.240.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.kernels.product_kmeans.dispatch import product_codebooks
from sparseattn.selectors.parameters.additive_books import additive_books

ASKED = 64  # queries of the prompt's end that say which keys are reached
RIDGE = 1e-3  # of the mean eigenvalue, added to every one: directions that no query of the sample has stay finite


def metric_of(queries: Iterable[Tensor]) -> Tensor:
    """Return `[H,D,D]` float64, the mean of `q q'` over queries `[G,m,D]` of each KV head's group, and the ridge.

    Sums are float32: their rounding is far below the ridge, and decompositions alone need more. A KV head's queries are
    widened at a time, as those of all take as long to write as to multiply.
    """
    moments = []
    for of_head in queries:
        flat = of_head.flatten(0, 1).float()
        moments.append((flat.mT @ flat).double() / max(len(flat), 1))
    moment = torch.stack(moments)
    mean = moment.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
    identity = torch.eye(moment.shape[2], dtype=moment.dtype, device=moment.device)
    return moment + RIDGE * mean[:, None, None] * identity


def balanced(keys: Tensor, metric: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Return the maps of keys and of queries, whose results have the products that keys and queries have.

    Args:
        keys: `[H,n,D]` float32, less their mean.
        metric: `[H,D,D]` float64, symmetric and positive definite.
        parts: S, a divisor of D.

    Returns:
        two of `[H,D,D]` float32, A of keys and `A^-T` of queries. Of the mapped keys' variances every D / S consecutive
        ones have nearly the same product.
    """
    lengths, axes = torch.linalg.eigh(metric)
    root = lengths.sqrt()[:, :, None]
    forth, back = axes.mT * root, axes.mT / root
    turned = keys @ forth.to(keys.dtype).mT
    variances, directions = torch.linalg.eigh((turned.mT @ turned).double() / max(keys.shape[1], 1))
    order = torch.stack([dealt(of_head, parts) for of_head in variances])
    rotation = directions.gather(2, order[:, None].expand_as(directions)).mT
    return (rotation @ forth).float(), (rotation @ back).float()


def dealt(variances: Tensor, parts: int) -> Tensor:
    """Return `[D]` int64, the directions in the order of the parts that they are dealt to.

    The largest variance first, each goes to the part that has room and the smallest product so far.
    """
    size = len(variances)
    logarithms = variances.clamp(min=torch.finfo(variances.dtype).tiny).log()
    logs: list[float] = (
        logarithms - logarithms.min()
    ).tolist()  # none below zero: one more never makes a product smaller
    dealt_to: list[list[int]] = [[] for _ in range(parts)]
    product = [0.0] * parts
    for i in sorted(range(size), key=lambda i: -logs[i]):
        part = min((p for p in range(parts) if len(dealt_to[p]) < size // parts), key=product.__getitem__)
        dealt_to[part].append(i)
        product[part] += logs[i]
    return torch.tensor([i for part in dealt_to for i in part], device=variances.device)


def unit_metric(keys: Tensor) -> Tensor:
    """Return `[H,D,D]` float64, the metric of keys `[H,n,D]` themselves."""
    return torch.eye(keys.shape[2], dtype=torch.double, device=keys.device).expand(len(keys), -1, -1)


def reached(queries: Tensor, at: Tensor, keys: Tensor, places: Tensor, temperature: float = 1.0) -> Tensor:
    """Return what queries of the prompt's end pay to each key, on average 1: `[H,n]` float32.

    Args:
        queries: `[H,G,m,D]`, of which at most 64 of the last quarter are asked.
        at: `[m]` int64, their positions, rising.
        keys: `[H,n,D]` float32, among which a query's attention is shared out.
        places: `[n]` int64, their positions.
        temperature: that the queries are divided by.
    """
    count = len(at)
    first = count - max(count // 4, 1)
    sample = torch.linspace(first, count - 1, min(ASKED, count - first), device=at.device).long()
    asked = queries[:, :, sample].flatten(1, 2).to(keys.dtype) / temperature
    hidden = (places > at[sample, None]).repeat(queries.shape[1], 1)  # [G*q,n]
    means = []
    for query, key in zip(asked, keys, strict=True):  # a head's products are few enough to stay in a processor's cache
        logits = (query @ key.mT).masked_fill_(hidden, -torch.inf)
        means.append(logits.softmax(1).nan_to_num_(0.0).mean(0))
    weights = torch.stack(means)
    return weights / weights.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def moves_ahead(at: Tensor, first: int, ahead: int, draw: torch.Generator) -> Tensor:
    """Return `[n]` int64, by how many positions keys or queries at `at` are moved (`Rope.turn`): about half of them to
    positions to come.

    What a model says later resembles what it said before, but for RoPE: so these stand for keys and queries that a
    sequence does not have yet. Each is moved as a whole, and its part that RoPE does not turn stays.

    Args:
        at: `[n]` int64.
        first: the first position to come.
        ahead: T; half of those that are moved lie within the next T / 4 positions, all within T.
        draw: says which are moved, and how far.
    """
    moved, far = torch.rand(2, len(at), generator=draw).to(at.device)
    to = first + (far.square() * ahead).long()
    return torch.where(moved < 0.5, to - at, 0)


def codes_of(
    keys: Tensor,
    queries: Iterable[Tensor] | None,
    weights: Tensor | None,
    parts: int,
    bits: int,
    seed: int,
    additive: bool = False,
) -> dict[str, Tensor]:
    """Return what keys are coded by, float32: centre `[H,D]`, turn `[H,D,D]` of keys less that, back `[H,D,D]` of
    queries, and centroids `[H,S,2^bits,d]` of turned keys, d = D / S, or D of sums.

    Args:
        keys: `[H,n,D]` float32, a sample.
        queries: `[G,m,D]` of each KV head, whose second moment is the metric; None: keys are centred and rotated only.
        weights: `[H,n]` float32, what a key counts for in the mean of its centroid; None: 1.
        parts: S.
        bits: of a name.
        seed: of the first centroids.
        additive: whether a key is a sum of S centroids, each of all channels.
    """
    centre = keys.mean(1)
    centred = keys - centre[:, None]
    metric = unit_metric(keys) if queries is None else metric_of(queries)
    turn, back = balanced(centred, metric, 1 if additive else parts)
    learn = additive_books if additive else product_codebooks
    books = learn(centred @ turn.mT, parts, bits, seed, weights)
    return {"centre": centre, "turn": turn, "back": back, "centroids": books}


def as_coded(turned: Tensor, books: Tensor) -> Tensor:
    """Return turned keys `[H,n,D]` as their codes have them: the nearest centroids of `books` `[H,S,K,d]`."""
    return codebooks.decoded(codebooks.nearest(turned.detach()[None], books.detach()[None])[0], books)


def share_kept(keys: Tensor, coded: Tensor, codes: dict[str, Tensor]) -> Tensor:
    """Return `[H]`, the share of the logits' variance among keys `[H,n,D]` that their codes keep, over the queries of
    the metric: that of the turned keys' variance.

    Args:
        coded: `[H,n,D]`, the keys, or what is left of them where codes leave out what a query adds again.
        codes: see `codes_of`.
    """
    turned = (coded - codes["centre"][:, None]) @ codes["turn"].mT
    lost = (turned - as_coded(turned, codes["centroids"])).square().sum((1, 2))
    all_there_is = ((keys - keys.mean(1, keepdim=True)) @ codes["turn"].mT).square().sum((1, 2))
    return torch.where(all_there_is > 0, 1 - lost / all_there_is, 1.0)  # one key, or keys that are all alike
