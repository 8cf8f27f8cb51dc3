"""Built-in traces: what the reference model's attention sees on two texts of 8,192 bytes, made on first use.

"recall": random spans that recur at random distances, so that retrieval from far back goes on until the end.
"text": the Apache licence, whose last part quotes phrases from everywhere before it.

They lie in `$SPARSEATTN_CACHE`, else `$XDG_CACHE_HOME/sparseattn`, else `~/.cache/sparseattn`, in files named after
everything that they are made from, so that a stale one is never used.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import random
import string
from collections.abc import Callable

import torch

from sparseattn.places import cache_folder
from sparseattn.traces import VERSION, Trace, TraceError

BUILTIN = ("recall", "text")
TOKENS = 8192
RECIPE = 1  # to be raised when captures of the same text and weights change


def builtin_trace(name: str, progress: Callable[[int, int], None] | None = None) -> Trace:
    """The built-in trace `name`, from the cache folder or made now (under a minute on two cores).

    Args:
        name: one of `BUILTIN`.
        progress: called with (tokens done, tokens) while it is made.

    Raises:
        TraceError: no such trace, or it cannot be written to the cache folder.
        ModelError: it has to be made, and transformers or the reference model's weights are missing.
    """
    if name not in BUILTIN:
        raise TraceError(f"there is no built-in trace {name!r}, there are {' and '.join(BUILTIN)}")
    from sparseattn.integrations.capture import capture
    from sparseattn.integrations.models import encode, reference_folder, reference_model

    text = recall_bytes() if name == "recall" else text_bytes()
    made_from = hashlib.sha256(text + f"|{VERSION}|{RECIPE}|".encode())
    for file in (reference_folder() / "config.json", reference_folder() / "model.safetensors"):
        if file.is_file():
            made_from.update(hashlib.sha256(file.read_bytes()).digest())
    path = cache_folder() / f"{name}-{made_from.hexdigest()[:16]}.safetensors"

    def make() -> Trace:
        model = reference_model()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Two processes may both make it; each renames a whole file into place, and the two files are alike.
            return capture(
                model,
                encode(None, text),
                path,
                dtype=torch.float32,
                model_id="sparseattn-reference",
                text={"name": f"builtin:{name}", "sha256": hashlib.sha256(text).hexdigest()},
                progress=progress,
            )
        except (OSError, TraceError) as error:
            raise TraceError(
                f"the built-in trace {name} has no place ({error}); SPARSEATTN_CACHE names the folder to keep it in"
            ) from error

    try:
        trace = Trace.open(path)
    except TraceError:  # not there yet, or damaged
        trace = make()
    trace.name = name
    return trace


def recall_bytes() -> bytes:
    """`TOKENS` bytes: fresh random spans over 64 symbols, and copies of 16 to 40 bytes from anywhere before.

    Copies are 1 span in 4 in the first half and 3 in 4 in the second.
    """
    draw = random.Random("sparseattn recall")
    symbols = (string.ascii_letters + string.digits + " \n").encode()
    text = bytearray()
    while len(text) < TOKENS:
        size = draw.randrange(16, 41)
        if len(text) > 256 and draw.random() < (0.25 if len(text) < TOKENS // 2 else 0.75):
            start = draw.randrange(len(text) - size)
            text += text[start : start + size]
        else:
            text += bytes(draw.choice(symbols) for _ in range(size))
    return bytes(text[:TOKENS])


def text_bytes() -> bytes:
    """`TOKENS` bytes of English: the beginning of the Apache License 2.0, then clauses of it in another order."""
    source = importlib.resources.files("sparseattn") / "data" / "text" / "apache-2.0.txt"
    words = source.read_text(encoding="utf-8").split()
    text = " ".join(words)[: TOKENS * 4 // 5]
    clauses = [clause.strip() for clause in text.replace(";", ",").replace(".", ",").split(",")]
    clauses = [clause for clause in clauses if 30 <= len(clause) <= 160]
    random.Random("sparseattn text").shuffle(clauses)
    return (text + ". To repeat: " + "; ".join(clauses)).encode()[:TOKENS]
