"""Puts sections into one file of HTML that needs nothing else: styles, scripts and data are in it."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from sparseattn import __version__
from sparseattn.reporting.html.views import Section
from sparseattn.reporting.line_style import COLOURS, DARK, DASHES

# Those of others (assets/vendor/README.md), and their licences.
LICENCES = {"vendor/d3.min.js": "vendor/LICENSE-d3", "vendor/plot.umd.min.js": "vendor/LICENSE-plot"}
SCRIPTS = (  # in this order
    *(*LICENCES, "page.js", "probe.js", "cells.js"),
    *("lines.js", "heat.js", "given.js", "table.js", "facts.js"),
    *("attention.js", "explorer-choices.js", "explorer-rows.js", "explorer-text.js", "explorer.js"),
)
# Seven shapes go through ten colours, so that 70 methods differ.
SYMBOLS = ("circle", "square", "diamond", "triangle", "wye", "cross", "star")
FULL = "full"  # attention itself, to which methods are compared: grey, and never switched off


def written(title: str, sections: Sequence[Section], made: str) -> str:
    """The whole page.

    Args:
        title: its heading.
        sections: in their order.
        made: a line at the foot, of what and when it was made.
    """
    methods = list(dict.fromkeys(name for section in sections for name in section.methods if name != FULL))
    data = {"methods": [_look(i, name) for i, name in enumerate(methods)], "sections": [s.record() for s in sections]}
    scripts = "\n".join(f"<script>{_script(name)}</script>" for name in SCRIPTS)
    return _filled(
        asset("page.html"),
        title=html.escape(title),
        style=asset("page.css"),
        foot=html.escape(f"{made} sparseattn {__version__}."),
        data=json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        scripts=scripts + "\n<script>start();</script>",
    )


def asset(name: str) -> str:
    """A file of the page's own."""
    return (importlib.resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _look(number: int, name: str) -> dict[str, Any]:
    """Of a method: the colours that `line_style.style` gives it, and a shape."""
    k = number % len(COLOURS)
    dash = "" if DASHES[number // 5 % len(DASHES)] == "-" else "5 3"
    return {
        "name": name,
        "light": COLOURS[k],
        "dark": DARK[k],
        "symbol": SYMBOLS[number % len(SYMBOLS)],
        "dash": dash,
    }


def _script(name: str) -> str:
    """A script of the page; one of others with its licence before it."""
    text = asset(name)
    if name in LICENCES:
        text = f"/*\n{asset(LICENCES[name])}*/\n{text}"
    assert "</script" not in text.lower(), f"{name} would end itself"
    return text


def _filled(template: str, **parts: str) -> str:
    """The template with every {{name}} replaced once; what stands in a part is not looked at again."""
    pieces = template.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out)
