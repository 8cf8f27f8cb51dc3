"""What tensors may be: the dtypes that keys and values are stored in, by name, and a refusal of what is no tensor."""

from __future__ import annotations

import torch
from torch import Tensor

STORED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def stored_dtype(name: str, option: str) -> torch.dtype:
    """Return the dtype called `name`; ValueError naming the `option` that it was given to for any other word."""
    if name not in STORED:
        raise ValueError(f"{option} is one of {', '.join(STORED)}, got {name!r}")
    return STORED[name]


def only_tensors(**parts: object) -> None:
    """Refuse what is no tensor of torch by a ValueError with its name and what makes one."""
    for name, part in parts.items():
        if part is None:
            raise ValueError(f"{name} is a torch.Tensor, got None")
        if not isinstance(part, Tensor):
            kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
            made = "torch.from_numpy" if kind == "numpy.ndarray" else "torch.tensor"
            raise ValueError(f"{name} is a torch.Tensor, got a {kind}: {made}({name}) makes one")
