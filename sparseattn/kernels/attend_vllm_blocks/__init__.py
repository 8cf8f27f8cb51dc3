"""Attention over chosen pages of the cache of vLLM's CPU backend, read where they lie in its blocks."""
