"""The page of `sparseattn report` in headless Chromium: what it shows, by mouse and keys, at both widths and themes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseattn.cli.report import write_report
from sparseattn.cli.report_options import Explored
from sparseattn.evaluation.token_explorer import explore
from sparseattn.reporting.html import html
from sparseattn.reporting.html.views import Section
from sparseattn.reporting.table import Column, Table
from tests import report_records as records
from tests.chromium import NEEDS_CHROMIUM, WIDTHS, empty_pages, started

pytestmark = NEEDS_CHROMIUM

SHOWN = {"budget": 16, "queries": 4, "sink": 2, "window": 8}
SELECTORS = ("quest", "lowbit", "exact")


@pytest.fixture(scope="module")
def page_file(once: Callable[[str, Callable[[Path], None]], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders, out = once("report-records", records.fill), tmp_path_factory.mktemp("page")
    records.trace().save(out / "tale.safetensors")
    explored = Explored([str(out / "tale.safetensors")], SELECTORS, **SHOWN)
    every = [folders / name for name in ("bench", "inspect", "recall", "eval", "recommend")]
    return write_report(every, out / "report.html", explored=explored)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Callable[..., Any]]:
    """`opened(width, theme)`: the page from the disk, drawn; fails where anything was said or fetched."""
    with empty_pages(browser) as (new, said):

        def open_page(width: int = 1280, theme: str = "light") -> Any:
            page = new(width, theme)
            page.on("console", lambda message: said.append(message.text))
            page.goto(page_file.as_uri())
            page.wait_for_selector("figure.explorer[data-ready=yes]")
            return page

        yield open_page


def lines_of(page: Any) -> list[str]:
    """Methods whose lines stand in the first plot."""
    found: list[str] = (
        page.locator("#frontier .plot")
        .first.locator("g[aria-label=dot]")
        .evaluate_all("all => all.map(one => one.dataset.method)")
    )
    return found


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        *((1280, "light"), (400, "dark")),
        *(pytest.param(width, theme, marks=pytest.mark.slow) for width, theme in ((1280, "dark"), (400, "light"))),
    ],
)
def test_the_page_opens_from_the_disk_at_every_width_and_theme(
    width: int, theme: str, opened: Callable[..., Any]
) -> None:
    page = opened(width, theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off at the side"
    assert page.locator("main > section").count() == 9
    assert page.locator(".lead p").count() == 7
    for kind, count in (("lines", 5), ("heat", 6), ("given", 1), ("table", 6), ("facts", 1), ("explorer", 1)):
        assert page.locator(f"figure.{kind}").count() == count, kind
    assert page.locator("figure.lines svg, figure.heat svg").count() >= 12
    ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    light = [sum(map(int, one.strip("rgb()").split(","))) for one in (ink, paper)]
    assert (light[0] < light[1]) is (theme == "light")
    quest = page.locator(".methods .swatch path").first.evaluate("one => getComputedStyle(one).fill")
    assert quest == {"light": "rgb(0, 114, 178)", "dark": "rgb(192, 179, 255)"}[theme]
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    assert page.locator("#theme").inner_text().lower() == theme


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_method_switched_off_leaves_plots_maps_and_tables(width: int, opened: Callable[..., Any]) -> None:
    page = opened(width)
    if width < 800:
        page.locator(".methods summary").click()  # folded away where there is no room beside
    switch = page.locator("input[data-method=exact]")
    rows = page.locator("#frontier tbody tr")
    assert lines_of(page) == ["quest", "exact", "window"]
    assert rows.count() == 5
    switch.uncheck()
    assert lines_of(page) == ["quest", "window"]
    assert rows.count() == 3
    assert page.locator("#frontier .panel[data-method=exact]").count() == 0
    assert page.locator("#frontier .panel[data-method=quest]").count() == 1
    assert "exact" not in page.locator("#explorer .facts-of").inner_text()
    assert page.locator(".methods summary").inner_text() == "Methods, 3 of 4 shown"
    page.get_by_role("button", name="none").click()
    assert lines_of(page) == []
    page.get_by_role("button", name="all", exact=True).click()
    assert lines_of(page) == ["quest", "exact", "window"]
    assert page.locator("#plan figure.given g[aria-label=cell] rect").count() == 4
    page.locator("input[data-method=quest]").uncheck()
    assert page.locator("#plan figure.given g[aria-label=cell] rect").count() == 4, "a plan is shown whole"


@WIDTHS
def test_a_plot_rescales_to_the_methods_that_are_on(width: int, opened: Callable[..., Any]) -> None:
    """Switches stand at the plot where the list of methods is folded away; the line of 1 % is above the axis."""
    page = opened(width)
    view = page.locator("#frontier figure.lines")

    def ticks(axis: str) -> list[str]:
        found: list[str] = view.locator(f"g[aria-label='{axis}-axis tick label'] text").all_text_contents()
        return found

    everything = ticks("x")
    assert everything[-1] == "100\u00a0%"
    assert {"1\u00a0%", "100\u00a0%"} <= set(ticks("y"))
    rule, axis = (view.locator(f"g[aria-label='{of}']").first.bounding_box() for of in ("rule", "x-axis tick"))
    assert rule["y"] < axis["y"]
    names = view.locator("g[font-size] g[data-method]").evaluate_all("all => all.map(one => one.dataset.method)")
    assert sorted(names) == ([] if width < 800 else ["exact", "quest", "window"]), "lines are named if there is room"
    if width < 800:
        view.get_by_role("button", name="window").click()
        assert view.get_by_role("button", name="window").get_attribute("aria-pressed") == "false"
    else:
        page.locator("input[data-method=window]").uncheck()
    assert ticks("x") != everything
    plan = page.locator("#plan figure.lines g.plan")
    assert plan.locator("text").first.text_content().startswith("plan made up-1%: ")
    assert plan.locator("circle").count() == 2, "the plan, and the best single method beside it"


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        *((1280, "dark"), (400, "light")),
        *(pytest.param(width, theme, marks=pytest.mark.slow) for width, theme in ((1280, "light"), (400, "dark"))),
    ],
)
def test_axe_finds_nothing(width: int, theme: str, opened: Callable[..., Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = opened(width, theme)
    page.locator("#explorer").get_by_role("radio", name="Two side by side").click()
    found = axe.Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_what_is_chosen_is_what_a_plot_shows(opened: Callable[..., Any]) -> None:
    page = opened()
    view = page.locator("#frontier figure.lines")
    assert "relative output error" in view.locator("svg").first.inner_html()
    view.locator("select").first.select_option("recovered")
    assert "recovered share of the far attention" in view.locator("svg").first.inner_html()
    plot = view.locator(".plot")
    plot.locator("g[data-method=quest][aria-label=dot] > *").first.hover(force=True)
    assert plot.locator(".tip").inner_text().startswith("quest\nbudget ")
    heat = page.locator("#frontier figure.heat")
    first = heat.locator("g[aria-label=cell] rect").first.get_attribute("fill")
    heat.get_by_label("Budget").select_option("64")
    assert heat.locator("g[aria-label=cell] rect").first.get_attribute("fill") != first


def test_tables_are_sorted_and_filtered(opened: Callable[..., Any]) -> None:
    page = opened()
    view = page.locator("#frontier figure.table")
    column = view.locator("tbody tr td:nth-child(6)")
    head = view.get_by_role("button", name="error", exact=True)
    for direction in ("ascending", "descending"):
        head.click()
        assert view.locator(f"th[aria-sort={direction}]").count() == 1
        shown = [float(one.removesuffix("\u00a0%")) for one in column.all_inner_texts()]
        assert shown == sorted(shown, reverse=direction == "descending")
    view.locator("input").fill("quest 64")
    assert view.locator("tbody tr").count() == 1
    assert view.locator(".count").inner_text() == "1 of 5 rows"
    assert not view.locator(".rest").is_visible(), "five rows are shown whole"


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_long_table_shows_a_screenful_until_all_is_asked_for(width: int, browser: Any, tmp_path: Path) -> None:
    rows = [[f"trace {number}", number] for number in range(40)]
    table = Table("Every measurement", [Column.text("trace"), Column("rows")], rows)
    (tmp_path / "long.html").write_text(html.written("Long", [Section("long", "Long", [], [table])], "foot"))
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "long.html").as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    assert page.locator("tbody tr").count() == 15
    page.locator("input[type=search]").fill("trace 3")  # 3, 13, 23 and 30 to 39
    assert page.locator("tbody tr").count() == 13
    assert not page.locator(".rest").is_visible()
    page.locator("input[type=search]").fill("")
    page.get_by_role("button", name="Show all 40 rows").click()
    assert page.locator("tbody tr").count() == 40
    assert not page.locator(".rest").is_visible()
    page.close()


@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.slow)])
def test_a_token_clicked_shows_its_rows(width: int, opened: Callable[..., Any]) -> None:
    """Those that the method read, and of the needed ones those that it did not, of the token, layer and head chosen."""
    found = explore(records.trace(), SELECTORS, 16, queries=4, sink=2, window=8)
    page = opened(width)
    view = page.locator("#explorer")
    view.get_by_role("button", name="Show the whole text").click()
    view.get_by_label("layer 1, head 2: ").click()
    for token, method, label in ((1, 0, "quest"), (2, 1, "lowbit")):
        asking = found.tokens[token]
        view.locator(f".text [data-row='{asking}']").click()
        assert view.locator(".asks [aria-checked=true]").get_attribute("data-token") == str(asking)
        view.locator(".facts-of").get_by_role("radio", name=label).click()
        bits = found.readings[method].rows[token, 1, 2]
        read = ((bits[:, None] >> torch.arange(8)) & 1).flatten().nonzero().flatten().tolist()
        middle = [row for row in read if 2 <= row <= asking - 8]
        shown = "all => all.map(one => Number(one.dataset.row))"
        assert view.locator(".text .read").evaluate_all(shown) == middle
        order = found.levels[token, 1, 2, : asking + 1].long() * 1000 + torch.arange(asking + 1)  # the later one first
        needed = set(order.topk(int(found.needed[token, 1, 2])).indices.tolist())
        assert view.locator(".text .missed").evaluate_all(shown) == sorted(needed - set(read))
        row = view.locator(".facts-of tr.chosen").inner_text().split("\t")
        assert row[1] == f"{len(read)}"
        assert row[4].strip() == str(len(needed - set(read)))
    view.locator(".text .read").first.click()
    assert "of the attention; quest " in view.locator(".row-said").inner_text()
    assert "lowbit reads it" in view.locator(".row-said").inner_text()


def test_two_methods_stand_side_by_side_and_tokens_play(opened: Callable[..., Any]) -> None:
    """Both texts show the same rows, each what its own method read; playing stops at the last token, or when asked."""
    found = explore(records.trace(), SELECTORS, 16, queries=4, sink=2, window=8)
    page = opened()
    page.clock.install()
    view = page.locator("#explorer")
    shown = "all => all.map(one => Number(one.dataset.row))"
    asked = view.locator(".asks [aria-checked=true]")
    play = view.locator(".play")
    view.get_by_role("radio", name="Two side by side").click()
    view.get_by_role("button", name="Show the whole text").click()
    rows = [pane.locator("[data-row]").evaluate_all(shown) for pane in view.locator(".text").all()]
    assert rows[0] == rows[1] == list(range(320))
    view.locator(".texts .text").first.locator("[data-row='100']").click()
    assert view.locator(".text .picked").evaluate_all(shown) == [100, 100]
    assert play.inner_text() == "Next token", "where motion is to be reduced"
    play.press("Enter")
    page.clock.run_for(10_000)
    assert asked.get_attribute("data-token") == "316", "from the last to the first, and no further by itself"
    page.emulate_media(reduced_motion="no-preference")
    play.press("Enter")
    page.clock.run_for(1300)
    assert asked.get_attribute("data-token") == "318"
    play.press("Enter")
    page.clock.run_for(10_000)
    assert asked.get_attribute("data-token") == "318", "paused"
    play.press("Enter")
    page.clock.run_for(10_000)
    assert asked.get_attribute("data-token") == "319"
    assert "Play" in play.inner_text()
    layer, head = view.locator(".grid [aria-checked=true]").get_attribute("aria-label").split(":")[0].split(", ")
    at = int(layer.split()[1]), int(head.split()[1])
    for pane in view.locator(".pane").all():
        (reading,) = (one for one in found.readings if one.label == pane.locator("h4").inner_text())
        bits = ((reading.rows[3, at[0], at[1]][:, None] >> torch.arange(8)) & 1).flatten().nonzero().flatten()
        middle = [row for row in bits.tolist() if 2 <= row <= 319 - 8]
        assert pane.locator(".text .read").evaluate_all(shown) == middle, reading.label


def test_a_trace_without_text_shows_the_numbers_of_rows(browser: Any, tmp_path: Path) -> None:
    made = records.trace()
    made.pieces = None
    made.save(tmp_path / "bare.safetensors")
    shown = Explored([str(tmp_path / "bare.safetensors")], ("quest",), **SHOWN)
    page = browser.new_page()
    page.goto(write_report([], tmp_path / "bare.html", explored=shown).as_uri())
    page.wait_for_selector("figure.explorer[data-ready=yes]")
    assert "This trace has no text" in page.locator("#explorer").inner_text()
    assert page.locator("#explorer .asks").inner_text().split() == ["316", "317", "318", "319"]
    page.close()


@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.slow)])
def test_everything_is_reached_by_keys(width: int, opened: Callable[..., Any]) -> None:
    page = opened(width)
    seen = set()
    focused = """() => { const one = document.activeElement, s = getComputedStyle(one);
      const kind = one.getAttribute("role") || one.type || one.tagName.toLowerCase();
      return [one.closest("figure, nav, .methods, .asks, .grid, .text")?.className || "", kind,
              s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 1]; }"""
    if width == 400:
        page.locator(".methods summary").click()
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    for _ in range(160):
        page.keyboard.press("Tab")
        where, kind, visible = page.evaluate(focused)
        if kind == "body":
            break
        assert visible, f"the focus is not seen at {kind} in {where!r}"
        seen.add(f"{kind} in {where}")
    reached = " | ".join(seen)
    for part in (
        *("button in ", "checkbox in methods", "group in view lines", "select-one in view lines", "group in view heat"),
        *("search in view table", "button in view table", "radio in asks", "radio in grid", "region in text"),
        *("summary in view facts",),
    ):
        assert part in reached, part

    page.locator("input[data-method=exact]").focus()
    page.keyboard.press("Space")
    assert lines_of(page) == ["quest", "window"]
    plot = page.locator("#frontier .plot").first
    plot.focus()
    page.keyboard.press("ArrowRight")
    first = plot.locator(".tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert plot.locator(".tip").inner_text() != first
    page.keyboard.press("Escape")
    assert plot.locator(".tip").is_hidden()
    page.locator("#explorer .asks [aria-checked=true]").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#explorer .asks [aria-checked=true]").get_attribute("data-token") == "318"
    assert page.evaluate("document.activeElement.dataset.token") == "318"
    page.locator("#explorer .grid [aria-checked=true]").focus()
    page.keyboard.press("ArrowUp")
    assert "layer 0" in page.locator("#explorer .grid [aria-checked=true]").get_attribute("aria-label")
    page.locator("#frontier thead button").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#frontier th[aria-sort=ascending]").count() == 1
