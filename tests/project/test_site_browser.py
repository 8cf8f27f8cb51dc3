"""The built documentation in headless Chromium, from the disk: `make docs` builds it and says by SITE where it is."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.chromium import NEEDS_CHROMIUM, WIDTHS, empty_pages, started

SITE = Path(os.environ.get("SITE", "")).resolve() if os.environ.get("SITE") else None
pytestmark = [
    NEEDS_CHROMIUM,
    pytest.mark.skipif(SITE is None, reason="needs a built site: make docs builds one and tests it"),
]
SAMPLE = (
    "index",
    "use/choosing",
    "reference/commands",
    "reference/api/state",
    "lab/results/field",
    "lab/log/index",
)  # a page of each kind
TALLEST = 20_000  # pixels of a page of the API at 1,280


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """`opened(name, width, theme)`: a page from the disk; fails if a script fails or anything is fetched."""
    with empty_pages(browser) as (new, said):

        def open_page(name: str, width: int = 1280, theme: str = "light", scripts: bool = True) -> Any:
            page = new(width, theme, scripts)
            page.on("requestfailed", lambda one: said.append(one.url) if "NOT_FOUND" in (one.failure or "") else None)
            page.goto(address(name))
            return page

        yield open_page


def address(name: str) -> str:
    assert SITE is not None
    return (SITE / f"{name}.html").as_uri()


def pages() -> list[str]:
    assert SITE is not None
    found = [page.relative_to(SITE).with_suffix("").as_posix() for page in SITE.rglob("*.html")]
    return sorted(name for name in found if name != "404")


def test_code_fits_its_box_pages_fit_a_phone_and_those_of_the_api_have_an_end(opened: Callable[..., Any]) -> None:
    """Code and heights at 1,280 pixels, widths at 400; of every page, without its scripts, which would take long."""
    page = opened("index", scripts=False)
    boxes, wide, tall, broad = 0, [], {}, {}
    for name in pages():
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(address(name))
        found = page.evaluate("""() => [...document.querySelectorAll("pre > code")].map((box) =>
            [box.scrollWidth > box.clientWidth, box.innerText])""")
        boxes += len(found)
        wide += [f"{name}: {max(text.splitlines(), key=len)}" for cut, text in found if cut]
        tall[name] = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": 400, "height": 900})
        broad[name] = page.evaluate("document.documentElement.scrollWidth")
    assert boxes > 60
    assert not wide, "\n".join(wide)
    assert {name: width for name, width in broad.items() if width > 400} == {}, "pages scroll sideways"
    api = {name: height for name, height in tall.items() if name.startswith("reference/api/")}
    assert len(api) > 10
    assert {name: height for name, height in api.items() if height >= TALLEST} == {}


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        *((1280, "dark"), (400, "light")),
        *(pytest.param(width, theme, marks=pytest.mark.slow) for width, theme in ((1280, "light"), (400, "dark"))),
    ],
)
def test_axe_finds_nothing(width: int, theme: str, opened: Callable[..., Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = opened("index", width, theme)
    wrong = []
    for name in SAMPLE:
        page.goto(address(name))
        page.wait_for_selector("html.js")
        assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[theme]
        found = axe.run(page).response["violations"]
        wrong += [(name, one["id"], one["nodes"][0]["html"]) for one in found]
    assert wrong == []


def test_a_menu_with_nothing_to_show_is_no_region_that_scrolls(opened: Callable[..., Any]) -> None:
    """Keys cannot reach an empty one, which axe reports while its height is set."""
    found = {}
    for name in ("lab/log/index", "use/choosing"):
        found[name] = opened(name).evaluate("""() => [...document.querySelectorAll(".md-sidebar__scrollwrap")].map(
            (menu) => getComputedStyle(menu).overflowY)""")
    assert found == {"lab/log/index": ["visible", "visible"], "use/choosing": ["auto", "auto"]}


def test_the_search_finds_a_method_from_the_disk(opened: Callable[..., Any]) -> None:
    page = opened("reference/api/index")
    page.keyboard.press("s")
    page.keyboard.type("lowbit", delay=20)
    first = page.locator(".md-search-result__item h1, .md-search-result__item h2").first
    first.wait_for()
    assert "lowbit" in page.locator(".md-search-result__list").inner_text().lower()


@WIDTHS
def test_a_table_that_scrolls_is_reached_by_keys_and_one_that_fits_is_not(
    width: int, opened: Callable[..., Any]
) -> None:
    page = opened("use/choosing", width)
    page.wait_for_selector(".md-typeset__scrollwrap")
    page.wait_for_timeout(100)  # sizes are observed after a frame
    found = page.locator(".md-typeset__scrollwrap").evaluate_all(
        "all => all.map((box) => [box.scrollWidth > box.clientWidth, box.tabIndex === 0])"
    )
    assert found
    assert all(scrolls == reached for scrolls, reached in found), found
    assert any(scrolls for scrolls, _ in found) is (width == 400)


def test_a_number_and_its_unit_stay_in_one_line(opened: Callable[..., Any]) -> None:
    page = opened("lab/results/field")
    text = page.locator("article").inner_text()
    assert re.search(r"\d\u00a0%", text)
    assert not re.search(r"\d %", text)


def test_the_menu_has_about_twenty_entries(opened: Callable[..., Any]) -> None:
    page = opened("index")
    entries = set()
    for name in ("index", "use/quickstart", "write/selector", "reference/commands", "lab/results/field"):
        page.goto(address(name))
        links = page.locator(".md-nav--primary .md-nav__link[href]:not([href*='#'])")
        entries |= set(links.evaluate_all("all => all.map((one) => one.href)"))
    assert 15 <= len(entries) <= 24, sorted(entries)


def test_the_script_of_others_is_as_npm_has_it() -> None:
    script = (ROOT / "docs" / "theme" / "iframe-worker.js").read_bytes()
    assert hashlib.sha256(script).hexdigest() == "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609"
