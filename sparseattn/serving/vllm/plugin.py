"""vLLM's entry point: tells it of our attention backends. Cheap, and attention stays as it is unless an engine is
configured; counters are there in any case, and stay 0."""

from __future__ import annotations

from typing import Any

from sparseattn.serving.vllm import counters, mismatch
from sparseattn.serving.vllm.settings import configured

CPU_BACKEND = "sparseattn.serving.vllm.backend.Backend"
CUDA_BACKEND = "sparseattn.serving.vllm.cuda.SparseTritonBackend"


def register() -> None:
    """Register the plug-in: called by vLLM in every process, possibly more than once.

    In a vLLM that does not know what is called here nothing is changed, and a warning says so; only where the
    environment asks for sparse serving, that is an error. An engine that is asked for it otherwise is refused by
    `_refuse_early`, if that much is known here.

    Raises:
        mismatch.Mismatch: see above.
    """
    try:
        _register()
    except Exception as error:  # another vLLM may lack any name
        if (settings := configured(None)) is not None:
            mismatch.met(settings.on_mismatch, error)
        mismatch.warn_unfit(error)


def _register() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _refuse_early(current_platform)
    counters.begin()
    counters.publish()
    if current_platform.is_cpu():
        _spare_llvmlite()
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    elif current_platform.is_cuda():  # asked for by --attention-backend CUSTOM
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)


def _refuse_early(platform: Any) -> None:
    """Lets what cannot be served be refused while vLLM still makes its configuration, in the process that asks for it.

    A backend is asked later, by a process of the engine, and by models with attention of another kind never.
    """
    platform, device = type(platform), platform.device_type
    stock = platform.check_and_update_config.__func__
    if getattr(stock, "refuses", False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        _check(device, vllm_config)

    check_and_update_config.refuses = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


def _check(device: str, vllm_config: Any) -> None:
    """ValueError for an engine that is asked to be sparse and cannot be; nothing where it is not asked."""
    from sparseattn.serving.vllm.engine_checks import check_platform, settings_of

    settings = settings_of(vllm_config)
    if settings is None:
        return
    check_platform(device, vllm_config.attention_config.backend)
    if device == "cpu":
        from sparseattn.serving.vllm.backend import unfit

        if (why := unfit()) is not None:
            mismatch.met(settings.on_mismatch, why)


def _spare_llvmlite() -> None:
    """Lets vLLM start where numba is imported already.

    vLLM's CPU worker looks through every loaded module for kernels to replace, and asks each value for its `__dict__`.
    llvmlite's library object takes any name for a function of LLVM, this one too, and vLLM stops at the answer.
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
