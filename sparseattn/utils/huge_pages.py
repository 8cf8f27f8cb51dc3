"""Large tensors in host memory on pages of 2 MiB, where Linux has these on request.

A decode step reads rows that are scattered over a layer's keys and values. On pages of 4 KiB each of them misses the
processor's table of pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

LEAST = 4 << 20  # bytes of a tensor for which it pays
MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    """Return libc's function of the addresses, the bytes and the advice; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    advise: Callable[[int, int, int], Any] = found
    return advise


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages under a contiguous tensor that nothing was written to yet, and return it.

    This is advice: the kernel may have no such pages, and the tensor is the same without.
    """
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or tensor.is_pinned() or size < LEAST or (advise := _madvise()) is None:
        return tensor
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    advise(first, (tensor.data_ptr() + size - first) // page * page, MADV_HUGEPAGE)
    return tensor
