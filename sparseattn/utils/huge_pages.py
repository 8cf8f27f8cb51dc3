"""Large tensors in host memory on pages of 2 MiB, where Linux has these on request.

A decode step reads rows that are scattered over a layer's keys and values. On pages of 4 KiB each of them misses the
processor's table of pages.
"""

from __future__ import annotations

import mmap

from torch import Tensor

from sparseattn.utils.memory_advice import HUGE_PAGES, madvise

LEAST = 4 << 20  # bytes of a tensor for which it pays


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages under a contiguous tensor that nothing was written to yet, and return it.

    This is advice: the kernel may have no such pages, and the tensor is the same without.
    """
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or tensor.is_pinned() or size < LEAST or (advise := madvise()) is None:
        return tensor
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    advise(first, (tensor.data_ptr() + size - first) // page * page, HUGE_PAGES)
    return tensor
