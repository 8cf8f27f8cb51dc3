"""Which windows of which texts a model reads to be trained on, and the traces of what it reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.models.capture import capture
from sparseattn.models.load import encode
from sparseattn.traces.texts import TEXTS, read_named
from sparseattn.traces.trace import Trace

MODEL = "smollm2"
TOKENS = 8192
# Text -> windows to train on, spread over it; one more, its last, is held out for validation.
WINDOWS = {"paradise-lost": 4, "as-you-like-it": 3, "nltk": 5}


@dataclass(frozen=True, eq=False)
class Window:
    """A part of a text that the model reads as one prompt.

    Args:
        name: of its trace.
        held_out: whether training is only validated on it.
        ids: `[1,T]`.
        about: what a trace says of its text.
    """

    name: str
    held_out: bool
    ids: Tensor
    about: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Of the tokens, as a trace records it."""
        return hashlib.sha256(json.dumps(self.ids.flatten().tolist()).encode()).hexdigest()


def windows(
    tokenizer: Any,
    counts: Mapping[str, int] = WINDOWS,
    tokens: int = TOKENS,
    read: Callable[[str], str] = read_named,
) -> list[Window]:
    """All windows, those of a text at equal distances from its first token to its last, none overlapping.

    Args:
        tokenizer: of the model; None where bytes are tokens.
        counts: text -> windows to train on.
        tokens: of a window.
        read: a text by its name.

    Raises:
        ValueError: a text that is too short for its windows.
    """
    found = []
    for text, count in counts.items():
        ids = encode(tokenizer, read(text).encode())
        apart = (ids.shape[1] - tokens) // count
        if apart < tokens:
            raise ValueError(f"{text} has {ids.shape[1]} tokens, {count + 1} windows of {tokens} are wanted of it")
        for number in range(count + 1):
            part = ids[:, number * apart : number * apart + tokens]
            about = {"name": text, "sha256": TEXTS[text].sha256, "window": number}
            found.append(Window(f"{text}-{number:02d}", number == count, part, about))
    return found


def trace_of(
    model: Any,
    window: Window,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
    layers: Sequence[int] | None = None,
) -> Trace:
    """The trace of a window in bfloat16, of all layers by default; what is there already is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return capture(
        model,
        window.ids,
        path,
        layers=layers,
        dtype=torch.bfloat16,
        model_id=MODEL,
        text=window.about,
        keep=True,
        progress=progress,
    )
