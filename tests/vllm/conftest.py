"""Tests with vLLM itself, in an environment of its own: `make vllm`. Elsewhere each file is one skip that says so."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sparseattn.serving.vllm.installed import distribution

HERE = distribution() is not None  # by the distribution: `import vllm` finds this folder too
if HERE:
    with warnings.catch_warnings():  # of its imports, which are its own affair; what tests cause stays an error
        warnings.simplefilter("ignore")
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.layers.attention import Attention  # noqa: F401


class Absent(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("vLLM is not installed here: `make vllm` runs these", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HERE else Absent.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Older vLLMs compile functions by a call of torch's that warns, when an engine is made."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"))
