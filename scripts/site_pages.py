"""What mkdocs does with a page of docs/ before and after it renders it (`hooks` of mkdocs.yml)."""

from __future__ import annotations

import re

from sparseattn.selectors.methods import METHODS

FAMILY = re.compile(r"^<!-- methods of (\w+) -->$", re.M)
CODE = re.compile(r"(<pre\b.*?</pre>|<code\b.*?</code>|<[^>]*>)", re.S)  # and tags: what is no text of a sentence
UNITS = "%|ms|µs|s|KiB|MiB|GiB|TiB|kB|MB|GB|TB|GB/s|TB/s|bits?|nats|times|tokens|rows|px"
QUANTITY = re.compile(rf"(?<=\d) (?=(?:{UNITS})(?![\w/]))")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the API of every method of a family where a page has `<!-- methods of FAMILY -->`."""
    return FAMILY.sub(lambda found: "\n\n".join(f"::: sparseattn.{name}" for name in classes(found[1])), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Keep a number and its unit in one line: the blank between them becomes U+00A0, outside of code."""
    parts = CODE.split(html)
    parts[::2] = [QUANTITY.sub("\u00a0", text) for text in parts[::2]]
    return "".join(parts)


def classes(family: str) -> list[str]:
    """Return the classes of the methods of a family, in the registry's order.

    Raises:
        ValueError: no method lies in it.
    """
    found = [method.kind for method in METHODS.values() if method.family == family]
    if not found:
        raise ValueError(f"no method lies in sparseattn/selectors/{family}")
    return found
