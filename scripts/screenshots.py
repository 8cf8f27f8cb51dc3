"""Takes the documents' pictures of pages that `sparseattn report` writes: `python -m scripts.screenshots PAGE...`.

It needs the extra `browser` and Chromium (`apt-get install chromium`). The pages should be the demo's (`make demo`) and
that of a folder of `recommend`; of each those pictures are taken that it has, in the light and in the dark. Documents
name the light one, `report-page.png`; the site shows `report-page-dark.png` in its place in the dark.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
WIDTH = 1280
# Picture -> what a page of it has, what is pressed there, the element whose beginning it shows, and height in pixels.
PICTURES = {
    "report-page.png": ("#explorer", None, "body", 1110),
    "report-explorer.png": ("#explorer", None, "#explorer figure", 1060),
    "report-two.png": ("#explorer", "text=Two side by side", "#explorer figure .texts", 420),
    "report-plan.png": ("figure.given", None, "body", 1380),
}


def take(page_file: Path) -> list[Path]:
    """Write the pictures into docs/figures/ and return their paths; ValueError without a page or Chromium."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None or not page_file.is_file():
        raise ValueError(f"a page and Chromium are needed, got {page_file} and {chromium}")
    made = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for (name, (needed, pressed, element, height)), theme in itertools.product(PICTURES.items(), ("light", "dark")):
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=theme)
            page.goto(page_file.resolve().as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            if not page.locator(needed).count():
                continue
            if page.locator("#explorer").count():
                page.wait_for_selector("figure.explorer[data-ready=yes]")
            if pressed:
                page.dispatch_event(pressed, "click")
            box = page.locator(element).first.bounding_box()
            clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": min(height, box["height"])}
            made.append(FIGURES / (name if theme == "light" else name.replace(".png", "-dark.png")))
            page.screenshot(path=made[-1], clip=clip, full_page=True, animations="disabled")
        browser.close()
    return made


if __name__ == "__main__":
    for page_file in map(Path, sys.argv[1:]):
        for path in take(page_file):
            print(path)
