"""numba's code for the CPU, beyond what test_attend.py and the laws ask of every implementation."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from sparseattn import Bounds, Quest, Selection, attend
from sparseattn.kernels import implementations, numba_threads
from sparseattn.kernels.bucket_spans.dispatch import bucket_spans
from sparseattn.kernels.group_vote.dispatch import vote
from sparseattn.kernels.linear.dispatch import linear
from sparseattn.kernels.listed_scores.dispatch import listed_scores
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.base import GROUPS
from tests.cases import heads

pytest.importorskip("numba")
from sparseattn.kernels.attend import cpu as attend_cpu
from sparseattn.kernels.page_bounds import cpu as page_bounds_cpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Kernels are compiled for each. How float16 is read, which all have in common, the fast run asks of attention alone.
COMPILED = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype == torch.float16)) for dtype in DTYPES], ids=str
)


def spare(rows: Tensor) -> Tensor:
    """The same rows, at the front of storage that holds NaN behind them."""
    wide = rows.new_full((*rows.shape[:2], rows.shape[2] + 9, *rows.shape[3:]), torch.nan)
    wide[:, :, : rows.shape[2]] = rows
    return wide[:, :, : rows.shape[2]]


@pytest.fixture
def threads():
    """Sets torch's threads, and sets them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_result_does_not_depend_on_the_number_of_threads(threads) -> None:
    queries, keys, values = heads(1, 2, 4, 3000, 64)
    ids = torch.randperm(150)[:60].expand(1, 2, -1)
    bounds = Bounds.of(1, 3000, sink=4, sealed=2700)
    found = []
    for count in (1, 2):
        threads(count)
        found.append(attend(queries[:, :, :, 0], keys, values, Selection.pages(ids, 16), bounds, impl="numba"))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("share", [1, 4, 7])
