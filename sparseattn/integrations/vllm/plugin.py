"""vLLM's entry point: tells it of our attention backends. Cheap, and without effect unless an engine is configured."""

from __future__ import annotations

from typing import Any

from sparseattn.integrations.vllm import counters


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    counters.begin()
    counters.publish()
    if current_platform.is_cpu():
        _spare_llvmlite()
        register_backend(AttentionBackendEnum.CPU_ATTN, "sparseattn.integrations.vllm.cpu.SparseCPUBackend")


def _spare_llvmlite() -> None:
    """Lets vLLM start where numba is imported already.

    vLLM's CPU worker looks through every loaded module for kernels to replace, and asks each value for its `__dict__`.
    llvmlite's library object takes any name for a function of LLVM, this one too, and vLLM 0.32 stops at the answer.
    """
    from llvmlite.binding import ffi

    wrapper: Any = type(ffi.lib)
    looked_up = wrapper.__getattr__
    if getattr(looked_up, "spared", False):
        return

    def look_up(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return looked_up(self, name)

    look_up.spared = True  # type: ignore[attr-defined]
    wrapper.__getattr__ = look_up
