"""The method, budget and dense rows that the vLLM plug-in serves by default, and vLLM's words that it knows."""

from __future__ import annotations

# Of the methods that were timed on processors with AMX and without, the one that was faster than stock on both
# (docs/use/serving.md, docs/lab/results/speed.md).
SELECTOR = "quest:page=32"
BUDGET = 2048  # rows beyond sink and window
SINK, WINDOW = 4, 64  # rows
DENSE_LAYERS = 2  # the first ones
ABOVE = 8000  # rows of a sequence, up to which its attention is dense

# What an engine does that is not as sparseattn knows it.
REFUSE, STOCK = "refuse", "stock"

# Caches of 8 bits as vLLM calls them -> the dtype of their numbers as torch calls it.
BYTE_FLOATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
