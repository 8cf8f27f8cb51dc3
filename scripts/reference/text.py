"""The text that the model is trained and judged on: source code and documentation found on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text as bytes, with a digest of the list of files (paths and contents)."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    held_out_files: int
    digest: str


def text_files() -> Iterator[Path]:
    """Yield the files text is taken from, in a sorted order: standard library, Debian documentation, Vim's manual."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # The library's own tests are mostly tables of cases, and site-packages vary with the environment.
    skipped = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}
    yield from sorted(p for p in library.rglob("*.py") if not skipped & set(p.relative_to(library).parts))
    for root, endings in ((Path("/usr/share/doc"), {".txt", ".md", ".rst"}), (Path("/usr/share/vim"), {".txt"})):
        yield from sorted(p for p in root.rglob("*") if p.suffix in endings and p.is_file() and not p.is_symlink())


def load_corpus(limit: int = 65536) -> Corpus:
    """Read the text, at most ``limit`` bytes a file so that no file dominates; about 1 file in 20 is held out.

    A file is held out by the digest of its contents, and contents met before are left out, so that no text is in both
    parts and the split is the same whichever files a machine has besides.
    """
    seen: set[bytes] = set()
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    listing = hashlib.sha256()
    for path in text_files():
        data = path.read_bytes()[:limit]
        digest = hashlib.sha256(data).digest()
        if len(data) < 512 or digest in seen:
            continue
        seen.add(digest)
        listing.update(f"{path}\0".encode() + digest)
        parts[digest[0] % 20 == 0].append(data)
    if not parts[False] or not parts[True]:
        raise SystemExit("no text found: neither Python's standard library, /usr/share/doc nor /usr/share/vim is there")
    return Corpus(
        train=np.frombuffer(b"\n".join(parts[False]), dtype=np.uint8),
        held_out=np.frombuffer(b"\n".join(parts[True]), dtype=np.uint8),
        files=len(parts[False]),
        held_out_files=len(parts[True]),
        digest=listing.hexdigest(),
    )
