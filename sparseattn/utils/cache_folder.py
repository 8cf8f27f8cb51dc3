"""Where things lie that can be made again: built-in traces, converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$SPARSEATTN_CACHE`, `$XDG_CACHE_HOME/sparseattn` or `~/.cache/sparseattn`, which may not exist yet."""
    own, base = os.environ.get("SPARSEATTN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(base) if base else Path.home() / ".cache") / "sparseattn"
