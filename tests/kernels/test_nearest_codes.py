"""Names of the nearest centroids: compiled code gives the reference's."""

from __future__ import annotations

import pytest
import torch

from sparseattn.kernels import codebooks
from sparseattn.kernels.nearest_codes import dispatch


@pytest.mark.parametrize(("rows", "subspaces", "size"), [(0, 2, 4), (1, 1, 16), (5000, 5, 3), (70, 8, 16)])
def test_compiled_names_are_of_centroids_as_near_as_the_references(rows: int, subspaces: int, size: int) -> None:
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(rows)
    keys = torch.randn(2, 3, rows, subspaces * size, generator=draw)
    books = torch.randn(2, 3, subspaces, 16, size, generator=draw).bfloat16()
    found, expected = (dispatch.paired_names(keys, books, impl=impl) for impl in ("numba", "torch"))
    assert found.shape == expected.shape == (2, 3, rows, -(-subspaces // 2))
    unequal = found != expected
    assert float(unequal.double().mean() if rows else 0) < 1e-3, "by rounding alone"
    names = torch.stack([found & 15, found >> 4], 4).flatten(3)[..., :subspaces].long().transpose(2, 3)  # [B,H,S,n]
    if subspaces % 2 and rows:
        assert int((found[..., -1] >> 4).max()) == 0
    cut = keys.unflatten(3, (subspaces, size)).transpose(2, 3)  # [B,H,S,n,d]
    apart = torch.cdist(cut, books.float())
    nearest = apart.amin(-1)
    torch.testing.assert_close(apart.gather(4, names[..., None])[..., 0], nearest, rtol=1e-4, atol=1e-4)
    assert torch.equal(codebooks.paired(codebooks.nearest(keys, books)), expected)
