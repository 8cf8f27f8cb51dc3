"""What mkdocs does with a page of docs/ before it renders it (`hooks` of mkdocs.yml)."""

from __future__ import annotations

import re

from sparseattn.selectors.methods import METHODS

FAMILY = re.compile(r"^<!-- methods of (\w+) -->$", re.M)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the API of every method of a family where a page has `<!-- methods of FAMILY -->`."""
    return FAMILY.sub(lambda found: "\n\n".join(f"::: sparseattn.{name}" for name in classes(found[1])), markdown)


def classes(family: str) -> list[str]:
    """Return the classes of the methods of a family, in the registry's order.

    Raises:
        ValueError: no method lies in it.
    """
    found = [method.kind for method in METHODS.values() if method.family == family]
    if not found:
        raise ValueError(f"no method lies in sparseattn/selectors/{family}")
    return found
