"""Pick the implementation of an operation: a named one runs or raises, by default the best runs that can run here.

An operation is a folder. `dispatch.py` has its functions, with `impl=` and the documentation of the arguments;
`reference.py` is the specification in torch, `cpu.py` numba's code, `gpu.py` Triton's, each with functions of the same
names and arguments without `impl`. Another implementation is a file and its name in the folder's `Operation`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch

from sparseattn.utils.tensors import STORED

# impl -> the file of an operation's folder; "reference" and "gather" are two ways of torch, of `attend` alone.
FILES = {"torch": "reference", "reference": "reference", "gather": "gather", "numba": "cpu", "triton": "gpu"}


class Operation:
    """The implementations of one operation.

    Args:
        package: of its folder, `__package__` in its `dispatch.py`.
        names: of `FILES`.
        fallback: the name of the one in torch that runs where nothing compiled can.
    """

    def __init__(self, package: str, *names: str, fallback: str = "torch") -> None:
        self.names, self.fallback, self._package = names, fallback, package
        self._modules: dict[str, Any] = {}

    def pick(self, impl: str | None, device: torch.device, dtype: torch.dtype, torch_only: bool = False) -> Any:
        """Return the module of the implementation that `impl` means.

        Args:
            impl: a name; None: Triton on a CUDA device, numba on the CPU, torch where these cannot run.
            device, dtype: of what it reads.
            torch_only: whether None means torch, as where gradients are asked for.

        Raises:
            ValueError: a name that the operation does not have.
            RuntimeError: a named implementation that cannot run here.
        """
        torch_only = torch_only and impl is None
        name = self.fallback if torch_only else choose(impl, device, dtype, self.names, self.fallback)
        return self._modules.get(name) or self.module(name)

    def module(self, name: str) -> Any:
        """Return the module of an implementation, imported at its first use: numba and Triton are optional."""
        loaded = self._modules[name] = importlib.import_module(f"{self._package}.{FILES[name]}")
        return loaded


@functools.cache  # what can run here does not change while a process runs, and every step asks
def choose(
    impl: str | None,
    device: torch.device,
    dtype: torch.dtype,
    names: tuple[str, ...] = ("torch", "numba", "triton"),
    fallback: str = "torch",
) -> str:
    """Return the name of the implementation that `impl` means, see `Operation.pick`."""
    if impl is None:
        compiled = "triton" if device.type == "cuda" else "numba"
        return compiled if compiled in names and why_not(compiled, device, dtype) is None else fallback
    if impl not in names:
        raise ValueError(f"impl is one of {', '.join(names)} or None, got {impl!r}")
    reason = why_not(impl, device, dtype)
    if reason is not None:
        raise RuntimeError(f'impl="{impl}" cannot run: {reason}')
    return impl


def why_not(impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why an implementation cannot run on this device and dtype, or None if it can."""
    if impl == "numba":
        return why_not_numba(device, dtype)
    return why_not_triton(device, dtype) if impl == "triton" else None


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why `impl="triton"` cannot run on this device and dtype, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'sparseattn[triton]')"
    if dtype == torch.float64:
        return "the Triton kernel takes float32, float16 and bfloat16, not float64"
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        if dtype == torch.bfloat16:
            return (
                "Triton's interpreter computes wrong bfloat16 products; use float32 or float16 under TRITON_INTERPRET=1"
            )
        return None
    if device.type != "cuda":
        return f"Triton needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1, for tests)"
    return None


def why_not_numba(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why `impl="numba"` cannot run on this device and dtype, or None if it can."""
    if device.type != "cpu":
        return f"numba's code runs on the CPU, not on {device.type}"
    if dtype not in _STORED:
        return f"numba's code takes float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return _missing_numba()


_STORED = frozenset(STORED.values())


@functools.cache
def _missing_numba() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'sparseattn[numba]')"
    return None
