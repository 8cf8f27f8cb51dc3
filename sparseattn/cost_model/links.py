"""Links between ranks: their bandwidth and latency, by name or as given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseattn.core.rank_traffic import Traffic
from sparseattn.utils.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Link:
    """What ranks send each other over.

    Args:
        name: of the link.
        bandwidth: bytes per second that a rank receives.
        latency: seconds of a message that holds next to nothing.
        source: where these are from.
    """

    name: str
    bandwidth: float
    latency: float
    source: str

    def seconds(self, sent: Traffic, size: int) -> float:
        """Return what the rounds of a step take: the doublings that reach all ranks, each of a latency, and what every
        rank receives, which is as much as it sends."""
        return sent.rounds * math.ceil(math.log2(size)) * self.latency + sent.sent / self.bandwidth if size > 1 else 0.0

    @classmethod
    def of(cls, text: str) -> Link:
        """Return a link by name, or of "GB/s,us": a bandwidth and a latency.

        Raises:
            ValueError: neither.
        """
        if text in LINKS:
            return LINKS[text]
        try:
            bandwidth, latency = (float(part) for part in text.split(","))
        except ValueError:
            bandwidth = latency = math.nan
        if not (0 < bandwidth < math.inf and 0 <= latency < math.inf):
            raise ValueError(
                f"a link is one of {', '.join(LINKS)}, or GB/s and microseconds such as 25,10, got {text!r}"
                f"{did_you_mean(text, list(LINKS))}"
            )
        return cls(text, bandwidth * 1e9, latency * 1e-6, "as given")


LINKS = {
    link.name: link
    for link in (
        Link(
            "nvlink",
            450e9,
            2e-6,
            "NVLink of an H100 SXM: 900 GB/s in both directions by the data sheet; 2 us a message are assumed",
        ),
        Link(
            "infiniband",
            50e9,
            5e-6,
            "NDR InfiniBand, a port a GPU: 400 Gbit/s by the data sheet; 5 us a message are assumed",
        ),
    )
}
