"""What OpenMP's idle threads do, as the environment says."""

from __future__ import annotations

import os


def spin() -> bool:
    """Return whether they spin for a while, so that the next work finds them awake, and do not sleep at once."""
    if turns := os.environ.get("GOMP_SPINCOUNT", ""):  # which goes before the policy
        return turns != "0"
    return os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