def test_parts_of_one_length_are_the_whole(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket lengths differ by a factor of 500: parts begin and end anywhere in a span, and some are empty."""
    queries, keys, values = heads(1, 1, share, 2000, 80)
    start, length = torch.tensor([[[0, 700, 1990]]]).int(), torch.tensor([[[2, 1000, 10]]]).int()
    selection = Selection(start, length, 1024)
    expected = attend(queries[:, :, :, 0], keys, values, selection, impl="reference")
    for parts, rows in ((1, 1), (3, 1), (32, 1), (5000, 1), (32, 128)):
        monkeypatch.setattr(attend_cpu, "PARTS", parts)
        monkeypatch.setattr(attend_cpu, "PART_ROWS", rows)
        found = attend(queries[:, :, :, 0], keys, values, selection, impl="numba")
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_rows_that_are_no_numbers_show() -> None:
    queries, keys, values = heads(1, 1, 2, 40, 16)
    keys[0, 0, 7], values[0, 0, 9] = torch.nan, torch.inf
    for ids, finite in (([1, 2], True), ([1, 7], False), ([3, 9], False)):
        out, _ = attend(queries[:, :, :, 0], keys, values, Selection.tokens(torch.tensor([[ids]])), impl="numba")
        assert bool(torch.isfinite(out).all()) == finite


def test_a_named_numba_runs_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = heads(1, 2, 2, 40, 16)
    query, selection = queries[:, :, :, 0], Selection.tokens(torch.arange(8).expand(1, 2, -1))
    with pytest.raises(RuntimeError, match=r"float32, float16 and bfloat16, not float64"):
        attend(query.double(), keys.double(), values.double(), selection, impl="numba")
    with pytest.raises(ValueError, match="the last stride is 1, got 40"):
        attend(query, keys.mT.contiguous().mT, values, selection, impl="numba")
    assert (
        implementations.why_not_numba(torch.device("cuda"), torch.float32)
        == "numba's code runs on the CPU, not on cuda"
    )
    monkeypatch.setattr(implementations, "choose", implementations.choose.__wrapped__)  # what it has found is kept
    monkeypatch.setattr(implementations, "_missing_numba", lambda: "numba is not installed")
    with pytest.raises(RuntimeError, match="numba is not installed"):
        attend(query, keys, values, selection, impl="numba")
    with pytest.raises(RuntimeError, match="numba is not installed"):
        linear(torch.zeros(1, 1, 4), torch.zeros(1, 2, 4), impl="numba")
    with pytest.raises(ValueError, match="impl is one of torch, numba, triton or None, got 'gather'"):
        listed_scores(query, keys, torch.zeros(1, 4, 3, dtype=torch.int32), impl="gather")
    with pytest.raises(ValueError, match="impl is one of torch, numba, triton or None, got 'gather'"):
        best_pages(torch.zeros(1, 1, 4), 2, 16, impl="gather")
    with pytest.raises(ValueError, match="impl is one of torch, numba or None, got 'triton'"):
        linear(torch.zeros(1, 1, 4), torch.zeros(1, 2, 4), impl="triton")


def test_numba_is_told_its_threads_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each thread of its own, as numba keeps the number for each."""
    told: list[int] = []
    monkeypatch.setattr(numba_threads, "LET", threading.local())
    monkeypatch.setattr(numba_threads, "MOST_THREADS", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(numba_threads.numba, "set_num_threads", told.append)
    few, many = 0, 10 * numba_threads.ALONE
    assert [numba_threads.use_threads(work) for work in (few, few, many, many, few)] == [1, 1, 2, 2, 1]
    assert told == [1, 2, 1]
    other = threading.Thread(target=numba_threads.use_threads, args=(few,))
    other.start()
    other.join()
    assert told == [1, 2, 1, 1]


def test_the_first_compiled_step_leaves_torch_its_threads() -> None:
    """numba's threads may come from the OpenMP runtime that torch has: it sets that when it begins to use it."""
    code = (
        "import torch\nfrom sparseattn.kernels.numba_threads import use_threads\n"
        "torch.set_num_threads(1)\nuse_threads()\nprint(torch.get_num_threads())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1"]


def test_the_default_takes_numba_where_it_fits_and_gather_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.dtype] = []
    run = attend_cpu.attend

    def watched(*args):
        ran.append(args[0].dtype)
        return run(*args)

    monkeypatch.setattr(attend_cpu, "attend", watched)
    queries, keys, values = heads(1, 2, 2, 40, 16)
    selection = Selection.tokens(torch.arange(8).expand(1, 2, -1))
    for dtype in (*DTYPES, torch.float64):
        attend(queries[:, :, :, 0].to(dtype), keys.to(dtype), values.to(dtype), selection)
    attend(queries[:, :, :, 0], keys.mT.contiguous().mT, values, selection)
    learned = keys.clone().requires_grad_()
    attend(queries[:, :, :, 0], learned, values, selection)[0].sum().backward()
    assert learned.grad is not None
    assert ran == list(DTYPES)


def test_scores_keep_gradients() -> None:
    queries, keys, values = heads(1, 2, 3, 40, 16)
    query = queries[:, :, :, 0].requires_grad_()
    bounds = PageBounds(keys, values.maximum(keys), torch.ones(1, 40, dtype=torch.bool))
    ids = torch.arange(8, dtype=torch.int32).expand(1, 6, -1)
    for scores in (page_scores(query, bounds, "max"), listed_scores(query, keys, ids)):
        (gradient,) = torch.autograd.grad(scores.sum(), query)
        assert bool(gradient.any())


def test_layouts_and_sizes_do_not_compile_anew() -> None:
    kernels, compiled = (attend_cpu.attend_lists, page_bounds_cpu.score_pages), []
    for batch, kv, group, rows, slots in ((1, 2, 4, 50, 3), (3, 1, 1, 9, 1), (2, 3, 5, 200, 12)):
        queries, keys, values = heads(batch, kv, group, rows, 16)
        ids = torch.arange(slots).expand(batch, kv, -1)
        bounds = Bounds(*(x.expand(batch) if isinstance(x, Tensor) else x for x in (torch.tensor(1).int(), 1,
                        torch.tensor(rows - 2).int(), torch.tensor(rows).int())))  # fmt: skip
        attend(queries[:, :, :, 0], spare(keys), spare(values), Selection.pages(ids, 4), bounds, impl="numba")
        real = torch.ones(batch, rows + 5, dtype=torch.bool)[:, :rows]
        page_scores(queries[:, :, :, 0], PageBounds(spare(keys), spare(values), real), "max", impl="numba")
        compiled.append([len(kernel.signatures) for kernel in kernels])
    assert compiled == [compiled[0]] * 3
    assert min(compiled[0]) > 0


@pytest.mark.parametrize("group", GROUPS)
@COMPILED
@pytest.mark.parametrize(("served", "pages", "size"), [(4, 700, 64), (3, 40, 80), (1, 1, 1), (5, 3, 256)])
def test_page_scores_are_the_specification(group: str, dtype: torch.dtype, served: int, pages: int, size: int) -> None:
    queries, least, more = heads(3, 2, served, pages, size, dtype)
    low, high = least, torch.maximum(least, more)
    real = torch.rand(3, pages) < 0.8
    real[2] = False
    low, high = (spare(x.masked_fill(~real[:, None, :, None], torch.nan)) for x in (low, high))
    query = queries[:, :, :, 0]
    expected = page_scores(query.double(), PageBounds(low.double(), high.double(), real), group, impl="torch")
    bound = 8 * served * size * 2.0**-24 * float(query.abs().max()) * float(high.nan_to_num().abs().max()) + 1e-6
    for impl in ("torch", "numba"):
        got = page_scores(query, PageBounds(low, high, real), group, impl=impl)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("group", GROUPS)
@COMPILED
def test_page_scores_of_int8_bounds_are_those_of_what_they_stand_for(group: str, dtype: torch.dtype) -> None:
    low, high = torch.randint(-127, 128, (2, 3, 2, 300, 64), dtype=torch.int8).sort(0).values
    step, real = torch.rand(3, 2, 64), torch.rand(3, 300) < 0.8
    query = torch.randn(3, 2, 4, 64).to(dtype)
    wide = [(x * step[:, :, None]).double() for x in (low, high)]
    expected = page_scores(query.double(), PageBounds(*wide, real), group, impl="torch")
    for impl in ("torch", "numba"):
        padded = (torch.nn.functional.pad(x, (0, 0, 0, 5), value=99)[:, :, :300] for x in (low, high))
        got = page_scores(query, PageBounds(*padded, real, step), group, impl=impl)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("group", GROUPS)
def test_page_scores_take_queries_in_the_order_of_a_model(group: str) -> None:
    """`[B,n,H,D]` seen as `[B,H,G,D]`, which torch's arithmetic leaves as it lies."""
    query = torch.randn(2, 4, 3, 16).transpose(1, 2)
    low, high = torch.randn(2, 2, 3, 9, 16).sort(0).values
    real = torch.ones(2, 9, dtype=torch.bool)
    got, expected = (page_scores(query, PageBounds(low, high, real), group, impl=impl) for impl in ("numba", "torch"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "count"), [(1, 1), (4, 700), (5, 33), (17, 64)])
def test_the_softmax_vote_is_the_specification(group: str, count: int) -> None:
    scores = torch.randn(3, 2, group, count) * 40
    scores[torch.rand(scores.shape) < 0.2] = -torch.inf
    scores[1, 0], scores[2, 1, 0] = -torch.inf, -torch.inf
    probabilities = scores.double().softmax(-1).nan_to_num(0)
    logs = torch.where(scores.isneginf(), -torch.inf, scores.double() - scores.double().logsumexp(-1, keepdim=True))
    expected = logs.nan_to_num(neginf=-torch.inf, nan=-torch.inf).logsumexp(2)
    held = scores.clone()
    for impl in ("torch", "numba"):
        got = vote(scores, "softmax", impl)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(got.double().exp(), probabilities.sum(2), rtol=1e-3, atol=1e-6)
    assert torch.equal(scores, held)
    assert vote(scores.double(), "softmax").dtype == torch.float64


@pytest.mark.parametrize("kind", ["random", "ties", "few", "none", "signs"])
@pytest.mark.parametrize("count", [0, 1, 37, 4000])
def test_best_pages_have_the_highest_scores(kind: str, count: int) -> None:
    scores = torch.randn(2, 3, 2500)
    if kind == "ties":
        scores = scores.round()
    if kind == "few":
        scores = scores.masked_fill(torch.rand(scores.shape) < 0.99, -torch.inf)
    if kind == "none":
        scores = torch.full_like(scores, -torch.inf)
    if kind == "signs":
        scores = (scores * 40).exp() * scores.sign()
    start, length = best_pages(scores, count, 16)
    assert start.shape == (2, 3, min(count, 2500))
    assert start.dtype == length.dtype == torch.int32
    for b in range(2):
        for h in range(3):
            ids = (start[b, h][length[b, h] > 0] // 16).long()
            assert len(set(ids.tolist())) == len(ids)
            most = scores[b, h][~scores[b, h].isneginf()].sort(descending=True).values[:count]
            assert torch.equal(scores[b, h][ids].sort(descending=True).values, most)
    assert set(length.flatten().tolist()) <= {0, 16}


@COMPILED
@pytest.mark.parametrize(("many", "outputs", "size"), [(4, 300, 128), (1, 5, 7), (6, 1, 64), (3, 129, 33)])
def test_linear_is_the_specification(dtype: torch.dtype, many: int, outputs: int, size: int) -> None:
    x, weight, bias = torch.randn(3, many, size), torch.randn(3, outputs, size).to(dtype), torch.randn(3, outputs)
    for relu in (False, True):
        for offset in (bias, None):
            right = x.double() @ weight.double().mT + (0 if offset is None else offset.double()[:, None])
            right = right.relu() if relu else right
            for impl in ("torch", "numba"):
                got = linear(x, weight, offset, relu, impl=impl)
                torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-4)


def test_linear_learns_where_it_is_asked_to() -> None:
    weight = torch.randn(1, 4, 8, requires_grad=True)
    linear(torch.randn(1, 2, 8), weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("span", [1, 4, 16])
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize(("visited", "segments", "budget", "slots"), [(5, 3, 999, 400), (5, 3, 37, 52), (9, 1, 1, 9)])
def test_bucket_spans_are_those_of_the_runs(
    span: int, each: int, visited: int, segments: int, budget: int, slots: int
) -> None:
    sizes = torch.randint(0, 9, (2, 2, segments, 12)) ** 2
    edges = torch.nn.functional.pad(sizes.flatten(2).cumsum(-1), (1, 0)).int()
    table = torch.stack([edges[:, :, r * 12 : r * 12 + 13] for r in range(segments)], 2)
    ids = torch.rand(2, 2 * each, 11).argsort(-1)[..., :visited]
    got = bucket_spans(ids, table, span, budget, slots, impl="numba")
    expected = bucket_spans(ids, table, span, budget, slots, impl="torch")
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[0] * (got[1] > 0), expected[0] * (expected[1] > 0))
    for b in range(2):
        for s in range(2 * each):
            rows = []
            for bucket in ids[b, s].tolist():
                for segment in table[b, s // each].tolist():
                    rows += range(segment[bucket], segment[bucket + 1])
            named = [r for first, n in zip(got[0][b, s].tolist(), got[1][b, s].tolist(), strict=True)
                     for r in range(first, first + n)]  # fmt: skip
            assert named == rows[:budget][: len(named)]
            assert len(named) == min(budget, len(rows)) or slots < budget // span + visited * segments


@COMPILED
def test_listed_scores_are_the_specification(dtype: torch.dtype) -> None:
    queries, keys, _ = heads(2, 2, 3, 300, 80, dtype)
    ids = torch.randint(-1, 300, (2, 6, 200), dtype=torch.int32).sort(-1).values
    unlisted = torch.ones(2, 2, 301, dtype=torch.bool).scatter_(2, ids.view(2, 2, -1).long() + 1, False)[..., 1:]
    query, keys = queries[:, :, :, 0], spare(keys.masked_fill(unlisted[..., None], torch.nan))
    got, expected = (listed_scores(query, keys, ids, impl=impl) for impl in ("numba", "torch"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    each = [sorted(set(row) - {-1}) for row in ids.flatten(0, 1).tolist()]
    assert (~got.isneginf()).sum(-1).flatten().tolist() == [len(rows) for rows in each]


def test_quest_chooses_the_same_pages_in_torch_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseattn import KVCache

    queries, keys, values = heads(2, 2, 4, 900, 64)
    cache = KVCache(Quest(), sink=4, window=8)
    cache.append(keys, values)
    query = queries[:, :, :, 5]
    one = cache.select(query, 160)
    monkeypatch.setattr(implementations, "choose", implementations.choose.__wrapped__)  # what it has found is kept
    monkeypatch.setattr(implementations, "_missing_numba", lambda: "off")
    other = cache.select(query, 160)
    assert torch.equal(one.mask(900), other.mask(900))


def test_attend_takes_queries_in_the_order_of_a_model() -> None:
    query, (keys, values) = torch.randn(2, 4, 3, 16).transpose(1, 2), torch.randn(2, 2, 3, 40, 16)
    selection = Selection.tokens(torch.randint(0, 40, (2, 3, 1)))
    got, expected = (attend(query, keys, values, selection, impl=impl)[0] for impl in ("numba", "reference"))
    torch.testing.assert_close(got, expected)
