"""What decides a run of training: the recipe, its filters, and the random streams that its seed begins.

Saap, https://arxiv.org/abs/2502.08246.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparseattn.utils.hashing import stream

WARM_UP = 0.05  # share of the steps over which the learning rate grows


class TrainingError(ValueError):
    """Traces or options cannot be used for training; the message is one sentence."""


@dataclass(frozen=True)
class Filters:
    """The paper's long-range filters: which pairs of query and key, and which queries, training uses.

    Args:
        gap: a key counts for a query if its position is more than `gap` before the query's.
        near: queries whose best key, of all before them but the sink, is less than `near` away are left out; 0: none.
        sink: first rows of a prompt that count for no query.
        two_sided: keys more than `gap` behind the query count as well, as the paper's unmasked batches may have it.

    Raises:
        TrainingError: a number out of its range.
    """

    gap: int = 2047
    near: int = 1024
    sink: int = 1
    two_sided: bool = False

    def __post_init__(self) -> None:
        if self.gap < 0 or self.near < 0 or self.sink < 0:
            raise TrainingError(f"gap, near and sink are 0 or more, got {self.gap}, {self.near} and {self.sink}")

    def far(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[n,T]` bool, which keys count for which queries, by positions `[n]` and `[T]` (of the whole prompt)."""
        distance = queries[:, None] - keys
        far = distance.abs() > self.gap if self.two_sided else distance > self.gap
        far[:, : self.sink] = False
        return far

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[n,T]` bool, the keys that a query's best one is sought among: not after it, and no sink."""
        seen = keys <= queries[:, None]
        seen[:, : self.sink] = False
        return seen


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome, except the prompts.

    Args:
        clusters: C; by default 1,024, or the largest power of two that leaves a bucket 32 rows of the shortest prompt.
        iterations: of k-means.
        sample: keys that a head's k-means sees, over all prompts; by default 256 a cluster.
        hidden: width of the classifier.
        steps: at most.
        batch: queries of a step, from one prompt.
        queries: distinct queries that a classifier is trained on, over all prompts.
        keys: far keys that a query's target is computed over; all by default.
        rate: the highest learning rate; it grows over the first 5 % of the steps and falls along a cosine to zero.
        decay: of AdamW.
        validate: steps between two validations.
        patience: validations without a better one after which a head stops.
        shares: budgets of validation, as shares of the context.
        filters: which pairs and queries count.
        roped: buckets and classifier of vectors as attention sees them, not de-roped.
        residual: a linear path beside the classifier's two layers, which begins as the logits of mean keys: fewer
            prompts do. (The paper does not say how its residual variant begins, and found it no better.)
        per_query_head: a classifier for each query head, not one for the group.
        symmetric: no classifier, queries go to the nearest centroids.
        reverse: the other direction of the loss, KL(f || smoothed target).
        seed: any integer.

    Raises:
        TrainingError: a number out of its range.
    """

    clusters: int | None = None
    iterations: int = 25
    sample: int | None = None
    hidden: int = 1024
    steps: int = 2000
    batch: int = 1024
    queries: int = 65536
    keys: int | None = None
    rate: float = 1e-3
    decay: float = 0.01
    validate: int = 100
    patience: int = 10
    shares: tuple[float, ...] = (0.01, 0.05)
    filters: Filters = field(default_factory=Filters)
    roped: bool = False
    residual: bool = False
    per_query_head: bool = False
    symmetric: bool = False
    reverse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"clusters": 2, "iterations": 1, "sample": 1, "hidden": 1, "steps": 1, "batch": 2, "queries": 2}
        least |= {"keys": 1, "validate": 1, "patience": 1}
        for name, bound in least.items():
            number = getattr(self, name)
            if number is not None and number < bound:
                raise TrainingError(f"{name} is at least {bound}, got {number}")
        if not 0 < self.rate < math.inf or not 0 <= self.decay < math.inf:
            raise TrainingError(
                f"the learning rate is positive and the decay not negative, got {self.rate} and {self.decay}"
            )
        if self.symmetric and (self.residual or self.per_query_head or self.reverse):
            raise TrainingError(
                "symmetric k-means has no classifier, so residual, per_query_head and reverse do not go with it"
            )
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise TrainingError(f"validation takes shares of the context between 0 and 1, got {list(self.shares)}")

    def learning_rate(self, step: int) -> float:
        """Of step 0 and up."""
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2


def bucket_stream(*place: int | str) -> torch.Generator:
    """Return a random stream of training, keyed by where it is used (see `sparseattn.utils.hashing.stream`)."""
    return stream("saap", *place)
