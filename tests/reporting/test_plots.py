"""Pictures: lines are told apart, named at their ends without overlap, and means over few prompts have intervals."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseattn.evaluation import intervals
from sparseattn.evaluation.result import Evaluation
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting import line_style
from sparseattn.reporting.replay_tables import figure_names

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from matplotlib.text import Text

from sparseattn.reporting import plots


def test_a_figure_has_its_traces_whole_name_and_no_other_has_it() -> None:
    given = ["a/x.safetensors-2", "x", "x-2", "x", "qwen2.5-a", "qwen2.7-b"]
    assert figure_names(given, "f") == [
        *("f-x.safetensors-2.png", "f-x.png", "f-x-2.png", "f-x-3.png", "f-qwen2.5-a.png", "f-qwen2.7-b.png")
    ]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved while a test runs."""
    made: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (made.append(self), save(self, *a, **k)))
    return made


def test_ten_lines_have_ten_colours_and_markers_and_a_hundred_no_twin() -> None:
    ten = [line_style.style(n, "") for n in range(10)]
    assert len({one["color"] for one in ten}) == len({one["marker"] for one in ten}) == 10
    assert len({(one["color"], one["marker"]) for one in (line_style.style(n, "") for n in range(100))}) == 100


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(st.floats(0, 1), min_size=1, max_size=12).map(sorted),
    height=st.sampled_from([0.01, 0.05, 0.08, 0.2]),
    tall=st.integers(0, 11),
)
def test_names_never_overlap_and_stay_in_the_panel_where_there_is_room(
    wanted: list[float], height: float, tall: int
) -> None:
    heights = [height * (2 if i == tall else 1) for i in range(len(wanted))]
    found = line_style.apart(wanted, heights)
    for (low, a), (high, b) in pairwise(zip(found, heights, strict=True)):
        assert high - low >= (a + b) / 2 - 1e-9
    if sum(heights) < 1:
        assert found[0] - heights[0] / 2 >= -1e-9
        assert found[-1] + heights[-1] / 2 <= 1 + 1e-9
    if all(b - a > 2 * height for a, b in pairwise(wanted)) and wanted[0] > height and wanted[-1] < 1 - height:
        assert found == pytest.approx(wanted), "what does not touch stays"


def measured(method: str, budget: int, mass: float) -> Evaluation:
    shares = {"bytes_share": budget / 100, "attended": budget, "mass": mass, "relative_error": 1 - mass}
    heads = {name: torch.full((1, 1), float(value), dtype=torch.float64) for name, value in shares.items()}
    facts = {"tokens": 300, "last": 4, "sink": 2, "window": 8}
    return Evaluation("trace", method, method, budget, facts, (0,), heads)


def test_every_line_is_named_beside_its_panel_and_no_two_names_touch(tmp_path: Path, drawn: list[Figure]) -> None:
    """Twelve methods that end at one point, the worst there is."""
    methods = [f"Method{n}(argument='value')" for n in range(12)]
    results = [measured(one, budget, 0.9) for one in methods for budget in (10, 20)]
    plots.frontier(results, tmp_path / "f.png")
    (figure,) = drawn
    assert not figure.legends
    assert [axis.get_xlabel() for axis in figure.axes[2:]] == [
        "bytes read (% of cache)",
        "rows attended per query head",
    ]
    figure.draw_without_rendering()  # at the resolution of its own, as all boxes below
    whole = figure.bbox
    for axis in figure.axes:
        assert sorted(text.get_text() for text in axis.texts) == sorted(map(line_style.broken, methods))
        boxes = sorted((Text.get_window_extent(text) for text in axis.texts), key=lambda box: box.y0)
        for low, high in pairwise(boxes):
            assert high.y0 >= low.y1 - 1
        for box in boxes:
            assert box.x0 > axis.bbox.x1
            assert whole.x0 <= box.x0 < box.x1 <= whole.x1, "not cut off"


