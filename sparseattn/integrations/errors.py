"""What goes wrong with models, in one sentence."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be loaded or captured, in one sentence."""


def reason(error: Exception) -> str:
    """The first sentence of a library's message, without its full stop; with its type where that says what it means."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    plain = isinstance(error, (OSError, ValueError, RuntimeError)) or type(error).__module__ != "builtins"
    return (text if plain else f"{type(error).__name__}: {text}").rstrip(".")
