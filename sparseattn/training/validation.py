"""What classifiers are measured by: the far mass of held-out tokens that buckets in their order recover.

Saap, https://arxiv.org/abs/2502.08246. Letters: H KV heads, G query heads per KV head, V held-out tokens, T tokens, D
head size, C buckets, S shares of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.selectors.parameters.saap_partition import Classifier
from sparseattn.training.kmeans import assign, at_once, by_bucket
from sparseattn.training.prompts import HeadView, Prompts, TracedPrompt, load, quota
from sparseattn.training.recipe import Filters, Recipe, bucket_stream

HELD_TOKENS = 512  # held-out tokens that a head is validated on, over all held-out prompts


@dataclass(frozen=True, eq=False)
class Held:
    """What decoding some held-out tokens of one prompt would look for, for one KV head.

    Attributes:
        queries: `[G,V,D]` float32 inputs.
        mass: `[G,V,C]` shares of the attention to far rows, by bucket.
        sizes: `[V,C]` far rows by bucket.
        rows: `[V,S]` rows that a budget of each share of the context is.
        far: `[G,V]` share of all attention that far rows have.
        exact: `[G,V,S]` share of the attention to far rows that the heaviest of them have, as many as the budget.
    """

    queries: Tensor
    mass: Tensor
    sizes: Tensor
    rows: Tensor
    far: Tensor
    exact: Tensor


def held_tokens(prompt: TracedPrompt, queries: int, filters: Filters, limit: int, generator: torch.Generator) -> Tensor:
    """Up to `limit` rows of the prompt's `queries` last tokens, of the later half of those that have far keys."""
    at = prompt.trace.positions[-queries:]
    usable = (at - prompt.trace.positions[filters.sink] > filters.gap).nonzero().flatten()
    usable = usable[len(usable) // 2 :]
    return usable[torch.randperm(len(usable), generator=generator)[:limit]].sort().values


def held(
    view: HeadView, rows: Tensor, assigned: Tensor, buckets: int, filters: Filters, shares: Sequence[float]
) -> Held:
    """Measure held-out tokens with the pairs of decoding: only far keys before the query.

    Args:
        rows: `[V]` of the view's query.
        shares: budgets as shares of the context.
    """
    device = view.keys.device
    group = view.query.shape[0]
    signed = Filters(filters.gap, filters.near, filters.sink)
    positions, all_at = view.positions, view.query_positions
    parts = []
    for some in rows.split(max(1, at_once(device, len(positions)) // group)):
        at = all_at[some.to(device)]
        member = torch.arange(group).repeat_interleave(len(some))
        roped, inputs = view.queries(member, some.repeat(group))
        far = signed.far(at, positions)  # [v,T]
        scores = ((roped * view.scale) @ view.keys.T).unflatten(0, (group, -1))  # [G,v,T]
        weights = scores.masked_fill(positions > at[:, None], -torch.inf).softmax(-1)
        share = (weights * far).sum(-1)  # [G,v]
        # Of far rows alone, so that shares are exact where far rows have next to nothing.
        weights = scores.masked_fill(~far, -torch.inf).softmax(-1)
        mass = by_bucket(weights, assigned, buckets)
        sizes = by_bucket(far.float(), assigned, buckets)
        context = (positions <= at[:, None]).sum(-1)
        budget = torch.stack([(context * s).floor().clamp(min=1) for s in shares], -1)  # [v,S]
        top = weights.topk(min(int(budget.max()), len(positions)), dim=-1).values.cumsum(-1)
        exact = top.gather(-1, (budget.long() - 1).clamp(max=top.shape[-1] - 1).expand(group, -1, -1))
        parts.append((inputs.unflatten(0, (group, -1)), mass, sizes, budget, share, exact))
    columns = list(zip(*parts, strict=True))
    dims = (1, 1, 0, 0, 1, 1)
    return Held(*(torch.cat(column, dim) for column, dim in zip(columns, dims, strict=True)))


def held_of(
    prompts: Prompts, index: int, heads: Sequence[int], centroids: Tensor, recipe: Recipe, device: torch.device
) -> Held:
    """Return the held-out tokens of `heads`, of all held-out prompts, with the heads in front (`rows`: the same for
    all)."""
    limit = quota(HELD_TOKENS, len(prompts.held_out))
    shape = prompts.shapes[index]
    parts: list[list[Held]] = [[] for _ in heads]
    for prompt in prompts.held_out:
        queries = prompt.trace.shapes[index].queries or prompt.tokens
        generator = bucket_stream(recipe.seed, index, "held-out", prompt.sha256)
        rows = held_tokens(prompt, queries, recipe.filters, limit, generator)
        for i, (_, view) in enumerate(load(prompts, prompt, index, heads, recipe.roped, device)):
            assigned = assign(view.inputs, centroids[i])
            parts[i].append(held(view, rows, assigned, centroids.shape[1], recipe.filters, recipe.shares))
    assert shape.group == parts[0][0].queries.shape[0]

    def joined(name: str, dim: int) -> Tensor:
        return torch.stack([torch.cat([getattr(part, name) for part in of_head], dim) for of_head in parts])

    return Held(
        queries=joined("queries", 1),
        mass=joined("mass", 1),
        sizes=joined("sizes", 0),
        rows=joined("rows", 0)[0],
        far=joined("far", 1),
        exact=joined("exact", 1),
    )


def classifier_scores(classifier: Classifier, queries: Tensor) -> Tensor:
    """`[H,V,C]` the sum over the group of each query's probabilities, for queries `[H,G,V,D]`; eq. 2."""
    heads, group, tokens, _ = queries.shape
    width = len(classifier.w1) // heads  # classifiers to a head: 1 or G
    logits = classifier.logits(queries.reshape(heads * width, group // width * tokens, -1))
    return logits.softmax(-1).view(heads, group, tokens, -1).sum(1)


def symmetric_scores(queries: Tensor, centroids: Tensor, scale: float) -> Tensor:
    """`[H,V,C]` the same of symmetric k-means: softmax of `scale * <q,c>`, summed over the group."""
    return (scale * queries @ centroids[:, None].mT).softmax(-1).sum(1)


def recovered(scores: Tensor, held_out: Held) -> Tensor:
    """Return `[H,G,V,S]`, the share of attention to far rows in buckets visited in the order of `scores` `[H,V,C]`.

    The bucket in which the budget ends counts in proportion to its rows within it.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    sizes = held_out.sizes.gather(-1, order)  # [H,V,C]
    before = sizes.cumsum(-1) - sizes
    mass = held_out.mass.gather(-1, order[:, None].expand_as(held_out.mass))
    out = []
    for s in range(held_out.rows.shape[-1]):
        part = ((held_out.rows[:, s, None] - before) / sizes.clamp(min=1)).clamp(0, 1)  # [H,V,C]
        out.append((mass * part[:, None]).sum(-1))
    return torch.stack(out, -1)