def test_an_svg_has_text_and_every_colour_of_a_line_in_the_dark(tmp_path: Path) -> None:
    """All ten colours that lines have, ink and paper; what is filled in black has the ink of the theme."""
    results = [measured(f"Method{n}", budget, 0.9 - n / 100) for n in range(10) for budget in (10, 20)]
    plots.frontier(results, tmp_path / "f.svg")
    tree = ElementTree.parse(tmp_path / "f.svg")
    svg = "{http://www.w3.org/2000/svg}"
    texts = ["".join(one.itertext()) for one in tree.iter(f"{svg}text")]
    assert {"Method0", "Method9", "attention mass"} <= set(texts)
    rules = next(tree.iter(f"{svg}style")).text or ""
    light, _, dark = rules.partition("@media (prefers-color-scheme:dark)")
    drawn = set(re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", (tmp_path / "f.svg").read_text()))
    assert drawn >= {colour.lower() for colour in line_style.COLOURS}
    assert all(f": {colour}" in dark for colour in drawn), "a colour stays as it is in the dark"
    for number, colour in enumerate(line_style.COLOURS):
        if colour != "#000000":  # which is ink, too
            assert f'[style*="stroke: {colour.lower()}"]{{stroke:{line_style.DARK[number]}!important}}' in dark
    assert "svg{fill:" in light
    assert "svg{fill:" in dark


def test_one_method_at_one_budget_is_drawn_without_a_warning(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.frontier([measured("window", 10, 0.9)], tmp_path / "f.png")
    assert [text.get_text() for axis in drawn[0].axes for text in axis.texts] == ["window"] * 4


def test_a_line_without_a_point_in_the_panel_has_no_name() -> None:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([1, 2], [torch.nan, torch.nan], label="nothing")
    axis.plot([1, 2, 3], [1, 2, torch.nan], label="ends early")
    axis.plot([0.0], [1.5], label="left of a logarithmic axis")
    axis.axhline(1.5)
    axis.set_xscale("log")
    line_style.name_ends(figure, [axis])
    (name,) = axis.texts
    assert name.get_text() == "ends early"
    assert axis.transAxes.transform(name.xy) == pytest.approx(axis.transData.transform((2, 2)))


def test_intervals() -> None:
    """Wilson's and Student's, against published values."""
    assert intervals.wilson([0.0] * 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert intervals.wilson([1.0] * 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert intervals.wilson([1.0, 0.0] * 5) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert intervals.student([7.0]) is None
    assert intervals.student([0.0, 2.0]) is None
    assert intervals.student([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    many = [float(n % 2) for n in range(121)]  # beyond the table: 1.9799 times the standard error 0.04564
    assert intervals.student(many) == pytest.approx((60 / 121 - 0.09036, 60 / 121 + 0.09036), abs=1e-4)


@pytest.mark.parametrize(("prompts", "bars"), [(8, True), (30, False)])
def test_few_prompts_have_intervals(prompts: int, bars: bool, tmp_path: Path, drawn: list[Figure]) -> None:
    def made(method: str, budget: str | None, n: int) -> dict[str, Any]:
        facts = {"task": "kv", "protocol": "question", "method": method, "budget": budget, "prompt": n}
        return facts | {"score": float(n % 2), "settings": {"model": "m"}}

    rows = ((FULL, None), ("window", None), ("quest", "16"), ("quest", "64"))
    plots.accuracy([made(*row, n) for row in rows for n in range(prompts)], tmp_path / "a.png")
    (axis,) = drawn[0].axes
    assert axis.get_title() == f"kv, question, {prompts} prompts"
    assert axis.get_xlabel() == "budget, rows beyond sink and window"
    assert len(axis.collections) == (4 if bars else 0)
    assert ("intervals of 95%" in drawn[0].get_suptitle()) is bars
    assert sorted(text.get_text() for text in axis.texts) == ["full", "quest", "window"]
    if bars:
        spans = [segment[:, 1].tolist() for bar in axis.collections for segment in bar.get_segments()]
        assert spans == [pytest.approx(intervals.wilson([0.0, 1.0] * 4))] * 4


@pytest.mark.parametrize("known", [True, False])
def test_divergence_is_drawn_against_rows_and_bytes_with_intervals(
    known: bool, tmp_path: Path, drawn: list[Figure]
) -> None:
    def made(method: str, budget: str | None, rows: float, *kl: float, **more: Any) -> list[dict[str, Any]]:
        facts = {"text": "t", "kind": "novel", "length": 4096, "method": method, "budget": budget, "layers": None}
        facts |= {"rows": rows, "bytes_share": rows / 4096 if known else None, "settings": {"model": "m"}, **more}
        return [facts | {"kl": one, "prompt": n} for n, one in enumerate(kl)]

    one = [
        *made(FULL, None, 4096, 0.0, 0.0, 0.0),
        *made("quest", "64", 132, 0.1, 0.2, 0.3),
        *made("quest", "256", 324, 0.01, 0.02, 0.03),
        *made("quest", "256", 324, 0.05, 0.06, 0.07, layers="0-9"),
        *made("exact", "all", 4096, 0.0, 0.0, 0.0),
        *made("window", None, 68, 0.4, 0.5, 0.6),
    ]
    other = [record | {"text": "u", "kind": "$x$"} for record in one if record["prompt"] == 0]
    plots.agreement(one + other, tmp_path / "a.png")
    axes = drawn[0].axes
    assert len(axes) == (4 if known else 2)
    assert axes[0].get_title("left") == "t (novel), 4,096 tokens, 3 windows"
    assert {axis.get_yscale() for axis in axes} == {axis.get_xscale() for axis in axes} == {"log"}
    names = ["quest", "quest, layers 0-9", "window"]  # what does not diverge has no place on a logarithmic axis
    assert sorted(text.get_text().replace("\n", " ") for text in axes[0].texts) == names
    quest = next(line for line in axes[0].lines if line.get_label() == "quest")
    assert quest.get_xydata().tolist() == [pytest.approx([132, 0.2]), pytest.approx([324, 0.02])]
    spans = [segment[:, 1].tolist() for bar in axes[0].collections for segment in bar.get_segments()]
    around = [intervals.student([scale * one for one in (1.0, 2.0, 3.0)]) for scale in (0.1, 0.01)]
    assert all(one is not None and one[0] < 0 for one in around)
    floor = 0.01  # half of the smallest mean, as such an axis has no 0
    assert spans[:2] == [pytest.approx([floor, one[1]]) for one in around if one is not None]
    assert len(spans) == 4
    assert not axes[-1].collections, "one window has no interval"


def test_budgets_that_are_shares_are_not_called_rows(tmp_path: Path, drawn: list[Figure]) -> None:
    one = {
        "task": "kv",
        "protocol": "question",
        "method": "quest",
        "prompt": 1,
        "score": 1.0,
        "settings": {"model": "m"},
    }
    plots.accuracy([one | {"budget": budget} for budget in ("64", "5%")], tmp_path / "a.png")
    assert drawn[0].axes[0].get_xlabel() == "budget beyond sink and window"
