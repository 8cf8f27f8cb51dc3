"""The Triton kernels of selection against the selectors' torch, on a GPU or else under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.selectors.base import GROUPS, vote

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
from sparseattn.kernels.bucket_spans import gpu as bucket_spans_gpu  # noqa: E402
from sparseattn.kernels.listed_scores import gpu as listed_scores_gpu  # noqa: E402
from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu  # noqa: E402
from sparseattn.kernels.page_bounds.bounds import PageBounds  # noqa: E402
from sparseattn.kernels.page_bounds.dispatch import page_scores_at  # noqa: E402
from sparseattn.kernels.topk import gpu as topk_gpu  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
fp16, fp32 = torch.float16, torch.float32


def bounds_of_pages(
    batch: int, heads: int, number: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds in storage with spare places, all of them NaN, as those of pages that are not real."""
    spare = torch.full((2, batch, heads, number + 5, size), torch.nan, dtype=dtype, device=DEVICE)
    rows = torch.randn(batch, heads, number, 4, size, device=DEVICE).to(dtype)
    spare[0, :, :, :number], spare[1, :, :, :number] = rows.amin(3), rows.amax(3)
    real = torch.rand(batch, number, device=DEVICE) < 0.8
    real[-1] = False  # a sequence that has sealed nothing
    spare[:, :, :, :number].masked_fill_(~real[None, :, None, :, None], torch.nan)
    return spare[0, :, :, :number], spare[1, :, :, :number], real


def by_turns(shapes: list[tuple[torch.dtype, int, int, int]]) -> pytest.MarkDecorator:
    """Votes and shapes: in the fast run each vote meets every second shape, in the slow run the others."""
    every = [
        pytest.param(group, *shape, marks=[pytest.mark.slow] * ((g + s) % 2))
        for s, shape in enumerate(shapes)
        for g, group in enumerate(GROUPS)
    ]
    return pytest.mark.parametrize(("group", "dtype", "size", "heads", "number"), every)


@by_turns(
    [
        (fp32, 64, 4, 150),
        (fp16, 128, 3, 70),
        (fp32, 128, 17, 20),
        (fp16, 80, 1, 1),
        (fp32, 1, 2, 5),
        (fp16, 256, 5, 40),
    ]
)
def test_page_scores_are_the_specification(group: str, dtype: torch.dtype, size: int, heads: int, number: int) -> None:
    """Within the roundings of a sum of 2D products in float32, and of G such sums (`number` pages, `heads` is G)."""
    low, high, real = bounds_of_pages(3, 2, number, size, dtype)
    query = torch.randn(3, 2, heads, size, device=DEVICE).to(dtype)
    q, least, most = query.double(), low.double().nan_to_num(0), high.double().nan_to_num(0)
    bound = torch.maximum(q[:, :, :, None] * most[:, :, None], q[:, :, :, None] * least[:, :, None]).sum(-1) / size**0.5
    expected = vote(bound.masked_fill(~real[:, None, None], -torch.inf), group)
    got = page_bounds_gpu.scores(query, PageBounds(low, high, real), group, size**0.5)
    assert got.dtype == fp32
    assert torch.equal(got.isneginf(), expected.isneginf())
    size_of_sums = (q.abs() @ torch.maximum(most.abs(), least.abs()).mT / size**0.5).amax() if number else 0.0
    far = (2 * size + 16) * 2.0**-24 * size_of_sums * (heads if group == "sum" else 4) + 1e-5 * (group == "softmax")
    off = (got.double() - expected).masked_fill(expected.isinf(), 0).abs()
    assert off.max() <= far


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [fp16, fp32])
def test_int8_bounds_are_scored_as_what_they_stand_for(group: str, dtype: torch.dtype) -> None:
    """In 16 bits the query times the channels' steps is rounded once more."""
    low, high = torch.randint(-127, 128, (2, 2, 2, 70, 80), dtype=torch.int8, device=DEVICE).sort(0).values
    step, real = torch.rand(2, 2, 80, device=DEVICE), torch.rand(2, 70, device=DEVICE) < 0.8
    query = torch.randn(2, 2, 3, 80, device=DEVICE).to(dtype)
    asked = (query.float() * step[:, :, None]).to(dtype).double()
    q, least, most = asked[:, :, :, None], low.double()[:, :, None], high.double()[:, :, None]
    bound = torch.maximum(q * most, q * least).sum(-1) / 80**0.5
    expected = vote(bound.masked_fill(~real[:, None, None], -torch.inf), group)
    got = page_bounds_gpu.scores(query, PageBounds(low, high, real, step), group, 80**0.5)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-3)


