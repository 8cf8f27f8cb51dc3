"""gather and numba's code equal reference equals float64; merge of any partition equals the whole. Triton has its own
file, but for logits that are all -inf, of which all four are asked."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from sparseattn import Bounds, Selection, attend, merge
from sparseattn.kernels.attend import dispatch
from sparseattn.kernels.attend.dispatch import ATTEND
from sparseattn.kernels.implementations import FILES, why_not_numba, why_not_triton
from tests.cases import heads

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}


# Of query lanes that make up Triton's tile: their zeros times infinite keys are NaN, which numpy says and nobody reads.
PADDED = pytest.mark.filterwarnings("ignore:(invalid value encountered|All-NaN slice):RuntimeWarning")
RUN = [
    *("reference", "gather"),
    *["numba"] * (why_not_numba(torch.device("cpu"), torch.float32) is None),
    *["triton"] * (why_not_triton(torch.device("cpu"), torch.float32) is None),
]


def tolerance(dtype: torch.dtype, size: int, rows: int, logit: float, value: float) -> float:
    """An absolute bound of the error against float64 on the same inputs.

    Sums run in float32 (u = 2^-24; float64's own u for float64): a logit of D products errs by at most (D + 2) u times
    the sum of their magnitudes, bounded here by `logit`; an error d of the logits changes every weight by a factor
    within exp(2 d); the weighted sum of N values adds (N + 2) u. Then the result is rounded once to the dtype.
    """
    u = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    return value * (2 * (size + 2) * u * logit + (rows + 2) * u + UNIT[dtype]) * 2


def random_selection(
    batch: int, chosen: int, zone: int, span: int, slots: int, draw: torch.Generator, biased: bool = False
) -> Selection:
    """Disjoint spans at random aligned places of `zone` rows, of random lengths, some slots unused; a bias of theirs is
    NaN, as it means nothing."""
    places = max(zone // span, 1) + 2
    slots = min(slots, places)
    # Places may lie past the sealed zone: bounds, not selections, limit what is read.
    order = torch.rand(batch, chosen, places, generator=draw).argsort(-1)[..., :slots]
    length = torch.randint(0, span + 1, (batch, chosen, slots), generator=draw)
    bias = 3 * torch.randn(length.shape, generator=draw) if biased else None
    bias = None if bias is None else bias.masked_fill(length == 0, torch.nan)
    return Selection((order * span).int(), length.int(), span, bias=bias)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    kv=st.integers(1, 3),
    group=st.integers(1, 16),
    size=st.sampled_from([1, 32, 63, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    rows=st.sampled_from([0, 1, 2, 63, 64, 403]),
    span=st.sampled_from([1, 4, 16, 64]),
    slots=st.sampled_from([0, 1, 7, 40]),
    per_query_head=st.booleans(),
    sink=st.integers(0, 5),
    strided=st.booleans(),
    biased=st.booleans(),
)
def test_every_implementation_equals_float64(
    seed, batch, kv, group, size, dtype, rows, span, slots, per_query_head, sink, strided, biased
) -> None:
    draw = torch.Generator().manual_seed(seed)
    _, keys, values = heads(batch, kv, group, rows, size, dtype, seed)
    query = torch.randn(batch, kv, group, size, generator=draw).to(dtype)
    base = min(sink, rows)
    zone = torch.randint(0, rows - base + 1, (1,), generator=draw)
    bounds = Bounds(
        torch.randint(0, base + 1, (batch,), generator=draw, dtype=torch.int32),
        base,
        (base + zone).int().expand(batch),
        (base + zone + torch.randint(0, rows - base - int(zone) + 1, (batch,), generator=draw)).int(),
    )
    selection = random_selection(batch, kv * group if per_query_head else kv, int(zone), span, slots, draw, biased)
    exact, exact_lse = attend(query.double(), keys.double(), values.double(), selection, bounds, impl="reference")

    # Storage that nobody names holds NaN, as torch.empty may; every name is honoured or the result shows it.
    from sparseattn.kernels.attend.reference import named

    unread = ~named(selection, bounds, kv, rows).any(2)[..., None]
    keys, values = keys.masked_fill(unread, torch.nan), values.masked_fill(unread, torch.nan)
    if strided:
        wide = torch.full((2, batch, kv, rows + 9, size), torch.nan, dtype=dtype)
        wide[0, :, :, :rows], wide[1, :, :, :rows] = keys, values
        keys, values = wide[0, :, :, :rows], wide[1, :, :, :rows]
    peak = [float(x.nan_to_num().abs().double().max()) if x.numel() else 0.0 for x in (query, keys, values)]
    bias = torch.zeros(1) if selection.bias is None or not selection.bias.numel() else selection.bias.nan_to_num()
    bound = tolerance(dtype, size, rows, peak[0] * peak[1] * size**0.5 + float(bias.abs().max()), peak[2])
    for impl in ("gather", "reference", *(("numba",) if why_not_numba(query.device, dtype) is None else ())):
        out, lse = attend(query, keys, values, selection, bounds, impl=impl)
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=bound + 1e-6)
        empty = exact_lse.isneginf()
        assert bool((out[empty] == 0).all())


@pytest.mark.parametrize("chosen", [2, 6])
def test_a_bias_is_added_to_the_logits_of_its_rows(chosen: int) -> None:
    """The specification, and the defaults here, against a plain softmax; rows of sink and window have no bias, not even
    one that a span reaches."""
    queries, keys, values = (x.double() for x in heads(1, 2, 3, 50, 16))
    query, draw = queries[:, :, :, 0], torch.Generator().manual_seed(1)
    start = torch.tensor([0, 24, 8]).int().expand(1, chosen, -1)
    length = torch.tensor([8, 8, 3]).int().expand(1, chosen, -1)
    bias = 2 * torch.randn(1, chosen, 3, generator=draw)
    bounds = Bounds.of(1, 50, sink=2, sealed=30)
    logits = query @ keys.mT / 4
    added = torch.full((1, chosen, 50), -torch.inf, dtype=torch.float64)
    added[..., :2] = added[..., 30:] = 0
    for slot, rows in enumerate((slice(2, 10), slice(26, 30), slice(10, 13))):  # the second reaches into the window
        added[..., rows] = bias[..., slot, None].double()
    logits = logits + added.unflatten(1, (2, -1))
    right, right_lse = logits.softmax(-1) @ values, logits.logsumexp(-1)
    selection = Selection(start, length, 8, bias=bias)
    for impl in ("reference", "gather"):
        out, lse = attend(query, keys, values, selection, bounds, impl=impl)
        torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, right_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", RUN)
@pytest.mark.parametrize(("chosen", "paged"), [(2, False), (2, True), (6, False), (6, True)])
def test_weights_are_the_softmax_over_everything_attended(impl: str, chosen: int, paged: bool) -> None:
    """Against a plain softmax in float64; unused places, and rows of a span that the window has, are 0. Rows that
    nobody names are NaN. Of the two sequences one reads nothing."""
    queries, keys, values = heads(2, 2, 3, 48, 16)
    query, draw = queries[:, :, :, 0], torch.Generator().manual_seed(1)
    start = torch.tensor([0, 24, 8, 1_000_000]).int().expand(2, chosen, -1)
    length = torch.tensor([8, 8, 3, 0]).int().expand(2, chosen, -1)
    bias = 2 * torch.randn(2, chosen, 4, generator=draw).masked_fill(length == 0, torch.nan)
    bounds = Bounds(*(torch.tensor(part).int() if part != 2 else 2 for part in ([2, 0], 2, [30, 0], [48, 0])))
    slots = ((0, slice(2, 10)), (1, slice(26, 30)), (2, slice(10, 13)))
    added = torch.full((chosen, 48), -torch.inf, dtype=torch.float64)
    added[..., :2] = added[..., 30:] = 0
    for slot, rows in slots:
        added[..., rows] = bias[0, :, slot, None].double()
    unread = (added[0] == -torch.inf)[:, None]
    logits = query[:1].double() @ keys[:1].double().mT / 4 + added.unflatten(0, (2, -1))
    by_row = logits.softmax(-1).flatten(0, 2)  # [Hq,N]
    right = torch.zeros(6, 4, 8, dtype=torch.float64)
    for slot, rows in slots:
        right[:, slot, : rows.stop - rows.start] = by_row[:, rows]
    keys, values = (x.masked_fill(unread, torch.nan) for x in (keys, values))
    selection, table = Selection(start, length, 8, bias=bias), None
    given = query, keys, values, selection, bounds
    plain = attend(*given, impl=impl)
    if paged:  # [blocks,H,8,D]
        keys, values = (x.unflatten(2, (-1, 8)).transpose(1, 2).flatten(0, 1).contiguous() for x in (keys, values))
        table = torch.arange(12, dtype=torch.int32).view(2, 6)
        given = query, keys, values, selection, bounds
    out, lse, weights = attend(*given, impl=impl, block_table=table, weights=True)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[0].double(), right, rtol=1e-4, atol=1e-6)
    assert bool((weights[1] == 0).all())
    for got, without in zip((out, lse), plain, strict=True):
        torch.testing.assert_close(got, without)


@pytest.mark.parametrize("impl", RUN)
def test_weights_of_nothing_are_none(impl: str) -> None:
    query, rows = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 9, 16)
    assert attend(query, rows, rows, Selection.none(1, 2), impl=impl, weights=True)[2].shape == (1, 6, 0, 1)
    named = Selection.tokens(torch.arange(2).expand(1, 2, -1))
    assert attend(query, rows[:, :, :0], rows[:, :, :0], named, impl=impl, weights=True)[2].tolist() == [
        [[[0], [0]]] * 6
    ]


LOST = [slice(0, 0), slice(0, 96), slice(64, 128), slice(96, 160), slice(0, 159), slice(0, 160)]
FORMS = [(torch.float32, 1, False), (torch.float32, 5, True), (torch.float16, 5, False)]


@PADDED
@pytest.mark.parametrize(
    ("impl", "dtype", "parts", "paged", "lost"),
    [  # the interpreter of Triton takes its time for 5 parts: in the fast run the two forms of them take turns
        pytest.param(
            *(impl, *form, lost),
            marks=[pytest.mark.slow] * (impl == "triton" and form[1] == 5 and (at + form[2]) % 2),
        )
        for impl in RUN
        for form in FORMS
        for at, lost in enumerate(LOST)
    ],
    ids=str,
)
def test_logits_of_minus_infinity_weigh_nothing(
    impl: str, dtype: torch.dtype, parts: int, paged: bool, lost: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles, whole parts and whole heads of them, between others: as if the rows were not named; alone, 0 and
    -inf. Sequence 1 has none. The rows are 16 of a sink, 128 selected and 16 recent ones, in 1 or 5 parts."""
    queries, keys, values = heads(2, 1, 5, 160, 16, dtype)
    query = queries[:, :, :, 0].abs() + 0.1
    keys[0, 0, lost, 3] = -torch.inf
    keys[0, 0, lost, 5] = -torch.finfo(dtype).max
    bounds = Bounds.of(2, 160, sink=16, sealed=144)
    selection = Selection.pages(torch.arange(8).expand(2, 1, -1), 16)
    kept = torch.ones(160, dtype=torch.bool)
    kept[lost] = False
    at = kept.nonzero()[:, 0].expand(1, 1, -1)
    exact = [x.double() for x in (query, keys, values)]
    first = attend(*(x[:1] for x in exact), Selection.tokens(at), impl="reference")
    second = attend(*(x[1:] for x in exact), Selection(selection.start[1:], selection.length[1:], 16),
                    Bounds.of(1, 160, sink=16, sealed=144), impl="reference")  # fmt: skip
    if impl == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        monkeypatch.setattr(attend_cpu, "PARTS", 2 * parts)  # of two lists
        monkeypatch.setattr(attend_cpu, "PART_ROWS", 1)
    elif impl == "triton":
        from sparseattn.kernels.attend import gpu as attend_gpu

        monkeypatch.setattr(attend_gpu, "_splits", lambda *_: parts)
    table = None
    if paged:  # [blocks,H,8,D]
        keys, values = (x.unflatten(2, (-1, 8)).transpose(1, 2).flatten(0, 1).contiguous() for x in (keys, values))
        table = torch.arange(40, dtype=torch.int32).view(2, 20)
    out, lse = attend(query, keys, values, selection, bounds, impl=impl, block_table=table)
    for b, (right, right_lse) in enumerate((first, second)):
        torch.testing.assert_close(out[b].double(), right[0], rtol=0, atol=2e-5 if dtype == torch.float32 else 4e-3)
        torch.testing.assert_close(lse[b].double(), right_lse[0], rtol=1e-5, atol=1e-5)
    if lost == slice(0, 160):
        assert bool((out[0] == 0).all())
        assert bool(lse[0].isneginf().all())


@PADDED
@pytest.mark.parametrize("impl", RUN)
def test_a_row_that_is_no_number_shows_among_logits_of_minus_infinity(impl: str) -> None:
    queries, keys, values = heads(1, 1, 5, 100, 16)
    keys[..., 3], keys[0, 0, 50] = -torch.inf, torch.nan
    everything = Selection.tokens(torch.arange(100).expand(1, 1, -1))
    out, lse = attend(queries[:, :, :, 0].abs() + 0.1, keys, values, everything, impl=impl)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.integers(1, 6), rows=st.sampled_from([1, 5, 63]))
