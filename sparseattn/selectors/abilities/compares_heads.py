"""Methods that choose for the KV heads of a layer together."""

from __future__ import annotations


class ComparesHeads:
    """A method whose choice in a KV head depends on other heads of the layer, so that it is shown all of them at once.

    Where processes share a layer's heads (tensor parallelism), each would choose by its own heads alone: another
    method. So it is refused there.
    """
