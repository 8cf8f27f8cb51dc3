"""The Triton kernel of pages by mean and directions against torch, on a GPU or else under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from sparseattn.kernels.page_directions import dispatch as page_directions
from sparseattn.kernels.page_directions.reference import Form
from tests.kernels.test_page_directions import in_a_store, stored

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
from sparseattn.kernels.page_directions import gpu as page_directions_gpu  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
fp16, fp32 = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "kind", "rank", "bits", "rest", "size", "group", "page", "vote"),
    [
        (fp32, "quad", 2, 8, True, 33, 3, 16, "softmax"),
        (fp16, "clse", 2, 4, True, 64, 9, 16, "max"),
        (fp32, "ellipsoid", 3, 4, False, 40, 1, 16, "sum"),
        pytest.param(fp16, "quad", 0, 16, False, 128, 4, 16, "sum", marks=pytest.mark.slow),
        pytest.param(fp16, "quad", 3, 4, True, 33, 4, 8, "each", marks=pytest.mark.slow),
        pytest.param(fp32, "clse", 2, 16, False, 64, 4, 16, "softmax", marks=pytest.mark.slow),
        pytest.param(fp32, "clse", 3, 8, False, 80, 5, 8, "each", marks=pytest.mark.slow),
        pytest.param(fp32, "ellipsoid", 4, 16, True, 128, 4, 32, "each", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_the_specification(dtype, kind, rank, bits, rest, size, group, page, vote) -> None:
    """Within the roundings of sums in float32, in the order of entries and in a store."""
    form = Form(kind, page, rank, bits, rest, 1.5)
    query, entries, real = stored(form, size, group, dtype)
    expected = page_directions.scores(query.double(), entries, real, form, vote, 7.0, "torch")
    store, table = in_a_store(entries, real)
    query, real, table = query.to(DEVICE), real.to(DEVICE), table.to(DEVICE)
    entries, store = ({name: part.to(DEVICE) for name, part in parts.items()} for parts in (entries, store))
    for got in (
        page_directions.scores(query, entries, real, form, vote, 7.0, "triton"),
        page_directions.scores_at(query, store, table, form, vote, 7.0, "triton"),
    ):
        assert torch.equal(got.isneginf().cpu(), expected.isneginf())
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_cannot_read_gets_a_sentence() -> None:
    form = Form("quad", 16, 2, 8)
    query, entries, real = (stored(form, 16, 1, fp16)[i] for i in range(3))
    with pytest.raises(ValueError, match=r"vectors of 8 bits are of int8 .* got torch.float32"):
        page_directions_gpu.scores(query, {**entries, "vectors": entries["vectors"].float()}, real, form, "sum", 4.0)
    with pytest.raises(ValueError, match=r"int32 \[B,P\], got torch.int64 \[2, 9\]"):
        page_directions_gpu.scores_at(query, {}, torch.zeros(2, 9, dtype=torch.int64), form, "sum", 4.0)
