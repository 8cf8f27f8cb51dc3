"""What training learns from: samples of keys, and queries with the buckets in which their attention lies.

Saap, https://arxiv.org/abs/2502.08246, section 4.2. Letters: T tokens, D head size, C buckets, A classifiers of a layer
(H, or H*G), P rows of a classifier's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.training.kmeans import assign, at_once, by_bucket
from sparseattn.training.partial import Progress
from sparseattn.training.prompts import LEAST, HeadView, Prompts, load, quota
from sparseattn.training.recipe import Filters, Recipe, TrainingError, bucket_stream

CANDIDATES = 4  # queries looked at for one that passes, before those that come nearest are taken


def sample_keys(view: HeadView, sink: int, limit: int, generator: torch.Generator) -> Tensor:
    """Return `[n,D]`, up to `limit` of the head's keys (as inputs) beyond the sink, drawn without replacement."""
    rows = torch.randperm(len(view.inputs) - sink, generator=generator)[:limit] + sink
    return view.inputs[rows.sort().values.to(view.inputs.device)]


@dataclass(frozen=True, eq=False)
class Examples:
    """Queries of one prompt for one classifier, and where their attention lies.

    Attributes:
        queries: `[n,D]` float32 inputs.
        target: `[n,C]` float32, A H_k: the share of each query's attention to the sampled far keys in each bucket.
        passed: how many of those looked at passed both filters.
        seen: how many were looked at.
    """

    queries: Tensor
    target: Tensor
    passed: int
    seen: int


