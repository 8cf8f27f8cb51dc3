"""Texts by name: what ships is what was pinned, and what is fetched is checked."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparseattn.traces import texts
from sparseattn.traces.texts import TEXTS, TextError, read_named


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if text.package is None])
def test_what_ships_is_what_was_pinned(name: str) -> None:
    assert len(read_named(name)) > 10_000


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(TextError, match="there is no text 'moby', there are alice, workshop"):
        read_named("moby")


def test_files_of_a_wheel_become_one_text_and_are_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def fake(package: str, version: str, size: int, work: Path, *told: Any) -> Path:
        fetched.append(package)
        with zipfile.ZipFile(work / "click.whl", "w") as file:
            for name in ("click/b.py", "click/a.py", "click/py.typed", "other/c.py"):
                file.writestr(name, name)
        return work / "click.whl"

    monkeypatch.setattr(texts, "wheel", fake)
    with pytest.raises(TextError, match="from the package index gives a text of SHA-256"):
        read_named("click")
    joined = b"click/a.py\nclick/b.py"
    held = hashlib.sha256(joined).hexdigest()
    monkeypatch.setitem(TEXTS, "click", replace(TEXTS["click"], sha256=held))
    assert read_named("click") == joined.decode() == read_named("click")
    assert fetched == ["click", "click"]  # once in vain, once for good
    TEXTS["click"].path.write_text("spoilt")
    with pytest.raises(TextError, match="is not the text that was pinned"):
        read_named("click")
