"""The dtypes that keys and values are stored in, by the names that options and files use."""

from __future__ import annotations

import torch

STORED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def stored_dtype(name: str, option: str) -> torch.dtype:
    """The dtype called `name`; ValueError naming the `option` that it was given to for any other word."""
    if name not in STORED:
        raise ValueError(f"{option} is one of {', '.join(STORED)}, got {name!r}")
    return STORED[name]
