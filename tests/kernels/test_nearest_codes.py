"""Names of the nearest centroids: compiled code gives the reference's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.kernels.nearest_codes import dispatch


def apart_of(keys: Tensor, books: Tensor) -> Tensor:
    """The distances of keys `[B,H,n,S*d]` to the centroids `[B,H,S,K,d]`: `[B,H,S,n,K]`."""
    return torch.cdist(keys.unflatten(3, (books.shape[2], books.shape[4])).transpose(2, 3), books.float())


@pytest.mark.parametrize(("rows", "subspaces", "size"), [(0, 2, 4), (1, 1, 16), (5000, 5, 3), (70, 8, 16)])
def test_compiled_names_are_of_centroids_as_near_as_the_references(rows: int, subspaces: int, size: int) -> None:
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(rows)
    keys = torch.randn(2, 3, rows, subspaces * size, generator=draw)
    books = torch.randn(2, 3, subspaces, 16, size, generator=draw).bfloat16()
    found, expected = (dispatch.paired_names(keys, books, impl=impl) for impl in ("numba", "torch"))
    assert found.shape == expected.shape == (2, 3, -(-subspaces // 2), rows)
    unequal = found != expected
    assert float(unequal.double().mean() if rows else 0) < 1e-3, "by rounding alone"
    names = torch.stack([found & 15, found >> 4], 3).flatten(2, 3)[:, :, :subspaces].long()  # [B,H,S,n]
    if subspaces % 2 and rows:
        assert int((found[:, :, -1] >> 4).max()) == 0
    apart = apart_of(keys, books)
    torch.testing.assert_close(apart.gather(4, names[..., None])[..., 0], apart.amin(-1), rtol=1e-4, atol=1e-4)
    assert torch.equal(codebooks.paired(codebooks.nearest(keys, books)).mT, expected)


@pytest.mark.parametrize(
    ("rows", "subspaces", "size", "centroids"), [(333, 3, 4, 256), (50, 1, 6, 21), (700, 2, 5, 300)]
)
def test_names_of_any_number_of_centroids_are_the_references(
    rows: int, subspaces: int, size: int, centroids: int
) -> None:
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(rows)
    keys = torch.randn(2, 1, rows, subspaces * size, generator=draw)
    books = torch.randn(2, 1, subspaces, centroids, size, generator=draw)
    found, expected = (dispatch.names(keys, books, impl=impl) for impl in ("numba", "torch"))
    assert found.dtype == expected.dtype == (torch.uint8 if centroids <= 256 else torch.int16)
    apart = apart_of(keys, books)
    nearest = apart.gather(4, found[..., None].long())[..., 0]
    torch.testing.assert_close(nearest, apart.amin(-1), rtol=1e-4, atol=1e-4)
    assert float((found != expected).double().mean()) < 1e-3, "by rounding alone"


@pytest.mark.parametrize("kind", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_keys_are_turned_and_moved_before_they_are_named(kind: torch.dtype) -> None:
    """Of rows that lie in larger storage, of a head size that fills no whole blocks of outputs."""
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 400, 3, 21, generator=draw).to(kind)[:, :350].transpose(1, 2)
    turn, moved = torch.randn(2, 3, 21, 21, generator=draw), torch.randn(2, 3, 21, generator=draw)
    books = 5 * torch.randn(2, 3, 7, 16, 3, generator=draw)
    turned = torch.einsum("bhij,bhnj->bhni", turn, keys.float()) + moved[:, :, None]
    expected = codebooks.nearest(turned, books).mT
    for impl in ("numba", "torch"):
        found = dispatch.names(keys, books, (turn, moved), impl=impl)
        assert float((found != expected).double().mean()) < 2e-3, "by rounding alone"
        paired = dispatch.paired_names(keys, books, (turn, moved), impl=impl)
        assert torch.equal(paired, codebooks.paired(found.mT).mT)


@pytest.mark.parametrize(
    ("rows", "centroids", "turned"), [(70, 16, False), (70, 16, True), (5000, 21, True), (0, 16, True)]
)
@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_errors_are_squared_distances_to_what_the_names_stand_for(
    impl: str, rows: int, centroids: int, turned: bool
) -> None:
    """With books of 16 bits, of as many subspaces as leave the last name alone, and of keys that are centroids."""
    if impl == "numba":
        pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(0)
    books = torch.randn(2, 3, 5, centroids, 4, generator=draw).bfloat16()
    keys = torch.randn(2, 3, rows, 20, generator=draw)
    turn = (torch.randn(2, 3, 20, 20, generator=draw), torch.randn(2, 3, 20, generator=draw)) if turned else None
    if not turned:
        keys[:, :, 9] = books[:, :, :, 3].flatten(2)
    errors, again = torch.full((2, 2, 3, rows), -1.0)
    names = dispatch.names(keys, books, turn, errors, impl=impl)
    placed = keys if turn is None else keys @ turn[0].mT + turn[1][:, :, None]
    off = (placed - codebooks.decoded(names.mT, books.float())).square().sum(3)
    torch.testing.assert_close(errors, off, rtol=1e-4, atol=1e-4)
    assert bool((errors >= 0).all())
    if centroids == 16:
        dispatch.paired_names(keys, books, turn, again, impl=impl)
        assert torch.equal(errors, again)


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_of_centroids_equally_near_the_first_is_named(impl: str) -> None:
    if impl == "numba":
        pytest.importorskip("numba")
    books = torch.tensor([3.0, 1.0, 1.0, 0.0, 1.0]).repeat_interleave(8)[None, None, None, :, None]
    found = dispatch.names(torch.tensor([[[[1.0], [9.0], [-9.0]]]]), books, impl=impl)
    assert found.flatten().tolist() == [8, 0, 24]
