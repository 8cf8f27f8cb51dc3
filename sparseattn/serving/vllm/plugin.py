"""vLLM's entry point: tells it of our attention backends. Cheap, and attention stays as it is unless an engine is
configured; counters are there in any case, and stay 0."""

from __future__ import annotations

from typing import Any

from sparseattn.serving.vllm import counters

CPU_BACKEND = "sparseattn.serving.vllm.cpu.SparseCPUBackend"
CUDA_BACKEND = "sparseattn.serving.vllm.cuda.SparseTritonBackend"


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    counters.begin()
    counters.publish()
    _refuse_early(current_platform)
    if current_platform.is_cpu():
        _spare_llvmlite()
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    elif current_platform.is_cuda():  # asked for by --attention-backend CUSTOM
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)


def _refuse_early(platform: Any) -> None:
    """Lets what cannot be served be refused while vLLM still makes its configuration, in the process that asks for it.

    A backend is asked later, by a process of the engine, and by models with attention of another kind never.
    """
    from sparseattn.serving.vllm.engine_checks import check_platform, settings_of

    platform, device = type(platform), platform.device_type
    stock = platform.check_and_update_config.__func__
    if getattr(stock, "refuses", False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        if settings_of(vllm_config) is not None:
            check_platform(device, vllm_config.attention_config.backend)

    check_and_update_config.refuses = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


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
