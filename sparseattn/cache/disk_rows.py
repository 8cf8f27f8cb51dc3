"""Sealed rows in a file that is mapped into memory, so that a cache may be larger than memory.

The file has no name: it is gone with the rows, and with the process however that ends. It has holes where nothing is
stored yet. A step reads the pages of the rows that were chosen, and asks for all of them at once, in the file's order,
before attention touches the first; what it does not ask for is not read. What is written lies in the system's cache of
pages until it has memory for something better.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.utils.memory_advice import RANDOM, WANTED, advise

DISK = "disk:"  # of `sealed_device`, before a folder


def folder_of(given: object) -> Path | None:
    """Return the folder of `sealed_device="disk:FOLDER"`, None for another device.

    Raises:
        ValueError: no folder that files can be made in.
    """
    if not isinstance(given, str) or not given.startswith(DISK):
        return None
    folder = Path(given.removeprefix(DISK))
    if given == DISK or not folder.is_dir():
        raise ValueError(f"sealed_device={given!r} is {DISK} and a folder that is there")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"no file can be made in {folder}: {error.strerror or error}") from error
    return folder


class DiskRows(RowBuffer):
    """Rows `[B,H,N,D]` in a mapped file of a folder; the second half of its places is a hole until rows come.

    Args:
        capacity: rows to make room for at once.
        folder: of the file.
    """

    def __init__(self, capacity: int, folder: Path) -> None:
        super().__init__(2, capacity)
        self.folder = folder

    def fresh(self) -> DiskRows:
        return DiskRows(self.capacity, self.folder)

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=like.dtype)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".sparseattn-rows-") as file:
            os.truncate(file.fileno(), count * like.dtype.itemsize)
            mapped = torch.from_file(file.name, shared=True, size=count, dtype=like.dtype)
        advise(mapped, [(0, mapped.nbytes)], RANDOM)  # a page is not read for its neighbours' sake
        return mapped.view(*shape)

    def fetch(self, selection: Selection) -> None:
        """Ask for the pages of the rows that a selection names, in the order of the file.

        The system reads them while the caller goes on; who touches one that is not there yet waits for it.
        """
        if self.storage is None or not selection.start.shape[2]:
            return
        advise(self.storage, self._ranges(selection), WANTED)

    def _ranges(self, selection: Selection) -> list[tuple[int, int]]:
        """Return the bytes `[first, last)` of the storage in which chosen rows lie, whole pages, rising and apart."""
        storage, page = self.full, mmap.PAGESIZE
        batch, heads, places, size = storage.shape
        row = size * storage.element_size()
        lists = selection.start.shape[1]
        head = torch.arange(lists) * heads // lists  # of each list of spans
        base = (torch.arange(batch)[:, None] * heads + head) * places  # [B,Hs] the first row of a head
        used = selection.length > 0
        first = (base[..., None] + selection.start.long())[used] * row
        last = first + selection.length.long()[used] * row
        shift = storage.data_ptr() % page
        low, high = (first + shift) // page, (last + shift + page - 1) // page
        order = low.argsort()
        low, high = low[order], high[order].cummax(0).values
        if not len(low):
            return []
        begins = torch.cat([low.new_ones(1, dtype=torch.bool), low[1:] > high[:-1]])
        ends = torch.cat([begins[1:], begins.new_ones(1)])
        return [
            (max(a * page - shift, 0), b * page - shift)
            for a, b in zip(low[begins].tolist(), high[ends].tolist(), strict=True)
        ]
