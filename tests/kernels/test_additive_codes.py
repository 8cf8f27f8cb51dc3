"""Names of the centroids whose sum is nearest: compiled code gives the reference's, and more beams find nearer sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn.kernels.additive_codes import dispatch


def off(keys: Tensor, books: Tensor, names: Tensor) -> Tensor:
    """Squared distances `[B,H,n]` of keys `[B,H,n,D]` from the sums that `names` `[B,H,M,n]` say."""
    each = books.float().gather(3, names.long()[..., None].expand(-1, -1, -1, -1, books.shape[4]))
    return (keys.float() - each.sum(2)).square().sum(3)


@pytest.mark.parametrize(
    ("rows", "codes", "entries", "size", "kind"),
    [
        (0, 2, 16, 4, torch.float32),
        (1, 1, 16, 16, torch.float32),
        (900, 5, 16, 21, torch.float32),
        pytest.param(130, 3, 256, 8, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("turned", [False, True])
def test_compiled_sums_are_as_near_as_the_references(
    rows: int, codes: int, entries: int, size: int, kind: torch.dtype, turned: bool
) -> None:
    """Of rows that lie in larger storage, turned or as they are."""
    pytest.importorskip("numba")
    draw = torch.Generator().manual_seed(rows)
    keys = torch.randn(2, rows + 7, 3, size, generator=draw).to(kind)[:, :rows].transpose(1, 2)
    books = torch.randn(2, 3, codes, entries, size, generator=draw).to(kind)
    turn = torch.randn(2, 3, size, size, generator=draw), torch.randn(2, 3, size, generator=draw)
    found, expected = (dispatch.names(keys, books, turn if turned else None, impl=impl) for impl in ("numba", "torch"))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype) == ((2, 3, codes, rows), torch.uint8)
    assert float((found != expected).double().mean() if rows else 0) < 5e-3, "by rounding alone"
    whole = keys.float() @ turn[0].mT + turn[1][:, :, None] if turned else keys
    torch.testing.assert_close(*(off(whole, books, names) for names in (found, expected)), rtol=1e-3, atol=1e-3)


def test_one_code_is_the_nearest_centroid_and_more_beams_find_nearer_sums() -> None:
    draw = torch.Generator().manual_seed(0)
    keys, books = torch.randn(1, 2, 400, 8, generator=draw), torch.randn(1, 2, 4, 16, 8, generator=draw)
    nearest = torch.cdist(keys, books[:, :, 0]).argmin(3)
    assert torch.equal(dispatch.names(keys, books[:, :, :1])[:, :, 0].long(), nearest)
    errors = [float(off(keys, books, dispatch.names(keys, books, beams=beams)).mean()) for beams in (1, 4, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.1 * errors[2]
