"""Tests with vLLM itself, in an environment of its own: `make vllm`. Elsewhere each file is one skip that says so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseattn.serving.vllm.installed import distribution

HERE = distribution() is not None  # by the distribution: `import vllm` finds this folder too


@functools.cache
def import_vllm() -> None:
    """Import it where tests are collected, which the process that only hands them out does not do."""
    with warnings.catch_warnings():  # of its imports, which are its own affair; what tests cause stays an error
        warnings.simplefilter("ignore")
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.layers.attention import Attention  # noqa: F401
        from vllm.model_executor.models import registry
    if not torch.cuda.is_available() and hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = _here


def _here(look: Callable[[], Any]) -> Any:
    """Look at a model's class in this process, which imports it anyway. vLLM does so in another, for GPUs' sake, and it
    imports vLLM anew: nine seconds for each kind of model that a machine has not seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return look()


class Absent(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("vLLM is not installed here: `make vllm` runs these", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if not HERE:
        return Absent.from_parent(parent, path=module_path)
    import_vllm()
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Older vLLMs compile functions by a call of torch's that warns, when an engine is made."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"))
