"""The classifier that sends queries to buckets, for many heads at once; Saap, https://arxiv.org/abs/2502.08246, 4.2.

Letters: A classifiers (KV heads, or query heads), n queries, D head size, F hidden width, C buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparseattn.selectors.parameters.saap_partition import Classifier
from sparseattn.training.recipe import bucket_stream

EPSILON = 1e-5  # of BatchNorm, torch's
MOMENTUM = 0.1
SMOOTHING = 1e-3  # share spread evenly over the buckets of a target whose logarithm is taken


class QueryClassifier(nn.Module):
    """Linear-BatchNorm-ReLU-Linear for A heads, a batched matrix product each; no number of a head depends on another.

    The first Linear has no bias: BatchNorm takes it out again, and AdamW would blow up the rounding noise of its
    gradient.

    Args:
        places: a tuple for each of the A heads that its initial weights are drawn by, such as (seed, layer, head).
        size, hidden, buckets: D, F and C.
        skip: `[A,C,D]` a linear path beside, from the query to the logits, begins as this; None: there is none.
    """

    def __init__(
        self, places: Sequence[tuple[int | str, ...]], size: int, hidden: int, buckets: int, skip: Tensor | None = None
    ) -> None:
        super().__init__()
        heads = len(places)

        def drawn(name: str, rows: int, columns: int) -> nn.Parameter:  # uniform, as torch's Linear is
            bound = 1 / math.sqrt(columns)
            each = [torch.rand(rows, columns, generator=bucket_stream(*place, name)) for place in places]
            return nn.Parameter(torch.stack(each) * (2 * bound) - bound)

        self.w1 = drawn("w1", hidden, size)  # [A,F,D]
        self.gamma = nn.Parameter(torch.ones(heads, hidden))
        self.beta = nn.Parameter(torch.zeros(heads, hidden))
        self.w2 = drawn("w2", buckets, hidden)  # [A,C,F]
        self.b2 = nn.Parameter(torch.zeros(heads, buckets))
        self.skip = None if skip is None else nn.Parameter(skip.detach().clone())
        if skip is not None:
            nn.init.zeros_(self.w2)  # begins as the linear path alone
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(heads, hidden))
        self.register_buffer("variance", torch.ones(heads, hidden))

    def forward(self, queries: Tensor) -> Tensor:
        """`[A,n,C]` logits of queries `[A,n,D]`; in training the batch's own mean and variance normalise it."""
        hidden = torch.bmm(queries, self.w1.mT)  # [A,n,F]
        if self.training:
            mean, variance = hidden.mean(1), hidden.var(1, correction=0)
            with torch.no_grad():
                n = queries.shape[1]
                self.mean.lerp_(mean, MOMENTUM)
                self.variance.lerp_(variance * (n / max(1, n - 1)), MOMENTUM)
        else:
            mean, variance = self.mean, self.variance
        factor = self.gamma * (variance + EPSILON).rsqrt()
        hidden = F.relu(torch.addcmul((self.beta - mean * factor)[:, None], hidden, factor[:, None]))
        logits = torch.baddbmm(self.b2[:, None], hidden, self.w2.mT)
        return logits if self.skip is None else torch.baddbmm(logits, queries, self.skip.mT)

    @torch.no_grad()
    def folded(self) -> Classifier:
        """Return what is exported: BatchNorm, with its running mean and variance, folded into the first Linear."""
        factor = self.gamma * (self.variance + EPSILON).rsqrt()
        return Classifier(
            w1=self.w1 * factor[..., None],
            b1=self.beta - self.mean * factor,
            w2=self.w2.detach().clone(),
            b2=self.b2.detach().clone(),
            skip=None if self.skip is None else self.skip.detach().clone(),
        )


def divergence(logits: Tensor, target: Tensor, reverse: bool = False, entropy: Tensor | None = None) -> Tensor:
    """Return `[A]`, mean KL(target || f) of logits `[A,n,C]` to targets `[A,n,C]`; `reverse`: KL(f || smoothed target).

    Eq. 1 writes KLDiv(f, A H_k), whose argument order is that of `F.kl_div(log f, target)`, so KL(target || f). The
    other direction is infinite wherever a bucket has no attention, hence the smoothing.

    `entropy` `[A,n]` of the targets, where it is known: it has no gradient, and computing it takes as long as the rest.
    """
    log_f = logits.log_softmax(-1)
    if not reverse:
        if entropy is None:
            entropy = torch.special.entr(target).sum(-1)
        return -((target * log_f).sum(-1) + entropy).mean(-1)
    smooth = target * (1 - SMOOTHING) + SMOOTHING / target.shape[-1]
    return F.kl_div(smooth.log(), log_f, reduction="none", log_target=True).sum(-1).mean(-1)


def clip_each(parameters: Sequence[nn.Parameter], limit: float = 1.0) -> None:
    """Scale the gradients of each of the A heads to a norm of at most `limit`, over all its parameters."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()  # [A]
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))
