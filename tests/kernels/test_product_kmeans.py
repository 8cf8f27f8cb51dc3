"""k-means of the parts of keys: compiled code finds the reference's centroids, and these are no worse than faiss's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.kernels.product_kmeans import reference
from sparseattn.kernels.product_kmeans.dispatch import product_codebooks

IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["torch", "numba"])


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    if "numba" in request.node.name:
        pytest.importorskip("numba")


def error(keys: Tensor, books: Tensor, weights: Tensor | None = None) -> float:
    """The mean squared distance of keys `[H,n,D]` to what their nearest centroids `[H,S,K,d]` read."""
    names = codebooks.nearest(keys[None], books[None])[0].long().mT
    read = books.gather(2, names[..., None].expand(-1, -1, -1, books.shape[3])).transpose(1, 2).flatten(2)
    apart = (keys - read).square().sum(2)
    return float((apart if weights is None else apart * weights).mean())


@pytest.mark.parametrize(
    ("count", "parts", "size", "bits"), [(700, 5, 3, 4), (300, 2, 8, 4), (900, 2, 6, 6), (600, 1, 4, 8)]
)
def test_compiled_centroids_are_the_references_but_for_rounding(count: int, parts: int, size: int, bits: int) -> None:
    """A key that rounds to another centroid moves all rounds behind it: so errors are compared, and most centroids."""
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(count)
    keys, weights = torch.randn(3, count, parts * size, generator=draw), torch.rand(3, count, generator=draw)
    found, expected = (product_codebooks(keys, parts, bits, 0, weights, impl) for impl in ("numba", "torch"))
    assert found.shape == expected.shape == (3, parts, 1 << bits, size)
    assert error(keys, found, weights) == pytest.approx(error(keys, expected, weights), rel=0.005)
    same = ((found - expected).abs() < 1e-4).all(3).all(2)  # of a part, all centroids
    assert int(same.sum()) >= same.numel() - 1


@IMPLEMENTATIONS
def test_centroids_are_the_weighted_means_of_the_keys_that_are_nearest_to_them(impl: str) -> None:
    draw = torch.Generator().manual_seed(1)
    spots = 100 * torch.randn(16, 4, generator=draw)
    keys, weights = (
        spots.repeat(20, 1)[None] + torch.randn(1, 320, 4, generator=draw),
        torch.rand(1, 320, generator=draw),
    )
    books = product_codebooks(keys, 1, 4, 0, weights, impl)
    names = codebooks.nearest(keys[None], books[None])[0, 0, :, 0].long()
    for centroid in range(16):
        mine = names == centroid
        if bool(mine.any()):
            mean = (keys[0, mine] * weights[0, mine, None]).sum(0) / weights[0, mine].sum()
            torch.testing.assert_close(books[0, 0, centroid], mean, rtol=1e-4, atol=1e-3)


@IMPLEMENTATIONS
def test_keys_count_for_their_weights(impl: str) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, weights = torch.randn(1, 400, 4, generator=draw), torch.full((1, 400), 1e-3)
    weights[0, 7] = 1e4
    weighted, plain = (product_codebooks(keys, 1, 4, 0, each, impl) for each in (weights, None))
    assert float((weighted[0, 0] - keys[0, 7]).norm(dim=1).min()) < 1e-3
    assert float((plain[0, 0] - keys[0, 7]).norm(dim=1).min()) > 1e-2


@IMPLEMENTATIONS
def test_a_centroid_without_a_key_goes_beside_a_full_one(impl: str) -> None:
    """Sixteen places, and first centroids that all lie at four of them: the others come to be used too."""
    draw = torch.Generator().manual_seed(2)
    spots = torch.randn(16, 4, generator=draw)
    keys = spots.repeat(20, 1)[None]
    first = spots[torch.arange(16) % 4][None, None].contiguous()
    weights = torch.ones(1, 320)
    if impl == "numba":
        from sparseattn.kernels.product_kmeans import cpu

        books = cpu.product_kmeans(keys, first, weights)
    else:
        books = reference.product_kmeans(keys, first, weights)
    assert bool(books.isfinite().all())
    names = codebooks.nearest(keys[None], books[None])[0, 0, :, 0]
    assert len(names.unique()) > 8
    assert error(keys, books) < 0.5 * error(keys, first)


@IMPLEMENTATIONS
def test_fewer_keys_than_centroids_are_their_own(impl: str) -> None:
    keys = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(3))
    books = product_codebooks(keys, 2, 4, 0, impl=impl)
    assert error(keys, books) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_errors_are_those_of_faisss_k_means(bits: int) -> None:
    faiss = pytest.importorskip("faiss")
    keys = torch.randn(1, 1200, 32, generator=torch.Generator().manual_seed(4)) * torch.linspace(0.1, 3, 32)
    trained = faiss.ProductQuantizer(32, 4, bits)
    trained.cp.min_points_per_centroid, trained.cp.max_points_per_centroid = 1, 1200
    trained.train(keys[0].numpy())
    theirs = torch.from_numpy(faiss.vector_to_array(trained.centroids)).view(1, 4, 1 << bits, 8)
    drawn = keys[0, : 1 << bits].unflatten(1, (4, 8)).transpose(0, 1)[None]
    ours = product_codebooks(keys, 4, bits, 0)
    assert error(keys, ours) < 1.02 * error(keys, theirs)
    assert error(keys, ours) < 0.8 * error(keys, drawn)
