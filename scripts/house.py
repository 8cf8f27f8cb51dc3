"""Counts what says whether the architecture can be seen: files, functions, the contract's size, lines and words.

python -m scripts.house        # a measure a line, as the log quotes them

`python -m benchmarks.calls` counts the calls of a step.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sparseattn.selectors.base import Selector

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparseattn"


def tracked(folder: str, suffix: str = ".py") -> list[Path]:
    """Return the files of a folder that git tracks."""
    names = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if name.endswith(suffix)]


def first_pages() -> list[Path]:
    """Return what a user meets first: README and the pages of the site's menu before its Reference."""
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("  - Reference:\n")[0]
    return [ROOT / "README.md", *(ROOT / "docs" / name for name in re.findall(r"[\w/-]+\.md", menu))]


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def functions(paths: list[Path]) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len([one for one in every if one.arg not in ("self", "cls")])


def contract() -> tuple[int, int]:
    """Return how many public attributes and methods `Selector` and its bases have."""
    attributes: set[str] = set()
    methods: set[str] = set()
    for base in Selector.__mro__[:-1]:
        for name, value in vars(base).items():
            if not name.startswith("_"):
                (methods if inspect.isfunction(value) else attributes).add(name)
    return len(attributes), len(methods)


def main() -> None:
    package = tracked("sparseattn")
    python = [path for path in package if not path.name.startswith("gpu")]  # Triton's functions are long
    sizes = {path: lines(path) for path in package}
    longest = max(sizes, key=lambda path: sizes[path])
    every = list(functions(python))
    classes = Counter(
        node.name
        for path in package
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    attributes, methods = contract()
    guards = sum(path.read_text().count("Selection.none(") for path in tracked("sparseattn/selectors"))
    words = sum(len(page.read_text().split()) for page in first_pages())
    print(f"modules in sparseattn/ itself: {len([path for path in package if path.parent == PACKAGE])}")
    print(f"folders in sparseattn/: {len({path.relative_to(PACKAGE).parts[0] for path in package}) - 2}")
    print(f"longest file: {sizes[longest]} lines ({longest.relative_to(ROOT)})")
    print(f"files over 400 lines: {sum(size > 400 for size in sizes.values())}")
    for most in (100, 50):
        print(f"functions over {most} lines, outside Triton: {sum(length(one) > most for _, one in every)}")
    print(f"functions with 10 or more parameters: {sum(parameters(one) >= 10 for _, one in functions(package))}")
    print(f"Selector: {attributes} attributes, {methods} methods")
    print(f"methods that answer when nothing is sealed: {guards}")
    print(f"public class names that occur twice: {sum(count > 1 for count in classes.values())}")
    for folder in ("sparseattn", "scripts", "scripts/evidence", "benchmarks", "tests"):
        print(f"lines of {folder}: {sum(map(lines, tracked(folder))):,}")
    print(f"words of README, Use and Write a method: {words:,}")


if __name__ == "__main__":
    main()