def test_merge_of_any_partition_is_the_whole(seed: int, parts: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    queries, keys, values = (x.double() for x in heads(2, 2, 3, rows, 32, seed=seed))
    owner = torch.randint(0, parts, (rows,), generator=draw)
    outs, lses = [], []
    for part in range(parts):
        ids = (owner == part).nonzero()[:, 0].expand(2, 2, -1)
        out, lse = attend(queries[:, :, :, 0], keys, values, Selection.tokens(ids))
        outs.append(out)
        lses.append(lse)
    everything = Selection.tokens(torch.arange(rows).expand(2, 2, -1))
    whole, whole_lse = attend(queries[:, :, :, 0], keys, values, everything)
    out, lse = merge(torch.stack(outs), torch.stack(lses))
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_merge_of_nothing_is_nothing() -> None:
    out, lse = merge(torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf))
    assert bool((out == 0).all())
    assert bool(lse.isneginf().all())
    with pytest.raises(ValueError, match=r"\[P,...,D\]"):
        merge(torch.zeros(3, 2, 8), torch.zeros(3, 3))


def test_one_selection_for_a_group_equals_the_same_for_each_of_its_heads() -> None:
    queries, keys, values = heads(2, 2, 4, 100, 64)
    ids = torch.stack([torch.randperm(100)[:20] for _ in range(4)]).view(2, 2, 20)
    joint = attend(queries[:, :, :, 0], keys, values, Selection.tokens(ids))
    apart = attend(queries[:, :, :, 0], keys, values, Selection.tokens(ids.repeat_interleave(4, 1)))
    for a, b in zip(joint, apart, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"query": np.zeros((1, 2, 2, 64), np.float32)},
            r"query is .* a numpy.ndarray: torch.from_numpy\(query\)",
        ),
        ({"keys": [[0.0]]}, r"keys is a torch.Tensor, got a list: torch.tensor\(keys\)"),
        ({"values": None}, "values is a torch.Tensor, got None"),
        ({"query": torch.zeros(1, 2, 64)}, r"query \[B,H,G,D\]"),
        ({"query": torch.zeros(1, 3, 2, 64)}, "agree in B, H and D"),
        ({"values": torch.zeros(1, 2, 9, 64)}, r"\[B,H,N,D\]"),
        ({"query": torch.zeros(1, 2, 2, 64, dtype=torch.float16)}, "share one dtype"),
        ({"selection": Selection.tokens(torch.zeros(1, 3, 1, dtype=torch.int64))}, "Hs = 2"),
        ({"impl": "fast"}, "impl is one of reference, gather, numba, triton"),
        ({"scale": math.nan}, r"scale is a finite number, or None for 1/sqrt\(D\), got nan"),
        ({"scale": -math.inf}, "a finite number.*, got -inf"),
        ({"scale": "1"}, "a finite number.*, got '1'"),
        ({"query": torch.zeros(1, 2, 0, 64)}, r"one query head of each KV head or more \(G\), got \[1, 2, 0, 64\]"),
        ({"bounds": Bounds.of(1, 10, sink=11)}, "bounds.sink lies within the 10 rows"),
        ({"bounds": Bounds.of(1, 20)}, "bounds.sealed lies within the 10 rows"),
        ({"bounds": Bounds.of(2, 10)}, r"int32 \[B\] = \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides(change: dict, sentence: str) -> None:
    good = {
        "query": torch.zeros(1, 2, 2, 64),
        "keys": torch.zeros(1, 2, 10, 64),
        "values": torch.zeros(1, 2, 10, 64),
        "selection": Selection.tokens(torch.zeros(1, 2, 1, dtype=torch.int64)),
    }
    with pytest.raises(ValueError, match=sentence):
        attend(**{**good, **change})


@pytest.mark.parametrize("impl", RUN)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.3, 1])
def test_a_scale_may_be_any_finite_number(impl: str, scale: float) -> None:
    queries, keys, values = heads(1, 2, 3, 90, 16)
    query, everything = queries[:, :, :, 0], Selection.tokens(torch.arange(90).expand(1, 2, -1))
    right = attend(query.double(), keys.double(), values.double(), everything, scale=scale, impl="reference")
    for got, wanted in zip(attend(query, keys, values, everything, scale=scale, impl=impl), right, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", RUN)
@pytest.mark.parametrize(("batch", "kv"), [(0, 2), (1, 0)])
def test_no_sequence_and_no_head_give_nothing(impl: str, batch: int, kv: int) -> None:
    query, keys, values = torch.zeros(batch, kv, 3, 16), *torch.zeros(2, batch, kv, 90, 16)
    chosen = Selection.tokens(torch.zeros(batch, kv, 5, dtype=torch.int64))
    out, lse, weights = attend(query, keys, values, chosen, impl=impl, weights=True)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]
    assert weights.shape == (batch, kv * 3, 5, 1)
    assert [x.shape for x in attend(query, keys, values, chosen, impl=impl)] == [out.shape, lse.shape]


