"""Rows that product codes miss most: what is missed of their keys, and lists of those of which it is too much."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.parameters.query_metric import decoded


def missed_by(turned: Tensor, names: Tensor, centroids: Tensor) -> Tensor:
    """Return what codes miss of turned keys, `[H,n,D]`: its squared length is the mean square error of a logit over the
    queries of the metric.

    Args:
        turned: `[H,n,D]` float32, see `codes_of`.
        names: `[H,n,S]`, their codes.
        centroids: `[H,S,K,d]`.
    """
    return turned - decoded(names, centroids.float())


def largest_marked(errors: Tensor, limit: Tensor, most: int) -> Tensor:
    """Return which of rows have errors `[B,H,n]` above the limit `[B,H,1]`, `[B,H,n]` bool: of more than `most` those
    with the largest."""
    values, rows = errors.topk(min(most, errors.shape[2]), dim=2)
    return torch.zeros_like(errors, dtype=torch.bool).scatter_(2, rows, values > limit)


def marked_rows(marks: Tensor) -> Tensor:
    """Return the rows that `marks` `[B,H,N]` bool names, `[B,H,X]` int32, rising, -1 behind a KV head's last."""
    each = [of_head.nonzero()[:, 0].int() for of_head in marks.flatten(0, 1)]
    listed = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-1)
    return listed.unflatten(0, marks.shape[:2])
