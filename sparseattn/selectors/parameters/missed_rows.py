"""Rows that product codes miss most: how far off their logits are, and lists of those that are too far."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.parameters.query_metric import as_coded


def errors_of(keys: Tensor, turn: Tensor, centre: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean square error `[H,n]` of the logits of keys `[H,n,D]` float32 by their codes, over the queries of
    the metric; turn, centre, centroids: see `codes_of`."""
    turned = (keys - centre[:, None]) @ turn.mT
    return (turned - as_coded(turned, centroids.float())).square().sum(2)


def marked_rows(marks: Tensor) -> Tensor:
    """Return the rows that `marks` `[B,H,N]` bool names, `[B,H,X]` int32, rising, -1 behind a KV head's last."""
    each = [of_head.nonzero()[:, 0].int() for of_head in marks.flatten(0, 1)]
    listed = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-1)
    return listed.unflatten(0, marks.shape[:2])