def test_the_table_of_implementations_names_their_files() -> None:
    files = {"reference": "reference", "gather": "gather", "numba": "cpu", "triton": "gpu"}
    assert set(ATTEND.names) == files.keys()
    for name, file in files.items():
        assert (Path(dispatch.__file__).parent / f"{file}.py").exists()
        assert FILES[name] == file


def test_a_head_size_above_256_is_refused() -> None:
    big = torch.zeros(1, 1, 4, 257)
    with pytest.raises(ValueError, match="1 to 256, got 257"):
        attend(big[:, :, :2], big, big, Selection.none(1, 1))


def test_gather_costs_what_the_budget_costs() -> None:
    """Products counted by torch: the same at 16 times the context, and those of the rows read."""
    counted = []
    for rows in (500, 8000):
        queries, keys, values = heads(1, 2, 4, 1, 64)
        keys, values = torch.randn(2, 1, 2, rows, 64)
        selection = Selection.pages(torch.arange(6).expand(1, 2, -1), 16)
        bounds = Bounds.of(1, rows, sink=4, sealed=rows - 10)
        with FlopCounterMode(display=False) as flops:
            attend(queries[:, :, :, 0], keys, values, selection, bounds, impl="gather")
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] == 2 * (2 * 2 * 4 * 64 * (6 * 16 + 4 + 10))


def test_large_logits_keep_their_precision() -> None:
    """Weights sum to 1 even where exp(logit - lse) would not: an average of equal values is that value."""
    query, keys = torch.full((1, 1, 1, 64), 60000.0).half(), torch.full((1, 1, 16, 64), 60000.0).half()
    values = torch.full((1, 1, 16, 64), 6e4).half()
    everything = Selection.tokens(torch.arange(16).expand(1, 1, -1))
    for impl in ("gather", "reference", None):
        out, _ = attend(query, keys, values, everything, impl=impl)
        torch.testing.assert_close(out, values[:, :, :1])


def test_rows_expanded_from_one_are_taken() -> None:
    one = torch.randn(1, 2, 1, 64)
    rows = one.expand(1, 2, 9, 64)
    out, _ = attend(one, rows, rows, Selection.tokens(torch.arange(9).expand(1, 2, -1)))
    torch.testing.assert_close(out, one)
