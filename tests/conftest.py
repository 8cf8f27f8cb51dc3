"""Shared set-up: without a GPU, Triton kernels run under its interpreter, which must be chosen before its import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip, with the reason printed, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


torch.set_num_threads(1)  # the tests' tensors are small: a second thread costs more than it brings


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache that a test makes holds its selector against the contract, unless it says `check=False`."""
    from sparseattn import KVCache

    monkeypatch.setitem(KVCache.__init__.__kwdefaults__, "check", True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
