"""The prompts of a benchmark, read from its own published file, so that they are its words and not a copy of them.

The file lies beside the data, or `--templates` names it or a clone of the benchmark's repository. Its hash goes into
every record. A file of Python is read as a syntax tree; nothing in it runs.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseattn.evaluation.layouts.base import Setup


@dataclass(frozen=True)
class Published:
    """A file of a public repository.

    Args:
        repository: its address.
        commit: of the version that this project was checked against.
        path: within the repository.
        sha256: of that version.
    """

    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def name(self) -> str:
        return Path(self.path).name


@dataclass(frozen=True)
class Templates:
    """The text of a published file.

    Args:
        text: as said.
        facts: of every record: the file's name, its hash and whether this is the version that was checked.
    """

    text: str
    facts: Mapping[str, Any]


def load(published: Published, setup: Setup) -> Templates:
    """Return a benchmark's file of prompts.

    Raises:
        ValueError: it is neither where `--templates` says nor beside the data; not UTF-8.
    """
    path = _found(published, setup)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None
    facts = {"templates": published.path, "templates_sha256": digest, "templates_checked": digest == published.sha256}
    return Templates(text, facts)


def _found(published: Published, setup: Setup) -> Path:
    if setup.templates is None:
        beside = setup.path if setup.path.is_dir() else setup.path.parent
        places = [beside / published.name]
    elif setup.templates.is_dir():
        places = [setup.templates / published.path, setup.templates / published.name]
    else:
        places = [setup.templates]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(
        f"its prompts are in the benchmark's own {published.path}, and {places[0]} is not there: name that file or a "
        f"clone of {published.repository} with --templates (checked with commit {published.commit})"
    )


def python_value(text: str, name: str) -> Any:
    """Return the literal that a file of Python assigns to `name`, without running it.

    Texts that are joined with `+` or stand in an f-string of other literals of the file count as literals.

    Raises:
        ValueError: no such name, or another kind of value.
    """
    for target, value in assignments(tree(text)):
        if target == name:
            return value
    raise ValueError(f"the file of prompts assigns no literal to {name}")


def tree(text: str) -> ast.Module:
    """Return the syntax tree of a file of Python. Raises ValueError."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the file of prompts is no Python: {error}") from None


def assignments(node: ast.AST) -> list[tuple[str, Any]]:
    """Return the names of a body with the literals that are assigned to them, outer ones first, in order.

    Of `a if b else c` both literals are given, one behind the other.
    """
    known: dict[str, Any] = {}
    pairs = []
    for statement in ast.walk(node):
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target, value = statement.targets[0], statement.value
        for part in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            if isinstance(target, ast.Name):
                with contextlib.suppress(ValueError):
                    known[target.id] = _literal(part, known)
                    pairs.append((target.id, known[target.id]))
    return pairs


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left, known) + _literal(node.right, known)
    if isinstance(node, ast.Dict):
        keys = [_literal(key, known) for key in node.keys if key is not None]
        return dict(zip(keys, (_literal(value, known) for value in node.values), strict=True))
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_literal(part, known)) for part in node.values)
    if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
        return _literal(node.value, known)
    raise ValueError("no literal")
