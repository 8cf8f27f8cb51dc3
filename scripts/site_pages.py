"""What mkdocs does with a page of docs/ before and after it renders it (`hooks` of mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

from sparseattn.selectors.methods import METHODS

FAMILY = re.compile(r"^<!-- methods of (\w+)(?: (before|from) (\w+))? -->$", re.M)
CODE = re.compile(r"(<pre\b.*?</pre>|<code\b.*?</code>|<[^>]*>)", re.S)  # and tags: what is no text of a sentence
UNITS = "%|ms|µs|s|KiB|MiB|GiB|TiB|kB|MB|GB|TB|GB/s|TB/s|bits?|nats|times|tokens|rows|px"
HEADLESS = re.compile(r"<th(?P<style> style=\"[^\"]*\")?></th>")  # the corner of a table names nothing
FIGURE = re.compile(r'<p>(?P<image><img\b[^>]* src="(?P<source>[^"]+\.svg)"[^>]*>)</p>')
PHOTO = re.compile(r'(?P<start><img\b[^>]* src="[^"]*/report-\w+)\.png(?P<end>"[^>]*>)')
# Of the theme, what has no name or not one of its own.
SEARCH = '<div class="md-search" data-md-component="search" role="dialog">'
PATH = '<nav class="md-path" aria-label="Navigation"'
QUANTITY = re.compile(rf"(?<=\d) (?=(?:{UNITS})(?![\w/])|x \d)|(?<=\d x) (?=\d)")
HEAD = re.compile(r"<th\b.*?</th>")
# Where the name of a method may break, at the head of a column.
COLUMN = re.compile(r"(?<=[:,])(?=\w)(?=[^<>]*</code>)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the API of every method of a family where a page has `<!-- methods of FAMILY -->`, or of those before one of
    its methods, or from it on, where it has `<!-- methods of FAMILY before METHOD -->`, or `from`."""
    return FAMILY.sub(
        lambda found: "\n\n".join(f"::: sparseattn.{name}" for name in classes(*found.groups())), markdown
    )


def on_page_context(context: dict[str, Any], page: Any, **_: object) -> dict[str, Any]:
    """Leave the menus beside the home page out: one would have one entry, that page."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return context


def on_page_content(html: str, **_: object) -> str:
    """Leave no heading of a table empty, show figures in both themes and at full size, keep numbers with their units.

    Outside of code, the blank between a number and its unit becomes U+00A0.
    """
    html = HEADLESS.sub(r"<td\g<style>></td>", html)
    html = HEAD.sub(lambda found: COLUMN.sub("<wbr>", found[0]), html)
    html = PHOTO.sub(r"\g<start>.png#only-light\g<end>\g<start>-dark.png#only-dark\g<end>", html)
    html = FIGURE.sub(r'<p class="figure"><a href="\g<source>">\g<image></a></p>', html)
    parts = CODE.split(html)
    parts[::2] = [QUANTITY.sub("\u00a0", text) for text in parts[::2]]
    return "".join(parts)


def on_post_page(output: str, **_: object) -> str:
    """Name what the theme leaves without a name, for who does not see the page."""
    return output.replace(SEARCH, SEARCH[:-1] + ' aria-label="Search">').replace(
        PATH, PATH.replace("Navigation", "Breadcrumbs")
    )


def classes(family: str, side: str | None = None, of: str | None = None) -> list[str]:
    """Return the classes of the methods of a family, in the registry's order: all, or on a side of one of them.

    Raises:
        ValueError: no method lies in it, or none of that name.
    """
    found = {name: method.kind for name, method in METHODS.items() if method.family == family}
    if not found or (of is not None and of not in found):
        raise ValueError(f"no method {of or ''} lies in sparseattn/selectors/{family}")
    cut = 0 if of is None else list(found).index(of)
    return list(found.values())[:cut] if side == "before" else list(found.values())[cut:]
