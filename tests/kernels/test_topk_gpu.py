"""The best of lists by the Triton kernel: which they are, of equal scores the first, in the order of the list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparseattn.kernels.topk import gpu as topk_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first_of_best(scores: Tensor, count: int) -> Tensor:
    """`[B,Hs,S]` int32, by stable sorts: the specification."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    named = order.indices[..., :count].masked_fill(order.values[..., :count] == -torch.inf, scores.shape[-1])
    named = named.sort(-1).values
    return named.masked_fill(named == scores.shape[-1], -1).int()


# Lists of one program, cut once, cut twice, and those that cutting would not shorten; all of a list, one, none.
@pytest.mark.parametrize("held", [128, 8192])
@pytest.mark.parametrize(
    ("total", "count"),
    [(9, 3), (9, 50), (300, 300), (5, 0)]
    + [pytest.param(*long, marks=pytest.mark.slow) for long in [(1000, 17), (1000, 1), (4100, 33), (5000, 600)]],
)
def test_the_first_of_the_best(total: int, count: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_gpu, "HELD", held)
    draw = torch.Generator().manual_seed(total + count)
    scores = torch.randn(2, 4, total, generator=draw)
    scores[0, 1], scores[0, 2], scores[0, 3] = -torch.inf, 0.25, scores[0, 3].round()
    scores[1, 0, 5:], scores[1, 1, ::2], scores[1, 2] = -torch.inf, torch.inf, scores[1, 2].abs().neg() * 1e-40
    scores[1, 3] = torch.where(scores[1, 3] > 1.0, torch.nan, scores[1, 3])
    expected = first_of_best(scores, min(count, total))
    assert torch.equal(topk_gpu.best_rows(scores.to(DEVICE), count).cpu(), expected)
    start, length = (x.cpu() for x in topk_gpu.best_pages(scores.to(DEVICE), count, 16))
    assert torch.equal(start, expected.clamp(min=0) * 16)
    assert torch.equal(length, (expected >= 0).int() * 16)
