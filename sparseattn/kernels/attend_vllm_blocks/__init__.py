"""Attention over chosen pages of vLLM's packed blocks, where they lie (CPU)."""
