"""`ModelError`: a model that cannot be loaded, captured or decoded sparsely, and why, in one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class ModelError(ValueError):
    """A model that cannot be loaded or captured, in one sentence."""


def reason(error: Exception) -> str:
    """Return the first sentence of a library's message, without its full stop; with its type where that says what it
    means."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    plain = isinstance(error, (OSError, ValueError, RuntimeError)) or type(error).__module__ != "builtins"
    return (text if plain else f"{type(error).__name__}: {text}").rstrip(".")


@contextlib.contextmanager
def in_a_sentence(what: str, name: str) -> Iterator[None]:
    """Return what libraries raise in the block, which have many types of their own, as a ModelError beginning with
    `what`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if _interrupted(error):
            raise KeyboardInterrupt from error
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} brings Python code of its own, which is not run here (trust_remote_code is False): use a "
                f"model that transformers itself knows, or load it with transformers and hand it to the functions"
            ) from error
        raise ModelError(f"{what}: {reason(error)}") from error


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C led to `error`: torch's modes trip over it on their way out and raise a RuntimeError instead."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
