"""Sparse decoding in vLLM: a plug-in that is inert unless an engine is configured (`settings`), on the CPU (`cpu`)."""

from sparseattn.serving.vllm.counters import VLLMStats, stats

__all__ = ["VLLMStats", "stats"]
