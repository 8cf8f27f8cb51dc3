"""Traces, texts, models and files of roles by the names that options have, opened; where one is fetched, its terms are
said and its progress is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseattn.cli.command import errors, say
from sparseattn.cli.options import LEAD
from sparseattn.cli.progress import model_progress
from sparseattn.evaluation.builtin_traces import BUILTIN, BYTES, LEADING, builtin_trace, prepare
from sparseattn.models.errors import ModelError
from sparseattn.models.load import load_model, load_tokenizer
from sparseattn.models.packaged import PACKAGED, REFERENCE
from sparseattn.models.pypi_models import fetched
from sparseattn.reporting.terminal import plain
from sparseattn.roles.roles import Roles
from sparseattn.traces.texts import TEXTS, read_named
from sparseattn.traces.trace import Trace
from sparseattn.utils.files import read_text
from sparseattn.utils.pypi_wheels import FetchError
from sparseattn.utils.suggest import did_you_mean

OWN_KIND = "a file"  # the kind of a text that is not known by name


@dataclass(frozen=True)
class InputText:
    """A text.

    Args:
        name: as tables call it.
        kind: such as "novel".
        words: all of it.
    """

    name: str
    kind: str
    words: str


def open_roles(paths: Iterable[Path] | None, kind: type[Roles] = Roles, trusted: Collection[str] = ()) -> list[Roles]:
    """Return the roles of `--roles`, or of another kind, whose files may name classes of `trusted` modules.

    Raises:
        ValueError: a file of none, or two of one name that are not the same.
    """
    by_label: dict[str, Roles] = {}
    for path in paths or ():
        roles = kind.load(path, trusted)
        if repr(by_label.setdefault(roles.label(), roles)) != repr(roles):
            raise ValueError(f"two files of --{kind.KIND} have the name {roles.name}, the second is {path}: rename one")
    return list(by_label.values())


def open_trace(name: str, progress: Callable[[str, int, int], None]) -> Trace:
    """Return a trace file, or a built-in trace, which is made on first use. Raises ValueError for neither."""
    if name not in BUILTIN:
        if not Path(name).exists():
            known = ", ".join(BUILTIN)
            raise ValueError(f"{name} is neither a file nor a built-in trace ({known}){did_you_mean(name, BUILTIN)}")
        return Trace.open(name)
    if not BUILTIN[name].path.is_file():
        say_terms(BUILTIN[name].model)
    return builtin_trace(name, progress)


def open_traces(names: Iterable[str]) -> list[Trace]:
    """Return traces by name, in order (see `open_trace`); of files that share a name each says its folder too."""
    names = list(names)
    with model_progress() as progress:
        traces = [open_trace(name, progress) for name in names]
    for trace, label in zip(traces, distinct_labels(names), strict=True):
        trace.name = label
    return traces


def distinct_labels(names: Sequence[str]) -> list[str]:
    """Return what traces are called: the stem of a file's name, behind as many of its folders as tell it from others.

    Raises:
        ValueError: one trace is named twice.
    """
    files = [Path(name) if name in BUILTIN else Path(name).resolve() for name in names]
    if len(set(files)) < len(files):
        twice = next(name for name, file in zip(names, files, strict=True) if files.count(file) > 1)
        raise ValueError(f"the trace {twice} is named twice: name it once")
    paths = [Path(name if name in BUILTIN else os.path.abspath(name)) for name in names]
    labels, depth = [path.name if name in BUILTIN else path.stem for name, path in zip(names, paths, strict=True)], 1
    while len(set(labels)) < len(labels):
        depth += 1
        same = [label for label in labels if labels.count(label) > 1]
        labels = [
            "/".join([*path.parent.parts[1 - depth :], path.stem]) if label in same else label
            for label, path in zip(labels, paths, strict=True)
        ]
    return labels


def leading_traces(names: Sequence[str] = LEADING) -> list[str]:
    """Return these built-in traces, to measure where none is named; `BYTES` where they cannot be had, and say so."""
    try:
        with model_progress() as progress:
            for name in names:
                if not BUILTIN[name].path.is_file():
                    say_terms(BUILTIN[name].model)
                prepare(name, progress)
    except (ModelError, FetchError) as error:
        _say_instead(error, f"the byte model's traces {' and '.join(BYTES)}")
        return list(BYTES)
    return list(names)


def leading_model() -> str:
    """Return the model to ask where none is named: `LEAD`; the byte model where that cannot be had, and say so."""
    say_terms(LEAD)
    try:
        with model_progress() as progress:
            fetched(PACKAGED[LEAD], progress)
    except ModelError as error:
        _say_instead(error, f"the byte model, {REFERENCE}")
        return REFERENCE
    return LEAD


def _say_instead(error: Exception, what: str) -> None:
    say(f"{LEAD} cannot be fetched, so this run uses {what}, which say little about language models: {error}", "yellow")


def named_text(name: str) -> str | Path:
    """Return a name of `TEXTS` as it is, or the path of a file or folder. Raises ValueError for neither."""
    if name in TEXTS:
        return name
    if not Path(name).exists():
        known = ", ".join(TEXTS)
        raise ValueError(f"{name} is neither a file nor one of the texts by name ({known}){did_you_mean(name, TEXTS)}")
    return Path(name)


def open_text(name: str) -> tuple[str, str]:
    """Return name and words of a text of `TEXTS`, fetched on first use, or of a UTF-8 file (see `TEXT_HELP`).

    Raises:
        ValueError: neither, not UTF-8, or a text that has to be fetched and cannot be.
        OSError: the file cannot be read, or the cache folder cannot be written.
    """
    source = named_text(name)
    if isinstance(source, Path):
        return source.name, read_text(source)
    with model_progress() as progress:
        return source, read_named(source, progress)


def open_texts(names: Iterable[str]) -> list[InputText]:
    """Return texts by name, each once; a folder stands for its files.

    Raises:
        ValueError: no such text, a folder without files, or two texts of one name, which tables could not tell apart.
    """
    paths: list[str] = []
    for name in names:
        source = named_text(name)
        if isinstance(source, Path) and source.is_dir():
            files = sorted(path for path in source.iterdir() if path.is_file())
            if not files:
                raise ValueError(f"the folder {name} contains no text file")
            paths += map(str, files)
        else:
            paths.append(name)
    texts: dict[str, InputText] = {}
    for path in dict.fromkeys(paths):
        name, words = open_text(path)
        if name in texts:
            raise ValueError(f"two texts have the name {name}: rename a file")
        if same := [other.name for other in texts.values() if other.words == words]:
            raise ValueError(f"{name} and {same[0]} are the same text: name it once")
        texts[name] = InputText(name, TEXTS[path].kind if path in TEXTS else OWN_KIND, words)
    return list(texts.values())


def say_differences(trace: Trace) -> None:
    """Say for which layers of a trace full attention over its rows is not what the model computed, and why."""
    for layer, reason in trace.meta.get("attention_differs", {}).items():
        errors.print(plain(f"{trace.name}, layer {layer}: full attention here is not the model's: {reason}"))


def say_terms(name: str) -> None:
    """Say what a packaged model is and under which terms it comes, where it is about to be fetched."""
    model = PACKAGED.get(name)
    if model is not None and not model.cached:
        errors.print(f"{name}: {model.about}. Terms: {model.licence}", soft_wrap=True)


def open_model(name: str, dtype: torch.dtype | None, device: torch.device, processes: int = 1) -> tuple[Any, Any]:
    """Return model and tokenizer (see `load_model`), fetched or converted where they are not here."""
    say_terms(name)
    with model_progress() as progress:
        return load_model(name, dtype, device, progress, processes)


def open_tokenizer(name: str) -> Any:
    """Return a model's tokenizer (see `load_tokenizer`), fetched where it is not here."""
    say_terms(name)
    with model_progress() as progress:
        return load_tokenizer(name, progress)