@by_turns([(fp32, 64, 4, 150), (fp16, 128, 3, 40), (fp16, 80, 1, 1), (fp32, 33, 2, 0)])
def test_page_scores_of_a_shared_store_are_the_specification(
    group: str, dtype: torch.dtype, size: int, heads: int, number: int
) -> None:
    """Entries in shuffled places, some named by two sequences; those that nobody names are NaN; a table with gaps."""
    batch, kv_heads, held = 3, 2, 2 * number + 3
    query = torch.randn(batch, kv_heads, heads, size, device=DEVICE).to(dtype)
    rows = torch.randn(held, kv_heads, 4, size, device=DEVICE).to(dtype)
    table = torch.stack([torch.randperm(held)[:number] for _ in range(batch)]).int().to(DEVICE)
    table[torch.rand(table.shape, device=DEVICE) < 0.2] = -1
    table[-1] = -1  # a sequence with nothing to choose from
    unnamed = torch.ones(held, dtype=torch.bool, device=DEVICE)
    unnamed[table[table >= 0].long()] = False
    # Both in one tensor, and a table that is a part of a wider one: strides are not those of tensors of their own.
    both = torch.stack([rows.amin(2), rows.amax(2)], 1)  # [held,2,H,D]
    expected = page_scores_at(query.float(), PageBounds(*both.float().unbind(1)), table, group, impl="torch")
    both[unnamed] = torch.nan
    wide = torch.full((batch, number + 7), held, dtype=torch.int32, device=DEVICE)
    wide[:, :number] = table
    got = page_scores_at(query, PageBounds(*both.unbind(1)), wide[:, :number], group, impl="triton")
    assert torch.equal(got.isneginf(), expected.isneginf())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-4)


def test_a_table_of_another_dtype_is_refused() -> None:
    store = torch.zeros(4, 1, 16, device=DEVICE)
    table = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"int32 \[B,P\], got torch.int64 \[1, 4\]"):
        page_bounds_gpu.scores_at(torch.zeros(1, 1, 1, 16, device=DEVICE), PageBounds(store, store), table, "sum", 4.0)


def test_page_bounds_of_another_dtype_are_refused() -> None:
    low, high, real = bounds_of_pages(1, 1, 4, 16, fp32)
    with pytest.raises(ValueError, match=r"of the query's torch.float16, .* got torch.float32"):
        page_bounds_gpu.scores(
            torch.zeros(1, 1, 1, 16, dtype=fp16, device=DEVICE), PageBounds(low, high, real), "sum", 4.0
        )


@pytest.mark.parametrize("count", [0, 3, 9, 50])
def test_best_pages_become_spans(count: int) -> None:
    scores = torch.randn(2, 3, 9, device=DEVICE)
    scores[0, :, 2:] = -torch.inf
    start, length = topk_gpu.best_pages(scores, count, 16)
    assert start.shape == length.shape == (2, 3, min(count, 9))
    found = Selection(start, length, 16)
    expected = scores.topk(min(count, 9)).values
    named = found.mask(9 * 16)[..., ::16]
    got = scores.masked_fill(~named, -torch.inf).sort(-1, descending=True).values[..., : min(count, 9)]
    assert torch.equal(got, expected)
    assert torch.equal(found.attended, 16 * (~expected.isneginf()).sum(-1))


