"""Choices beside an independent form of each method's rule, in loops and float64, with the line of the source it is of.

Queries and keys are random, or of the synthetic generator, whose keys lie in clusters that queries aim at. The log
counts how many choices agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from sparseattn import Adamas, KVCache, Selector
from tests.cases import attention, heads

H, G, D, ROWS, LAST = 2, 3, 32, 150, 12
DATA = {"random": heads, "structured": attention}

Rule = Callable[[Tensor, Tensor, int], Tensor]  # (queries [H,G,D], keys [H,N,D], budget) -> rows [H*G,k] or [H,k]


def choices(selector: Selector, data: str, rule: Rule, budget: int) -> tuple[int, int]:
    """How many choices of the last queries are the rule's, and of how many."""
    queries, keys, values = DATA[data](1, H, G, ROWS, D)
    cache = KVCache(selector, sink=0, window=0, seal=1, check=True)
    cache.append(keys, values, queries)
    same = total = 0
    for t in range(ROWS - LAST, ROWS):
        found = cache.select(queries[:, :, :, t], budget).rows[0].sort(-1).values
        expected = rule(queries[0, :, :, t].double(), keys[0].double(), budget).sort(-1).values
        same += int((found == expected).all(-1).sum())
        total += len(found)
    return same, total


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's matrix, of orthonormal columns."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    return reduce(torch.kron, [two] * (size.bit_length() - 1))


def adamas(threshold: float) -> Rule:
    """FibonaccciYan/Adamas, evaluation/adamas_attention.py:200-207: buckets of the transform, the least distance."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        chosen = []
        for h in range(H):
            edge = threshold or float(keys[h].square().mean().sqrt()) / 2
            edges = torch.tensor([-edge, 0.0, edge], dtype=torch.float64)
            own = torch.bucketize(keys[h] @ hadamard_matrix(D), edges)
            for g in range(G):
                code = torch.bucketize(queries[h, g] @ hadamard_matrix(D), edges)
                far = [(int((code - row).abs().sum()), -n) for n, row in enumerate(own)]
                chosen.append([-n for _, n in sorted(far)[:budget]])
        return torch.tensor(chosen)

    return rule


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_adamas(threshold: float, data: str) -> None:
    same, total = choices(Adamas(threshold), data, adamas(threshold), 20)
    assert (same, total) == (LAST * H * G, LAST * H * G)