def examples(
    view: HeadView,
    members: Sequence[int],
    assigned: Tensor,
    buckets: int,
    filters: Filters,
    limit: int,
    generator: torch.Generator,
    keys: int | None = None,
) -> Examples:
    """Return up to `limit` queries of the head's `members`, uniform over those that pass the filters, with targets.

    The paper draws new keys for each batch. Here a query's target is computed once, over all of its prompt's far keys
    or `keys` sampled ones: finding the best key takes these scores anyway, and there is no sampling noise. Where fewer
    than `LEAST` of the candidates pass (heads that look nearby), those whose best far key comes closest to their
    best near one are taken.

    Args:
        assigned: `[T]` the bucket of each key.
        buckets: C.
        generator: decides all draws.
    """
    positions, at, device = view.positions, view.query_positions, view.keys.device
    usable = _usable(view, filters)
    order = torch.randperm(len(usable) * len(members), generator=generator)[: CANDIDATES * limit]
    sampled = _sampled(view, filters, keys, generator)
    member_of = torch.tensor(members)

    def look(some: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = usable[some % len(usable)]
        roped, inputs = view.queries(member_of[some // len(usable)], rows)
        scores = (roped * view.scale) @ view.keys.T  # [n,T]
        row_at = at[rows.to(device)]
        far = filters.far(row_at, positions)
        return inputs, scores, row_at, far if sampled is None else far & sampled

    def targets(scores: Tensor, far: Tensor) -> Tensor:
        weights = scores.masked_fill(~far, -torch.inf).softmax(-1)
        return by_bucket(weights, assigned, buckets)

    parts = []
    passed = seen = 0
    for some in order.split(at_once(device, len(positions))):
        inputs, scores, row_at, far = look(some)
        best = scores.masked_fill(~filters.seen(row_at, positions), -torch.inf).argmax(-1)
        keep = (row_at - positions[best] >= filters.near) & far.any(-1)
        parts.append((inputs[keep], targets(scores[keep], far[keep])))
        passed += int(keep.sum())
        seen += len(some)
        if passed >= limit:
            break
    if passed < min(LEAST, limit):
        some = order[:1024]
        margins = []
        for block in some.split(at_once(device, len(positions))):
            _, scores, row_at, far = look(block)
            margin = _margin(scores, row_at, positions, filters)
            margins.append(margin.masked_fill(~far.any(-1), -torch.inf))
        margin = torch.cat(margins)
        nearest = margin.sort(descending=True, stable=True).indices[: min(LEAST, limit)]
        some = some[nearest[margin[nearest] > -torch.inf].cpu()]
        parts = []
        for block in some.split(at_once(device, len(positions))):
            inputs, scores, _, far = look(block)
            parts.append((inputs, targets(scores, far)))
    if not parts:
        empty = view.keys.new_zeros
        return Examples(empty(0, view.keys.shape[1]), empty(0, buckets), passed, seen)
    queries, target = (torch.cat(column)[:limit] for column in zip(*parts, strict=True))
    return Examples(queries, target, passed, seen)


def _usable(view: HeadView, filters: Filters) -> Tensor:
    """`[n]` on the CPU, which queries have keys beyond the gap."""
    reach = view.query_positions - view.positions[filters.sink] > filters.gap
    if filters.two_sided:
        reach |= view.positions[-1] - view.query_positions > filters.gap
    return reach.nonzero().flatten().cpu()


def _sampled(view: HeadView, filters: Filters, keys: int | None, generator: torch.Generator) -> Tensor | None:
    """`[T]` bool, `keys` of the keys behind the sink; None: there are no more, or all are to be."""
    behind = len(view.positions) - filters.sink
    if keys is None or keys >= behind:
        return None
    chosen = torch.randperm(behind, generator=generator)[:keys] + filters.sink
    sampled = torch.zeros(len(view.positions), dtype=torch.bool, device=view.keys.device)
    sampled[chosen.to(view.keys.device)] = True
    return sampled


def _margin(scores: Tensor, at: Tensor, positions: Tensor, filters: Filters) -> Tensor:
    """`[n]` by how much the best key at `near` or further beats the best nearer one; -inf without a further one."""
    seen = filters.seen(at, positions)
    nearer = at[:, None] - positions < filters.near
    best_far = scores.masked_fill(~seen | nearer, -torch.inf).amax(-1)
    best_near = scores.masked_fill(~seen | ~nearer, -torch.inf).amax(-1)
    return torch.where(best_far == -torch.inf, -torch.inf, best_far - best_near)


@dataclass(eq=False)
class Pool:
    """What the classifiers of some heads of a layer learn from; every prompt has its own stretch of each one's rows.

    Attributes:
        queries: `[A,P,D]` float32.
        target: `[A,P,C]` float16, 6e-8 and less being nothing; a batch's rows are brought to a sum of 1 again.
        entropy: `[A,P]` of the targets.
        ends: `[A,prompts+1]` where each prompt's rows end.
        passed: `[A]` share of the queries looked at that passed the filters.
    """

    queries: Tensor
    target: Tensor
    entropy: Tensor
    ends: list[list[int]]
    passed: list[float]

    def batch(self, places: Sequence[tuple[int | str, ...]], step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one prompt for each classifier, drawn by (place, step): `[A,n,D]`, targets `[A,n,C]`, entropy `[A,n]`."""
        rows = []
        for ends, place in zip(self.ends, places, strict=True):
            generator = bucket_stream(*place, "step", step)
            filled = [i for i in range(len(ends) - 1) if ends[i + 1] > ends[i]]
            prompt = filled[int(torch.randint(len(filled), (), generator=generator))]
            rows.append(torch.randint(ends[prompt], ends[prompt + 1], (size,), generator=generator))
        device = self.queries.device
        chosen = torch.arange(len(rows), device=device)[:, None], torch.stack(rows).to(device)  # [A,1], [A,n]
        target = self.target[chosen].float()
        return self.queries[chosen], target / target.sum(-1, keepdim=True), self.entropy[chosen]


def pool_of(
    prompts: Prompts,
    index: int,
    heads: Sequence[int],
    centroids: Tensor,
    recipe: Recipe,
    device: torch.device,
    progress: Callable[[Progress], None],
) -> Pool:
    """Return the training queries of `heads` and their targets, with one prompt in memory at a time."""
    group = prompts.shapes[index].group
    buckets, size = centroids.shape[1:]
    limit = quota(recipe.queries, len(prompts.train))
    units = [(head, members) for head in heads for members in members_of(group, recipe.per_query_head)]
    rows = limit * len(prompts.train)
    queries = torch.zeros(len(units), rows, size, device=device)
    target = torch.zeros(len(units), rows, buckets, dtype=torch.float16, device=device)
    entropy = torch.zeros(len(units), rows, device=device)
    ends = [[0] for _ in units]
    passed, seen = [0] * len(units), [0] * len(units)
    for done, prompt in enumerate(prompts.train):
        progress(Progress(index, "targets", done, len(prompts.train)))
        for head, view in load(prompts, prompt, index, heads, recipe.roped, device):
            assigned = assign(view.inputs, centroids[heads.index(head)])
            for a, (of, members) in enumerate(units):
                if of != head:
                    continue
                generator = bucket_stream(recipe.seed, index, *place_of(head, members), "queries", prompt.sha256)
                got = examples(view, members, assigned, buckets, recipe.filters, limit, generator, recipe.keys)
                at = ends[a][-1]
                ends[a].append(at + len(got.queries))
                queries[a, at : ends[a][-1]] = got.queries
                target[a, at : ends[a][-1]] = got.target.half()
                entropy[a, at : ends[a][-1]] = torch.special.entr(got.target).sum(-1)
                passed[a] += got.passed
                seen[a] += got.seen
    for a, (head, _) in enumerate(units):
        if not ends[a][-1]:
            raise TrainingError(f"layer {index}, head {head}: the filters leave no query of any prompt to train on")
    return Pool(queries, target, entropy, ends, [p / s for p, s in zip(passed, seen, strict=True)])


def members_of(group: int, per_query_head: bool) -> list[tuple[int, ...]]:
    """Return the query heads of each of a KV head's classifiers."""
    return [(member,) for member in range(group)] if per_query_head else [tuple(range(group))]


def place_of(head: int, members: Sequence[int]) -> tuple[int | str, ...]:
    """Return what names a classifier in random streams."""
    return (head, "-".join(map(str, members)))
