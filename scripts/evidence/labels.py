"""Labels of methods in records as one types them, however old the record: `Quest(page=8)` is `quest:page=8` there.

Until 2026-11-25 measurements were recorded with the class and its arguments as Python writes them.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from sparseattn.selectors.identity import as_typed
from sparseattn.selectors.methods import METHODS
from sparseattn.selectors.registry import parsed

LABELLED = ("label", "method", "selector")  # fields and columns that name a method
BY_LABEL = ("left_out",)  # objects whose keys do
NAMES = {"Fitted": "sparseattn:Fitted", **{method.kind: name for name, method in METHODS.items()}}
KEPT = re.compile(r", (\S+) rows$")  # by which row codec
OF_BITS = re.compile(r"(\d+)-bit")  # how that was recorded until 2026-11-25


def relabelled(value: Any) -> Any:
    """A record, or a part of it, with its labels as one types them."""
    if isinstance(value, list):
        return [relabelled(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, one in value.items():
        if name in LABELLED and isinstance(one, str):
            found[name] = typed(one)
        elif name in BY_LABEL and isinstance(one, dict):
            found[name] = {typed(label): why for label, why in one.items()}
        else:
            found[name] = relabelled(one)
    if "columns" in value:
        of_method = [i for i, name in enumerate(value["columns"]) if name in LABELLED]
        for row in found["records"]:
            for i in of_method:
                row[i] = typed(row[i])
    return found


def typed(label: Any) -> Any:
    """A label as one types it: `twostage:pages=[mean:bits=8],times=4`; what is no label of old stays as it is."""
    if not isinstance(label, str):
        return label
    method, kept = _apart(label)
    try:
        tree = ast.parse(method, mode="eval").body
    except SyntaxError:
        return method + kept
    return method + kept if (text := _typed(tree)) is None else text + kept


def _apart(label: str) -> tuple[str, str]:
    """A method, and what a label says of the codec of its rows."""
    found = KEPT.search(label)
    if found is None:
        return label, ""
    bits = OF_BITS.fullmatch(found[1])
    return label[: found.start()], f", kivi:bits={bits[1]} rows" if bits else found[0]


def _typed(one: ast.expr) -> str | None:
    """Of a class of the registry, or a call of one; None for anything else."""
    called = one.func if isinstance(one, ast.Call) else one
    if not isinstance(called, ast.Name) or called.id not in NAMES:
        return None
    name = NAMES[called.id]
    pairs = [f"{part.arg}={_value(part.value)}" for part in one.keywords] if isinstance(one, ast.Call) else []
    return f"{name}:{','.join(pairs)}" if pairs else name


def _value(one: ast.expr) -> str:
    part = _typed(one)
    if part is None:
        return as_typed(ast.literal_eval(one))
    return f"[{part}]" if "=" in part else part


def shown(label: str) -> str:
    """A label without its artefacts, whose paths say where a run put them; what is no method's text as it is."""
    method, kept = _apart(label)
    try:
        name, texts = parsed(method)
    except ValueError:
        return label
    pairs = [f"{argument}={_inner(text or '')}" for argument, text in texts if argument != "artefact"]
    return (f"{name}:{','.join(pairs)}" if pairs else name) + kept


def _inner(text: str) -> str:
    """The text of an argument: of a method without its artefacts."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    inner = shown(text[1:-1])
    return f"[{inner}]" if "=" in inner or not inner[:1].isalpha() else inner
