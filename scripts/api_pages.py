"""What mkdocs does with a page of docs/ before it renders it (`hooks` of mkdocs.yml)."""

from __future__ import annotations

import re

from sparseattn.selectors.names import CLASSES

METHODS = re.compile(r"^<!-- methods of (\w+) -->$", re.M)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the API of every method of a folder of `selectors/` where a page has `<!-- methods of FOLDER -->`."""
    return METHODS.sub(lambda found: "\n\n".join(f"::: sparseattn.{name}" for name in classes(found[1])), markdown)


def classes(folder: str) -> list[str]:
    """Return the classes of the methods of a folder, by name.

    Raises:
        ValueError: no method lies in it.
    """
    places = (place.split(":") for place in CLASSES.values())
    found = sorted(name for module, name in places if module.startswith(f"sparseattn.selectors.{folder}."))
    if not found:
        raise ValueError(f"no method lies in sparseattn/selectors/{folder}")
    return found
