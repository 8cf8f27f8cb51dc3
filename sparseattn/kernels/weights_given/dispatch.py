"""What queries give to rows, summed over the queries of a KV head, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation

WEIGHTS = Operation(__package__, "torch", "numba")


def weights_given(queries: Tensor, total: Tensor, keys: Tensor, scale: float, impl: str | None = None) -> Tensor:
    """Return the sum over queries of the softmax weight that each gives to every row, 1 at most each.

    Args:
        queries: `[B,H,M,D]`.
        total: `[B,H,M]` float32, the log-sum-exp of each query's logits, the logarithm of its softmax' denominator, in
            which these rows need not be; +inf: the query gives nothing.
        keys: `[B,H,N,D]`, elements of a row adjacent.
        scale: factor of the logits.
        impl: see `implementations`.

    Returns:
        `[B,H,N]` float32.
    """
    torch_only = queries.requires_grad or keys.requires_grad or queries.dtype != keys.dtype
    return WEIGHTS.pick(impl, keys.device, keys.dtype, torch_only).weights_given(queries, total, keys, scale)


def log_sums(queries: Tensor, keys: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the log-sum-exp of each query's logits over the keys that it sees.

    Args:
        queries, keys, scale: as of `weights_given`.
        seen: `[B,1,M,N]` or `[B,H,M,N]` bool.

    Returns:
        `[B,H,M]` float32; -inf where a query sees none.
    """
    sums = []
    for h in range(keys.shape[1]):  # the logits of one KV head lie in memory at a time
        logits = queries[:, h].float() @ keys[:, h].float().mT * scale  # [B,M,N]
        sums.append(logits.masked_fill_(~seen[:, h % seen.shape[1]], -torch.inf).logsumexp(-1))
    return torch.stack(sums, 1)
