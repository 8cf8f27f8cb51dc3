"""Models whose shapes are known by name, `data/models.json`."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

from sparseattn.utils.json_text import parse_object


def named() -> dict[str, Any]:
    """Return the models that are known by name: their configs' fields that matter, sources and published totals."""
    path = Path(str(importlib.resources.files("sparseattn"))) / "data" / "models.json"
    return parse_object(path.read_bytes())
