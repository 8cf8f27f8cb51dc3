"""What vLLM takes for its CPU attention: ours, or, in a vLLM that ours does not fit, vLLM's own.

vLLM asks for it in every engine, configured or not. So nothing of ours may end an engine here that nobody asked to be
sparse, whatever this vLLM lacks. An engine that was asked is refused, or serves as stock if its settings say so.
"""

from __future__ import annotations

from typing import Any

from sparseattn.serving.vllm import mismatch


def unfit() -> Exception | None:
    """Why our backend cannot be loaded into this vLLM; None: it can."""
    try:
        import sparseattn.serving.vllm.cpu  # noqa: F401
    except Exception as error:  # another vLLM may lack any name, and a library that is missing counts too
        return error
    return None


def _backend() -> Any:
    why = unfit()
    if why is None:
        from sparseattn.serving.vllm.cpu import SparseCPUBackend

        return SparseCPUBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    lacking: Exception = why

    class StockBackend(CPUAttentionBackend):
        """vLLM's own, unless it was asked to be sparse."""

        @staticmethod
        def get_impl_cls() -> Any:
            from vllm.config import get_current_vllm_config

            from sparseattn.serving.vllm.settings import configured

            settings = configured(get_current_vllm_config().additional_config)
            if settings is not None:
                mismatch.met(settings.on_mismatch, lacking)
            return CPUAttentionBackend.get_impl_cls()

    mismatch.warn_unfit(why)
    return StockBackend


Backend = _backend()
