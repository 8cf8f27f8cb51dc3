"""What OpenMP's idle threads do, as the environment says."""

from __future__ import annotations

import os


def spin() -> bool:
    """Return whether they spin for a while, so that the next work finds them awake, and do not sleep at once."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive" and os.environ.get("GOMP_SPINCOUNT") != "0"
