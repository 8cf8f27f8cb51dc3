"""Rows that product codes miss most: what is missed of their keys, and lists of those of which it is too much."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.parameters.query_metric import as_coded


def missed_by(keys: Tensor, turn: Tensor, centre: Tensor, centroids: Tensor) -> Tensor:
    """Return what codes miss of turned keys, `[H,n,D]`: its squared length is the mean square error of a logit over the
    queries of the metric. keys: `[H,n,D]` float32; turn, centre, centroids: see `codes_of`."""
    turned = (keys - centre[:, None]) @ turn.mT
    return turned - as_coded(turned, centroids.float())


def marked_rows(marks: Tensor) -> Tensor:
    """Return the rows that `marks` `[B,H,N]` bool names, `[B,H,X]` int32, rising, -1 behind a KV head's last."""
    each = [of_head.nonzero()[:, 0].int() for of_head in marks.flatten(0, 1)]
    listed = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-1)
    return listed.unflatten(0, marks.shape[:2])
