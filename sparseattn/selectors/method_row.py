"""What there is to say of a method in a phrase each: its row in the registry."""

from __future__ import annotations

from typing import NamedTuple

BASE = "sparseattn.selectors."


class MethodRow(NamedTuple):
    """What there is to say of a method in a phrase each; docs/reference/methods.md describes it at length.

    Args:
        place: its class, `FAMILY.MODULE:CLASS` in `sparseattn.selectors`.
        paper: where it comes from: an arXiv number, an address, or words with one of these in them.
        reads: which tokens a query reads.
        faithful: what is as in the paper.
        departs: what differs from the paper, and why.
        scans: what choosing reads for a KV head at each step.
        builds: what it computes from the prompt.
        needs: what it must be given; nothing by default.
        runs: where tokens are chosen, see docs/reference/methods.md.
        section: the anchor of its section in docs/reference/methods.md, where that is not its name.
    """

    place: str
    paper: str
    reads: str
    faithful: str = ""
    departs: str = ""
    scans: str = "nothing"
    builds: str = "nothing"
    needs: str = "nothing"
    runs: str = "kernels"
    section: str = ""

    @property
    def family(self) -> str:
        """The folder of its class."""
        return self.place.partition(".")[0]

    @property
    def module(self) -> str:
        return BASE + self.place.partition(":")[0]

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.place.partition(":")[2]
