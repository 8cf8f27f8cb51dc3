"""`import sparseattn` needs torch alone, and imports point the way the design says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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
    "numpy",
    "sklearn",
    "openai",
    "anyio",
    "playwright",
)

# Module -> what it may import of the package. A prefix stands for everything below it.
ARROWS = {
    "selection": (),
    "board": ("selection",),
    "storage": (),
    "costs": ("budget",),
    "machine": ("costs", "files", "places"),
    "launches": ("attention", "cache", "costs", "kernels", "selection", "selectors.base"),
    "measuring": ("costs", "environment", "launches", "machine", "timing"),
    "timing": (),
    "contract": ("selection", "selectors.base"),
    "zones": (),
    "queries": ("storage",),
    "budget": (),
    "devices": (),
    "dtypes": (),
    "files": (),
    "hashes": (),
    "locks": ("files",),
    "rope": (),
    "tensorfiles": ("files", "hashes"),
    "tensors": (),
    "artefact": ("dtypes", "kernels.scoring", "rope", "tensorfiles"),
    "estimates": ("tensorfiles",),
    "fitting": ("cache", "estimates", "metrics", "selectors", "traces"),
    "calibration": ("artefact", "rope", "tensorfiles"),
    "kernels": ("dtypes", "selection", "kernels", "tensors"),
    "similarity": ("tensorfiles",),
    "selectors.base": ("board", "costs", "kernels.coded", "kernels.scoring", "selection", "storage", "rope"),
    "selectors": (
        *(
            "kernels",
            "mass",
            "selection",
            "storage",
            "rope",
            "artefact",
            "board",
            "calibration",
            "costs",
            "estimates",
            "hashes",
            "selectors",
        ),
        "similarity",
    ),
    "checks": ("kernels.coded", "selectors.base", "tensors"),
    "keeping": ("hashes", "selectors.base", "storage"),
    "indexes": ("checks", "hashes", "keeping", "selectors.base", "storage", "tensorfiles"),
    "codes": ("kernels.coded", "storage"),
    "stored": ("checks", "codes", "queries", "selection", "selectors.base", "storage", "zones"),
    "cache": (
        *(
            "budget",
            "checks",
            "codes",
            "contract",
            "indexes",
            "keeping",
            "kernels.coded",
            "kernels",
            "mass",
            "selection",
            "selectors",
            "stored",
        ),
        *(
            "tensors",
            "zones",
        ),
    ),
    "mass": ("selection",),
    "attention": ("budget", "cache", "kernels", "selection"),
    "traceformat": (),
    "tracewriter": ("files", "rope", "traceformat"),
    "traces": ("rope", "traceformat", "tracewriter"),
    "synthetic": ("dtypes", "hashes", "rope", "traces"),
    "builtin": ("places", "traces", "integrations", "tasks", "texts", "wheels"),
    "places": (),
    "wheels": (),
    "texts": ("files", "locks", "places", "wheels"),
    "integrations": (
        *("attention", "board", "budget", "cache", "rope", "selection", "selectors", "traces", "tracewriter"),
        *("devices", "fingerprints", "integrations", "files", "locks", "places", "plans", "roles", "wheels"),
        "__version__",
    ),
    "integrations.vllm": (
        *("fingerprints", "integrations", "kernels", "plans", "roles", "selection", "selectors", "wheels"),
    ),
    "environment": ("devices", "kernels"),
    "curves": (),
    "sweep": ("budget", "cache", "checks", "contract", "curves", "rope", "selectors", "traces"),
    "roles": ("budget", "files", "rope", "selectors"),
    "metrics": (
        "attention",
        "board",
        "budget",
        "cache",
        "checks",
        "devices",
        "kernels",
        "mass",
        "roles",
        "selection",
        "selectors",
        "traces",
    ),
    "ranks": (),
    "heads": ("budget", "metrics", "ranks"),
    "exploring": ("budget", "inspection", "metrics", "roles", "selectors", "traces"),
    "inspection": ("checks", "kernels.scoring", "metrics", "ranks", "selectors", "traces"),
    "tasks": ("budget", "files", "fingerprints", "hashes", "integrations", "plans", "roles", "selectors"),
    "fingerprints": ("hashes", "tensorfiles"),
    "plans": ("roles",),
    "recommend": (
        *("board", "budget", "cache", "costs", "files", "integrations", "machine", "roles", "selectors"),
        "tasks",
    ),
    "training": (
        *("artefact", "calibration", "devices", "dtypes", "environment", "files", "hashes", "rope", "tensorfiles"),
        *("similarity", "traces"),
    ),
}
# Optional package -> the files that may import it.
HOMES = {
    "triton": tuple(
        f"kernels/{name}.py"
        for name in ("triton_gpu", "pages", "probes", "lists", "lowbit_gpu", "coded_gpu", "directions_gpu", "ahead")
    ),
    "transformers": (
        "integrations/models.py",
        "integrations/gguf.py",
        "integrations/capture.py",
        "integrations/routing.py",
        "integrations/upstream.py",
    ),
    "vllm": tuple(f"integrations/vllm/{name}.py" for name in ("cpu", "cuda", "layers", "offline", "plugin")),
    "safetensors": ("tensorfiles.py", "traces.py"),
    "matplotlib": ("cli/plots.py",),
    "sklearn": ("inspection.py",),
    "openai": ("integrations/endpoint.py",),
    "anyio": ("integrations/endpoint.py",),
    "faiss": ("selectors/nearest.py", "training/kmeans.py"),
    "numba": (
        "kernels/numba_cpu.py",
        "kernels/best_cpu.py",
        "kernels/blocks_cpu.py",
        "kernels/lowbit_cpu.py",
        "kernels/coded_cpu.py",
        "kernels/directions_cpu.py",
        "kernels/vectors.py",
        "selectors/graph.py",
    ),
}


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
selector = sparseattn.Quest()
cache = sparseattn.KVCache(selector, window=16)
cache.append(*torch.randn(2, 1, 2, 200, 64))
sparseattn.decode(torch.randn(1, 2, 4, 64), cache, 64)
for name in sparseattn.__all__:
    getattr(sparseattn, name)
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


def test_imports_point_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        rule = max((key for key in ARROWS if (module + ".").startswith(key + ".")), key=len, default=None)
        if rule is None:
            continue
        for name in imports(path):
            if not name.startswith("sparseattn."):
                continue
            inner = name.removeprefix("sparseattn.")
            allowed = (rule, *ARROWS[rule])
            fits = any((inner + ".").startswith(key + ".") for key in allowed)
            assert fits, f"{module} imports {inner}"


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert version("sparseattn") == sparseattn.__version__
