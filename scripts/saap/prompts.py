"""The prompts: bytes drawn by kind and number, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scripts.reference.text import Corpus

TOKENS = 8192
# Kind -> prompts to train on, prompts to validate on.
KINDS = {"recall": (16, 3), "text": (12, 3), "mixed": (6, 2)}
OTHER = ("kv", "numbers")  # kinds that nothing is trained on
LICENCE = b"apache license"  # the built-in trace "text" is one


def prompts(corpus: Corpus) -> Iterator[tuple[str, bool, bytes]]:
    """Name, whether it is held out, and text of every prompt; held-out ones take held-out text."""
    for kind, (train, held_out) in KINDS.items():
        for number in range(train + held_out):
            rng = np.random.default_rng((20250216, *kind.encode(), number))
            outside = number >= train
            text = corpus.held_out if outside else corpus.train
            yield f"{kind}-{number:02d}", outside, {"recall": recall, "text": plain, "mixed": mixed}[kind](rng, text)


def others() -> Iterator[tuple[str, bytes]]:
    """Name and text of a prompt of each of the `OTHER` kinds."""
    for kind, made in zip(OTHER, (kv, numbers), strict=True):
        yield kind, made(np.random.default_rng((20250216, *kind.encode())), np.zeros(0, dtype=np.uint8))


def recall(rng: np.random.Generator, text: np.ndarray) -> bytes:
    """Random spans, some of which recur; `text` is not used."""
    symbols = rng.permutation(256)[: int(2 ** rng.uniform(4.5, 8))].astype(np.uint8)
    copies = rng.uniform(0.5, 0.8)
    out: np.ndarray = np.zeros(TOKENS, dtype=np.uint8)
    at = 0
    while at < TOKENS:
        size = min(int(rng.integers(6, 49)), TOKENS - at)
        if at > 256 and rng.random() < copies:
            start = int(rng.integers(at - size))
            out[at : at + size] = out[start : start + size]
        else:
            out[at : at + size] = symbols[rng.integers(len(symbols), size=size)]
        at += size
    return out.tobytes()


def plain(rng: np.random.Generator, text: np.ndarray) -> bytes:
    """A window of the text."""
    return _window(rng, text, TOKENS)


def mixed(rng: np.random.Generator, text: np.ndarray) -> bytes:
    """Pieces of 100 to 1,000 bytes of text, one half new, the other recurring in part."""
    out = b""
    while len(out) < TOKENS:
        size = int(rng.integers(100, 1001))
        if len(out) > 1000 and rng.random() < 0.5:
            start = int(rng.integers(len(out) - 300))
            out += out[start : start + int(rng.integers(20, 301))]
        else:
            out += _window(rng, text, size)
    return out[:TOKENS]


def kv(rng: np.random.Generator, text: np.ndarray) -> bytes:
    """Lines `key: value` of random letters and digits, and in the last quarter the same keys asked for again."""
    letters, digits = (np.frombuffer(some, dtype=np.uint8) for some in (b"abcdefghijklmnopqrstuvwxyz", b"0123456789"))
    pairs: list[bytes] = []
    out = b""
    while len(out) < TOKENS:
        if len(out) < TOKENS * 3 // 4:
            pairs.append(rng.choice(letters, 8).tobytes() + b": " + rng.choice(digits, 8).tobytes() + b"\n")
            out += pairs[-1]
        else:
            out += pairs[int(rng.integers(len(pairs)))]
    return out[:TOKENS]


def numbers(rng: np.random.Generator, text: np.ndarray) -> bytes:
    """A table of numbers, in which every tenth row recurs."""
    rows: list[bytes] = []
    out = b""
    while len(out) < TOKENS:
        again = len(rows) > 9 and rng.random() < 0.1
        row = (
            rows[int(rng.integers(len(rows)))] if again else b" ".join(b"%05d" % n for n in rng.integers(10**5, size=6))
        )
        rows.append(row)
        out += row + b"\n"
    return out[:TOKENS]


def _window(rng: np.random.Generator, text: np.ndarray, size: int) -> bytes:
    while True:
        start = int(rng.integers(len(text) - size))
        window = text[start : start + size].tobytes()
        if LICENCE not in window.lower():
            return window