@pytest.mark.parametrize(
    ("lists", "each", "span"),
    [
        ((5, 3, 300), 1, 4),
        ((5, 3, 300), 3, 16),
        ((5, 3, 37), 3, 1),
        ((12, 1, 1), 3, 4),
        ((12, 1, 1), 1, 16),
        ((20, 4, 120), 1, 1),
        ((20, 4, 120), 3, 4),
    ],
)
def test_probing_is_what_selection_runs_gives(lists: tuple[int, int, int], each: int, span: int) -> None:
    visited, segments, budget = lists
    batch, heads, buckets = 2 if each == 1 else 1, 2, 60  # with lists for three query heads, of one sequence
    sizes = torch.randint(0, 9, (batch, heads, segments, buckets + 1), device=DEVICE)
    sizes[:, :, :, ::7] = 0
    ends = sizes.flatten(2).cumsum(-1).view_as(sizes)
    begin = torch.nn.functional.pad(ends[..., -1], (1, 0))[..., :-1]
    edges = torch.cat([begin[..., None], ends], -1).int()  # [B,H,R,C+2]
    spare = torch.full((batch, heads, segments + 2, buckets + 2), -(1 << 20), dtype=torch.int32, device=DEVICE)
    spare[:, :, :segments] = edges
    ids = torch.stack([torch.randperm(buckets)[:visited] for _ in range(batch * heads * each)])
    ids = ids.view(batch, heads * each, visited).to(DEVICE)
    at = ids.view(batch, heads, 1, -1).expand(-1, -1, segments, -1)
    start = edges.gather(3, at)
    length = edges.gather(3, at + 1) - start
    start, length = (
        x.unflatten(3, (each, visited)).permute(0, 1, 3, 4, 2).reshape(batch, heads * each, -1) for x in (start, length)
    )
    expected = Selection.runs(start, length, span, budget)
    slots = expected.start.shape[2]
    for held in (slots, slots - slots // 3):
        got = bucket_spans_gpu.spans(ids, spare[:, :, :segments], span, budget, held)
        used = expected.length[..., :held] > 0
        assert torch.equal(got[1], expected.length[..., :held])
        assert torch.equal(got[0][used], expected.start[..., :held][used])
        assert bool((got[0][~used] == 0).all())


@pytest.mark.parametrize(("dtype", "group", "listed"), [(fp32, 3, 70), (fp16, 3, 18), (fp32, 1, 1), (fp32, 2, 0)])
def test_every_listed_key_is_scored_once(dtype: torch.dtype, group: int, listed: int) -> None:
    """Keys that nobody lists are NaN; among the ids are repetitions and places without one."""
    batch, heads, stored, size = 2, 2, 40, 40
    chosen = heads * group
    ids = torch.randint(-1, stored, (batch, chosen, listed), dtype=torch.int32).sort(-1).values
    ids[1, 0] = -1
    query = torch.randn(batch, heads, group, size).to(dtype)
    keys = torch.randn(batch, heads, stored + 3, size).to(dtype)
    named = torch.zeros(batch, heads, stored + 3, dtype=torch.bool)
    for b in range(batch):
        for s in range(chosen):
            named[b, s // group, ids[b, s][ids[b, s] >= 0].long()] = True
    keys[~named] = torch.nan
    scores = listed_scores_gpu.scores(*(x.to(DEVICE) for x in (query, keys[:, :, :stored], ids))).cpu()
    assert scores.shape == ids.shape
    for b in range(batch):
        for s in range(chosen):
            rows = sorted(set(ids[b, s].tolist()) - {-1})
            held = ~scores[b, s].isneginf()
            assert ids[b, s][held].tolist() == rows
            expected = keys[b, s // group, rows].double() @ query[b, s // group, s % group].double()
            torch.testing.assert_close(scores[b, s][held].double(), expected, rtol=1e-5, atol=1e-5)
