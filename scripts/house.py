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


def own_imports(paths: list[Path]) -> dict[str, set[str]]:
    """Return of each module of the package, by its dotted name, the modules of the package that it imports."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                given = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                given = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for other in given:
                while other and other not in names:  # a name within a module
                    other = other.rpartition(".")[0]
                found[name] |= {other} - {"", name, PACKAGE.name}
    return found


def rooms(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the same of what lies in the package itself, folders and modules, but for `__init__` and `__main__`."""
    found: dict[str, set[str]] = {}
    for name, others in imports.items():
        room = name.split(".")[1:2]
        if room and room != ["__main__"]:
            found.setdefault(room[0], set()).update(other.split(".")[1] for other in others)
    return {room: others - {room} for room, others in found.items()}


def reached(imports: dict[str, set[str]], start: str) -> set[str]:
    """Return what is imported by `start`, by what that imports, and so on."""
    found: set[str] = set()
    left = [*imports[start]]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += imports[name]
    return found


def circles(imports: dict[str, set[str]]) -> int:
    """Return how many sets of modules import each other, by whatever way."""
    reach = {name: reached(imports, name) for name in imports}
    return len({frozenset(other for other in reach[name] if name in reach[other]) for name in imports} - {frozenset()})


def floors(imports: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of rooms, each of which imports the next; 0 where some form a circle."""
    if circles(imports):
        return 0
    height: dict[str, int] = {}
    for room in sorted(imports, key=lambda room: len(reached(imports, room))):
        height[room] = 1 + max((height[below] for below in imports[room]), default=0)
    return max(height.values())


def compiled(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether numba or Triton compiles a function, or it writes code for them."""
    return bool(re.search(r"(^|_)(cpu|gpu|numba)", path.name)) or any(
        re.match(r"(njit|entry|intrinsic|triton)", ast.unparse(one)) for one in function.decorator_list
    )


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
    imports = own_imports(package)
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
    layout = rooms(imports)
    print(f"rooms, floors, arrows: {len(layout)}, {floors(layout)}, {sum(map(len, layout.values()))}")
    print(f"circles of rooms, of files: {circles(layout)}, {circles(imports)}")
    print(f"longest file: {sizes[longest]} lines ({longest.relative_to(ROOT)})")
    print(f"files over 400 lines: {sum(size > 400 for size in sizes.values())}")
    for most in (100, 50):
        print(f"functions over {most} lines, outside Triton: {sum(length(one) > most for _, one in every)}")
    many = [(path, one) for path, one in functions(package) if parameters(one) >= 10]
    plain = [one.name for path, one in many if not compiled(path, one)]
    print(f"functions with 10 or more parameters: {len(many)}, not compiled: {len(plain)} ({', '.join(plain)})")
    print(f"Selector: {attributes} attributes, {methods} methods")
    print(f"methods that answer when nothing is sealed: {guards}")
    print(f"public class names that occur twice: {sum(count > 1 for count in classes.values())}")
    for folder in ("sparseattn", "scripts", "scripts/evidence", "benchmarks", "tests"):
        print(f"lines of {folder}: {sum(map(lines, tracked(folder))):,}")
    print(f"words of README, Use and Write a method: {words:,}")


if __name__ == "__main__":
    main()
