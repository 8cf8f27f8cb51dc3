"""A model to oneself: as it must be while it is captured or prepared, and by nobody else meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from sparseattn.models.errors import ModelError


@contextlib.contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Turn gradients and dropout off within the block; every module gets its mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


_ROUTED: dict[int, str] = {}  # id of a config -> what is being done with the models that have it
_ROUTING = threading.Lock()


@contextlib.contextmanager
def alone(model: Any, purpose: str) -> Iterator[None]:
    """Refuse to route a model's calls while they, or those of a model that shares its config, are being routed.

    Args:
        model: of transformers.
        purpose: what is done with it, a participle.

    Raises:
        ModelError: it is being captured, or prepared for a `SparseCache`.
    """
    config = id(model.config)
    with _ROUTING:
        if config in _ROUTED:
            raise ModelError(f"this model is being {_ROUTED[config]} already")
        _ROUTED[config] = purpose
    try:
        yield
    finally:
        del _ROUTED[config]
