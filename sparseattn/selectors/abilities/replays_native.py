"""Methods that replay what a model's own index chose."""

from __future__ import annotations


class ReplaysNative:
    """A method whose `select` goes by `LayerContext.native`, which a replay of a trace brings."""
