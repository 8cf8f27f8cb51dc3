"""Methods that work in host memory alone."""

from __future__ import annotations


class HostOnly:
    """A method that searches on the host: a cache on a GPU then needs `sealed_device="cpu"`."""
