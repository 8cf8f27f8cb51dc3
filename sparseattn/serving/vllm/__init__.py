"""Sparse decoding in vLLM: a plug-in that is inert unless an engine is configured (`settings`), on the CPU (`cpu`)."""

from sparseattn.core.activity import Activity
from sparseattn.serving.vllm.counters import stats

__all__ = ["Activity", "stats"]
