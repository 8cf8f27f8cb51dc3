"""Attention over every stored row in place, against float64 over the rows as they came."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, Quest, Selector
from sparseattn.cache import attend_stored as stored
from tests.cases import Buckets

H, G, D, NEW = 2, 3, 24, 3
SEEN = torch.ones(NEW, NEW, dtype=torch.bool).tril()[None, None]


def _filled(selector: Selector, lengths: Sequence[int], sealed: bool) -> tuple[KVCache, Tensor, Tensor]:
    """A cache of sequences of some lengths, and their rows `[B,H,N,D]`, the last of which are real."""
    keys, values = torch.randn(2, len(lengths), H, max(lengths), D)
    first = max(lengths) - torch.tensor(lengths)[:, None]
    at = torch.arange(max(lengths))[None] - first
    cache = KVCache(selector, sink=2, window=5, seal=16)
    cache.append(keys, values, torch.randn(len(lengths), H, G, max(lengths), D), at.clamp(min=-1))
    if sealed:
        cache.seal()
    return cache, keys, values


@pytest.mark.parametrize("lengths", [(47,), (63, 63), (70, 33, 8), (3,)])
@pytest.mark.parametrize("selector", [Quest(4), Buckets()], ids=repr)
@pytest.mark.parametrize("sealed", [False, True])
def test_new_tokens_see_every_stored_row_and_those_before_them(
    lengths: tuple[int, ...], selector: Selector, sealed: bool
) -> None:
    torch.manual_seed(0)
    cache, keys, values = _filled(selector.clone(), lengths, sealed)
    query = torch.randn(len(lengths), H, G, NEW, D)
    new = tuple(torch.randn(2, len(lengths), H, NEW, D))
    out, lse = stored.with_new_rows(query, cache, new, SEEN, scale=0.3)
    for b, length in enumerate(lengths):
        mine, theirs = (
            torch.cat([x[b, :, -length:], y[b]], 1).double() for x, y in zip((keys, values), new, strict=True)
        )
        logits = query[b].double() @ mine[:, None].mT * 0.3  # [H,G,n,N]
        logits[..., length:] = logits[..., length:].masked_fill(~SEEN[0, 0], -torch.inf)
        torch.testing.assert_close(out[b].double(), logits.softmax(-1) @ theirs[:, None], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), logits.logsumexp(-1), rtol=0, atol=1e-5)
    assert not sealed or max(lengths) < 8 or int(cache.sealed.max()) > 0


def test_rows_are_read_in_place_where_they_lie_together() -> None:
    pytest.importorskip("numba")
    cache = _filled(Quest(4), (47,), True)[0]
    assert stored.in_place(cache, 1)
    assert not stored.in_place(cache, stored.FEW["cpu"] + 1)
    apart = KVCache("quest", sealed_device="cpu")
    apart.append(*torch.randn(2, 1, H, 200, D))
    assert not stored.in_place(apart, 1)
