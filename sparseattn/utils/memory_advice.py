"""What the system is told of how memory will be used, where there is a way to tell it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

RANDOM, WANTED, HUGE_PAGES = 1, 3, 14  # MADV_RANDOM, MADV_WILLNEED, MADV_HUGEPAGE of Linux


@functools.cache
def madvise() -> Callable[[int, int, int], Any] | None:
    """Return libc's function of the address, the bytes and the advice; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    advise: Callable[[int, int, int], Any] = function
    return advise


def advise(tensor: Tensor, ranges: Iterable[tuple[int, int]], advice: int) -> None:
    """Give advice on bytes `[first, last)` of a tensor's memory; pages that are within it in part are so too."""
    if (tell := madvise()) is None:
        return
    base, page = tensor.data_ptr(), mmap.PAGESIZE
    for first, last in ranges:
        low = (base + first) // page * page
        tell(low, base + last - low, advice)
