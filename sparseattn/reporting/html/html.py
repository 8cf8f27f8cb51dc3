"""Puts sections into one file of HTML that needs nothing else: styles, scripts and data are in it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparseattn import __version__
from sparseattn.reporting.html.percentages import typeset
from sparseattn.reporting.html.starting_methods import starting_methods
from sparseattn.reporting.html.views import FULL, Section
from sparseattn.reporting.line_style import COLOURS, DARK, DASHES

# Those of others (assets/vendor/README.md), and their licences.
LICENCES = {"vendor/d3.min.js": "vendor/LICENSE-d3", "vendor/plot.umd.min.js": "vendor/LICENSE-plot"}
SCRIPTS = (  # in this order
    *(*LICENCES, "page.js", "methods.js", "probe.js", "cells.js"),
    *("line-names.js", "lines.js", "heat.js", "given.js", "table.js"),
    *("attention.js", "explorer-choices.js", "explorer-rows.js", "explorer-text.js", "explorer-play.js", "explorer.js"),
)
# Seven shapes go through ten colours, so that 70 methods differ.
SYMBOLS = ("circle", "square", "diamond", "triangle", "wye", "cross", "star")


def written(title: str, sections: Sequence[Section], foot: str) -> str:
    """Return the whole page.

    Args:
        title: its heading.
        sections: in their order.
        foot: a line of what the page was made of, and when.
    """
    methods = list(dict.fromkeys(name for section in sections for name in section.methods if name != FULL))
    figures = {name: view for section in sections for name, view in section.data().items()}
    shown = starting_methods(methods, sections)
    looks = [{**_look(number, name), "shown": name in shown} for number, name in enumerate(methods)]
    return _template("page.html").render(
        title=title,
        sections=sections,
        style=Markup(asset("page.css")),
        scripts=[_script(name) for name in SCRIPTS],
        data={"methods": looks, "figures": figures},
        foot=f"{foot} sparseattn {__version__}.",
    )


def asset(name: str) -> str:
    """Return a file of the page's own."""
    return (importlib.resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _template(name: str) -> Any:
    """Return a template; all that it writes is escaped, but for `Markup` and for `tojson`, which is safe in scripts."""
    environment = Environment(
        loader=PackageLoader("sparseattn.reporting.html", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["typeset"] = typeset
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    return environment.get_template(name)


def _look(number: int, name: str) -> dict[str, Any]:
    """Return how a method looks: the colours that `line_style.style` gives it, and a shape."""
    k = number % len(COLOURS)
    dash = "" if DASHES[number // 5 % len(DASHES)] == "-" else "5 3"
    return {
        "name": name,
        "light": COLOURS[k],
        "dark": DARK[k],
        "symbol": SYMBOLS[number % len(SYMBOLS)],
        "dash": dash,
    }


def _script(name: str) -> Markup:
    """Return a script of the page; one of others with its licence before it."""
    text = asset(name)
    if name in LICENCES:
        text = f"/*\n{asset(LICENCES[name])}*/\n{text}"
    assert "</script" not in text.lower(), f"{name} would end itself"
    return Markup(text)
