"""Every codec of this package, a row each: text alone, so that reading it imports no class and no torch."""

from __future__ import annotations

from typing import NamedTuple

BASE = "sparseattn.codecs."


class CodecRow(NamedTuple):
    """What there is to say of a codec in a phrase each; docs/reference/codecs.md describes it at length.

    Args:
        place: its class, `MODULE:CLASS` in `sparseattn.codecs`.
        paper: where it comes from, an arXiv number first.
        keeps: what is stored of a row.
        departs: what differs from the paper or its public code, and why.
        read_by: which code attends to its rows.
    """

    place: str
    paper: str
    keeps: str
    departs: str
    read_by: str = "torch"


CODECS = {
    "kivi": CodecRow(
        "kivi:Kivi",
        "2402.02750",
        keeps="codes of 2, 4 or 8 bits; levels of each key channel in a group of rows, of each 32 channels of a value",
        departs="levels are rounded outwards, so that they bound the keys; the cache's window and waiting rows take "
        "the place of the residual rows",
        read_by="numba, Triton, torch",
    ),
}
NAMES = {BASE + codec.place: name for name, codec in CODECS.items()}  # class -> name
