"""Scores by keys of a few bits, compiled by numba for the CPU: codes are multiplied as the integers they are.

`cpu_products` multiplies codes with queries of 8 bits, `cpu_rows` scores every row and page, `cpu_listed` the rows of
listed pages; `cpu_vote` takes the group's vote by "softmax" and the best rows in the same kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.group_vote.reference import vote
from sparseattn.kernels.quantized_keys import reference
from sparseattn.kernels.quantized_keys.cpu_listed import logits_of_listed
from sparseattn.kernels.quantized_keys.cpu_rows import masses
from sparseattn.kernels.quantized_keys.cpu_vote import best_by_vote, best_listed_by_vote, voted_scores
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_rows


def logits(query: Tensor, keys: QuantizedKeys) -> Tensor:
    """As `dispatch.logits`."""
    return masses(query, keys)


def scores(query: Tensor, keys: QuantizedKeys, group: str, page: int) -> Tensor:
    """As `dispatch.scores`."""
    return voted_scores(query, keys, page) if group == "softmax" else vote(masses(query, keys, page), group)


def scores_at(query: Tensor, store: QuantizedKeys, table: Tensor, group: str, page: int) -> Tensor:
    """As `dispatch.scores_at`."""
    batch = len(query)
    valid = torch.ones(1, store.group_rows, dtype=torch.bool).expand(batch, -1)  # of any one entry
    keys = store.shared_by(batch, valid)
    if group == "softmax":
        return voted_scores(query, keys, page, table)
    return vote(masses(query, keys, page, table), group)


def best(query: Tensor, keys: QuantizedKeys, group: str, count: int, page: int) -> Tensor:
    """As `dispatch.best`."""
    if group == "softmax" and page == 1:
        return best_by_vote(query, keys, count)
    return best_rows(scores(query, keys, group, page), count)


def listed_logits(query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int) -> Tensor:
    """As `dispatch.listed_logits`."""
    return logits_of_listed(query, keys, pages, page)


def best_listed(
    query: Tensor, keys: QuantizedKeys, group: str, pages: Tensor, page: int, count: int
) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_listed`."""
    if group == "softmax" and pages.shape[2] and pages.shape[1] == query.shape[1]:
        return best_listed_by_vote(query, keys, pages, page, count)
    return reference.best_of_listed(listed_logits(query, keys, pages, page), keys, group, pages, page, count)
