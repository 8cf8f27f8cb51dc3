"""Pages in headless Chromium: the system's browser, driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'sparseattn[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
WIDTHS = pytest.mark.parametrize("width", [1280, 400])


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """Give a browser, which ends with the block."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def empty_pages(browser: Any) -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """Give `new(width, theme, scripts)`, which opens an empty page, and a list of what went wrong in all of them.

    The list has errors of scripts and what was asked of a network; a test adds what else it watches. It is empty at the
    end of the block, or an AssertionError says what is in it.
    """
    said: list[str] = []
    contexts = []

    def new(width: int, theme: str, scripts: bool = True) -> Any:
        size = {"width": width, "height": 900}
        context = browser.new_context(
            viewport=size, color_scheme=theme, reduced_motion="reduce", java_script_enabled=scripts
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda one: said.append(one.url) if one.url.startswith(("http", "ws")) else None)
        return page

    yield new, said
    for context in contexts:
        context.close()
    assert said == []
