"""Selection: its constructors name exactly the rows they are given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseattn import Bounds, Selection


def test_tokens_and_pages_name_their_rows() -> None:
    ids = torch.tensor([[[5, -1, 0, 7]]])
    tokens = Selection.tokens(ids)
    assert tokens.rows.tolist() == [[[5, -1, 0, 7]]]
    assert tokens.attended.tolist() == [[3]]
    pages = Selection.pages(torch.tensor([[[2, -1]]]), 4, bias=torch.tensor([[[0.5, torch.nan]]]))
    assert pages.row_bias(11).tolist() == [[[0] * 8 + [0.5] * 3]]
    assert pages.rows.tolist() == [[[8, 9, 10, 11, -1, -1, -1, -1]]]
    assert pages.mask(10).nonzero()[:, 2].tolist() == [8, 9]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=3),
    span=st.sampled_from([1, 2, 8, 16]),
    budget=st.integers(1, 130),
)
def test_runs_are_cut_in_order_until_the_budget(lengths: list[list[int]], span: int, budget: int) -> None:
    length = torch.tensor(lengths)[None]  # [1,Hs,3]
    start = (torch.tensor([200, 0, 100])).expand_as(length)
    selection = Selection.runs(start, length, span, budget, bias=(start // 100).float())
    assert selection.start.shape[2] == budget // span + 3
    for head, row_lengths in enumerate(lengths):
        wanted = [s + i for s, n in zip([200, 0, 100], row_lengths, strict=True) for i in range(n)][:budget]
        rows = selection.rows[0, head]
        assert rows[rows >= 0].tolist() == wanted
        assert [round(selection.row_bias(240)[0, head, row].item()) for row in wanted] == [row // 100 for row in wanted]
    assert bool((selection.length >= 0).all())
    assert bool((selection.length <= span).all())


def test_no_runs_are_no_rows() -> None:
    nothing = torch.zeros(1, 2, 0, dtype=torch.int64)
    assert Selection.runs(nothing, nothing, 4, 10).rows.numel() == 0
    with pytest.raises(ValueError, match="power of two"):
        Selection.runs(nothing, nothing, 0, 10)


def test_bounds_name_sink_and_recent_rows() -> None:
    bounds = Bounds.of(2, 10, sink=2, sealed=7)
    assert bounds.dense(10).tolist() == [[True, True] + [False] * 5 + [True] * 3] * 2
    assert Bounds.of(1, 10).dense(10).sum() == 0, "by default every row is selectable"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda i: Selection(i, i[:, :, :1], 1), r"both \[B,Hs,S\]"),
        (lambda i: Selection(i.long(), i.long(), 1), "int32"),
        (lambda i: Selection(i, i, 3), "power of two"),
        (
            lambda i: Selection(i, i, 1, bias=i),
            r"bias is float32 \[B,Hs,S\] = \[1, 2, 3\], got torch.int32 \[1, 2, 3\]",
        ),
        (lambda i: Selection(i, i, 1, bias=i[..., :1].float()), r"got torch.float32 \[1, 2, 1\]"),
        (lambda i: Selection(i[0], i[0], 1), r"\[B,Hs,S\]"),
    ],
)
def test_malformed_selections_are_refused(build, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(torch.zeros(1, 2, 3, dtype=torch.int32))
