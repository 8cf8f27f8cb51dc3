"""The name under which the installed transformers passes a model its cache: `cache`, before 5.24 `past_key_values`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("cache", "past_key_values")  # newest first


@functools.cache
def cache_name() -> str:
    """Return the name by which `generate` hands a cache to every model, which is the one that gives no warning."""
    from transformers import GenerationMixin

    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in NAMES if name in parameters)


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return the keyword argument by which a model takes a cache: `model(ids, **cache_argument(cache))`."""
    return {cache_name(): cache}


def cache_in(inputs: Mapping[str, Any]) -> Any:
    """Return the cache among a model's keyword arguments, whichever name it has there; None without one."""
    for name in NAMES:
        if (cache := inputs.get(name)) is not None:
            return cache
    return None


def version() -> str:
    """Return the version of the installed transformers."""
    import transformers

    return str(transformers.__version__)


def installed() -> str:
    """Return the installed transformers with its version, for sentences."""
    return f"transformers {version()}"
