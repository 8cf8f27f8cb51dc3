"""What SAAP learns of a layer: buckets of its keys, and the classifier that sends queries to them.

Saap, https://arxiv.org/abs/2502.08246. Letters: H KV heads, G query heads per KV head, D head size, C buckets, F hidden
width, A classifiers (H, or H*G where every query head has its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sparseattn.kernels.linear.dispatch import linear


class ArtefactError(ValueError):
    """An artefact that cannot be read, written or used for a model, in one sentence."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """Linear (BatchNorm folded in), ReLU, Linear, for A heads at once: from a query to logits over the buckets.

    Weights may be of 16 bits; biases and sums are float32.

    Args:
        w1: `[A,F,D]`.
        b1: `[A,F]`.
        w2: `[A,C,F]`.
        b2: `[A,C]`.
        skip: `[A,C,D]`, a linear path beside them (the residual variant), or None.

    Raises:
        ArtefactError: shapes that do not fit together.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    skip: Tensor | None = None

    def __post_init__(self) -> None:
        heads, hidden, size = self.w1.shape if self.w1.ndim == 3 else (0, 0, 0)
        buckets = self.w2.shape[1] if self.w2.ndim == 3 else 0
        expected = {
            "w1": (heads, hidden, size),
            "b1": (heads, hidden),
            "w2": (heads, buckets, hidden),
            "b2": (heads, buckets),
            "skip": (heads, buckets, size),
        }
        for name, tensor in self.tensors().items():
            if tuple(tensor.shape) != expected[name] or not tensor.numel():
                given = ", ".join(f"{other} {list(t.shape)}" for other, t in self.tensors().items())
                raise ArtefactError(
                    f"a classifier is w1 [A,F,D], b1 [A,F], w2 [A,C,F], b2 [A,C], skip [A,C,D], got {given}"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor, `skip` only where there is one."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def logits(self, queries: Tensor) -> Tensor:
        """Return logits `[..,A,n,C]` of queries `[..,A,n,D]`, de-roped unless the artefact is roped."""
        together = queries.movedim(-3, 0)  # [A,..,n,D]: the weights are read once for all sequences
        x = together.flatten(1, -2)
        logits = linear(linear(x, self.w1, self.b1, relu=True), self.w2, self.b2)
        if self.skip is not None:
            logits = logits + linear(x, self.skip)
        return logits.unflatten(1, together.shape[1:-1]).movedim(0, -3)


@dataclass(frozen=True, eq=False)
class Partition:
    """The buckets of one layer's keys, and the classifier that sends queries to them (None: symmetric k-means).

    Args:
        centroids: `[H,C,D]` float32 of unit length; a key belongs to the bucket of the largest inner product.
        classifier: of the same D and C, for H or H*G heads.

    Raises:
        ArtefactError: shapes that do not fit together.
    """

    centroids: Tensor
    classifier: Classifier | None = None

    def __post_init__(self) -> None:
        if self.centroids.ndim != 3 or not self.centroids.numel():
            raise ArtefactError(f"centroids are [H,C,D], got {list(self.centroids.shape)}")
        if self.classifier is None:
            return
        heads, buckets, size = self.centroids.shape
        many, classes, inputs = *self.classifier.w2.shape[:2], self.classifier.w1.shape[2]
        if (classes, inputs) != (buckets, size) or many % heads:
            raise ArtefactError(
                f"a classifier for centroids {list(self.centroids.shape)} has a multiple of {heads} heads, {buckets} "
                f"buckets and size {size}, got {many}, {classes} and {inputs}"
            )

    def assign(self, keys: Tensor) -> Tensor:
        """Return the bucket of every key of `[..,H,n,D]`, de-roped unless the artefact is roped: `[..,H,n]` int64."""
        return (keys.to(self.centroids.dtype) @ self.centroids.mT).argmax(-1)

    def of_heads(self, heads: Sequence[int]) -> Partition:
        """Return that of some KV heads: H is their number."""
        numbers, classifier = list(heads), self.classifier
        if classifier is not None:
            each = len(classifier.w1) // len(self.centroids)
            rows = [head * each + g for head in numbers for g in range(each)]
            classifier = Classifier(**{name: tensor[rows] for name, tensor in classifier.tensors().items()})
        return Partition(self.centroids[numbers], classifier)

    def to(self, device: torch.device | str) -> Partition:
        """Return the same on another device."""
        classifier = self.classifier
        if classifier is not None:
            classifier = Classifier(**{name: tensor.to(device) for name, tensor in classifier.tensors().items()})
        return Partition(self.centroids.to(device), classifier)
