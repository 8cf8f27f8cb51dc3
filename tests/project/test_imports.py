"""`import sparseattn` needs torch alone, and imports point the way the design says."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import sparseattn

ROOT = Path(sparseattn.__file__).parent
OPTIONAL = (
    "triton",
    "safetensors",
    "transformers",
    "faiss",
    "numba",
    "matplotlib",
    "typer",
    "rich",
    "jinja2",
    "numpy",
    "sklearn",
    "openai",
    "anyio",
    "playwright",
    "punkt",
    "pyarrow",
    "rouge",
    "rouge_score",
    "jieba",
    "lm_eval",
)

# A folder -> the folders of the package that it may import. In the order of docs/write/design.md, from the ground up.
BELOW = {
    "utils": (),
    "core": ("utils",),
    "traces": ("core", "utils"),
    "kernels": ("core", "utils"),
    "selectors": ("kernels", "core", "utils"),
    "codecs": ("selectors", "kernels", "core", "utils"),
    "roles": ("selectors", "core", "utils"),
    "cache": ("codecs", "selectors", "kernels", "core", "utils"),
    "cost_model": ("cache", "selectors", "kernels", "core", "utils"),
    "models": ("cache", "codecs", "roles", "selectors", "traces", "core", "utils"),
    "serving": ("models", "roles", "selectors", "kernels", "core", "utils"),
    "evaluation": ("serving", "models", "cache", "codecs", "roles", "selectors", "kernels", "traces", "core", "utils"),
    "training": ("evaluation", "cost_model", "cache", "selectors", "traces", "core", "utils"),
    "recommend": ("evaluation", "models", "cost_model", "cache", "roles", "selectors", "core", "utils"),
    "reporting": ("recommend", "evaluation", "cost_model", "roles", "selectors", "core", "utils"),
    "cli": (
        "reporting",
        "training",
        "recommend",
        "evaluation",
        "serving",
        "models",
        "cost_model",
        "cache",
        "codecs",
        "roles",
        "selectors",
        "kernels",
        "traces",
        "core",
        "utils",
    ),
}


def files(pattern: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)]


VLLM = ("adapters", "backend", "cpu", "cuda", "offline", "plugin")  # run within its engine, or start one

# Optional package -> the files that may import it.
HOMES = {
    "triton": ("kernels/triton_ahead.py", *files("kernels/*/gpu*.py")),
    "transformers": (
        "models/load.py",
        "models/skeleton.py",
        "models/gguf.py",
        "models/capture.py",
        "models/attention_routing.py",
        "models/cache_argument.py",
        "models/transformers_classes.py",
    ),
    "vllm": tuple(f"serving/vllm/{name}.py" for name in VLLM),
    "safetensors": ("utils/tensor_files.py", "traces/trace_file.py"),
    "jinja2": ("reporting/html/html.py",),
    "matplotlib": ("reporting/plots/panels.py",),
    "sklearn": ("evaluation/attention_stats.py",),
    "punkt": ("evaluation/ruler/sentences.py",),
    "openai": ("serving/openai_client.py",),
    "anyio": ("serving/openai_client.py",),
    "pyarrow": ("evaluation/layouts/tables.py",),
    "rouge": ("evaluation/metrics/libraries.py",),
    "rouge_score": ("evaluation/metrics/libraries.py",),
    "jieba": ("evaluation/metrics/libraries.py",),
    "lm_eval": tuple(f"evaluation/harness/{name}.py" for name in ("model", "server", "launch")),
    "faiss": ("kernels/nearest.py", "training/kmeans.py"),
    "numba": (
        "kernels/graph/build_and_search.py",
        *files("kernels/numba_*.py"),
        *files("kernels/*/cpu*.py"),
    ),
}


@functools.cache
def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_import_needs_torch_alone() -> None:
    blocked = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # an import of it raises ImportError
import sparseattn, torch
import sparseattn.evaluation.builtin_traces, sparseattn.models.capture, sparseattn.models.load
import sparseattn.traces.synthetic, sparseattn.traces.trace
try:
    sparseattn.models.load.load_model("x")
except ValueError as error:
    assert "needs transformers" in str(error), error
else:
    raise AssertionError("transformers was not needed")
selector = sparseattn.Quest()
cache = sparseattn.KVCache(selector, window=16)
cache.append(*torch.randn(2, 1, 2, 200, 64))
assert sparseattn.decode(torch.randn(1, 2, 4, 64), cache, 64).isfinite().all()
for name in sparseattn.__all__:
    getattr(sparseattn, name)
"""
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_help_needs_no_extra() -> None:
    """As after `pip install` of the wheel alone, without packages that only extras bring; numpy is such a one too."""
    core = ("safetensors", "typer", "rich", "jinja2")
    blocked = f"""
import sys
for name in {tuple(name for name in (*OPTIONAL, "vllm", "gguf", "accelerate") if name not in core)!r}:
    sys.modules[name] = None
from typer.testing import CliRunner
from sparseattn.cli.app import COMMANDS, app
for arguments in (["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (arguments, done.output, done.exception)
"""
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_optional_packages_are_imported_in_one_file() -> None:
    for path in ROOT.rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()
        for name in imports(path):
            package = name.partition(".")[0]
            if package in HOMES:
                assert where in HOMES[package], f"{where} imports {package}"


def test_type_checkers_see_what_is_exported() -> None:
    """Methods are exported by their rows (`selectors/methods.py`); the imports for type checkers are written."""
    nodes = ast.walk(ast.parse((ROOT / "__init__.py").read_text()))
    seen = {alias.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    lacking = [
        f"from {place} import {name} as {name}"
        for name, place in sparseattn._MODULES.items()
        if seen.get(name) != place
    ]
    assert not lacking, f"sparseattn/__init__.py lacks {lacking}"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without `sparseattn.`."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def own_imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports, in functions and for types too."""
    found = set()
    for name in imports(path):
        if name.startswith("sparseattn."):
            inner = name.removeprefix("sparseattn.")
            while inner not in known:  # a name within a module
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found


def test_the_package_is_folders_alone() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()} == set(BELOW)
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_imports_folders_below_it_only(folder: str) -> None:
    known = modules()
    for name, path in known.items():
        if name.partition(".")[0] == folder:
            above = {inner.partition(".")[0] for inner in own_imports(path, known)} - {folder, *BELOW[folder]}
            assert above <= {""}, f"{name} imports {', '.join(sorted(above))}"  # "": `__version__`


def test_every_folder_says_what_lives_in_it() -> None:
    for path in ROOT.rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert said, f"{path.parent.relative_to(ROOT)} has no docstring"


def test_no_files_import_each_other_in_a_circle() -> None:
    known = modules()
    left = {name: own_imports(path, known) - {"", name} for name, path in known.items() if name}
    while free := {name for name, inner in left.items() if not inner & left.keys()}:
        left = {name: inner for name, inner in left.items() if name not in free}
    assert not left, f"circles among {', '.join(sorted(left))}"


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert version("sparseattn") == sparseattn.__version__
