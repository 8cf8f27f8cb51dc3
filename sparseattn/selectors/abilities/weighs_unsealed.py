"""Methods that weigh what every query reads, sink and unsealed rows, before they choose."""

from __future__ import annotations


class WeighsUnsealed:
    """A method whose `select` goes by `StepContext.unsealed_lse`. Where sealed rows lie apart, the host waits for
    it."""
