"""GGUF files, as llama.cpp and its relatives keep models: converted once to a model folder in bfloat16.

transformers reads them, but slowly, and cannot save what it read: so its weights are put into a model without the
quantisation's configuration, and that one is saved.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparseattn.models.errors import ModelError, in_a_sentence
from sparseattn.models.gguf_header import check_header
from sparseattn.models.packaged import RECIPE
from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.files import naming
from sparseattn.utils.locks import locked
from sparseattn.utils.pypi_wheels import Progress


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is the path of a GGUF file, by its ending."""
    return os.fspath(name).lower().endswith(".gguf")


def converted(path: Path, progress: Progress | None = None) -> Path:
    """Return the model folder made of the GGUF file `path`, in the cache; made now if it is not there.

    `progress` is called with what is being done, steps done and steps.

    Raises:
        ModelError: see `convert`.
    """
    folder = folder_of(path)
    if not (folder / "config.json").is_file():
        report = progress or (lambda what, done, total: None)
        report(f"convert {path.name}", 0, 1)
        convert(path.expanduser().resolve(), folder)
        report(f"convert {path.name}", 1, 1)
    return folder


def folder_of(path: Path) -> Path:
    """Where the GGUF file `path` lies once it is converted.

    A file is known again by its place, size and time of change, so that gigabytes need not be read to see that.
    ModelError where there is no such file.
    """
    try:
        real = path.expanduser().resolve(strict=True)
        facts = real.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    known = f"{real}|{facts.st_size}|{facts.st_mtime_ns}|{RECIPE}"
    return cache_folder() / "models" / f"{real.stem}-{hashlib.sha256(known.encode(errors='replace')).hexdigest()[:16]}"


def convert(path: Path, folder: Path) -> None:
    """Write the GGUF file `path` as the model folder `folder`: safetensors in bfloat16, configuration and tokenizer.

    The folder appears whole or not at all. Python code that lies beside the file is not run.

    Raises:
        ModelError: no GGUF file, counts that its tensors do not back (`gguf_header.check_header`), an architecture that
            transformers does not know, packages missing, or no room.
        ValueError: another process is converting it.
    """
    check_header(path)
    check_packages()
    part = folder.with_name(f".{folder.name}.part")
    with naming(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), f"the conversion of {path.name}"):
        if (folder / "config.json").is_file():  # by another process, just now
            return
        try:
            with in_a_sentence(f"{path} cannot be converted", str(path)), _quietly(), _parsed_once():
                model, tokenizer = _read(path)
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            with in_a_sentence(f"{folder} cannot be written", str(path)), _quietly():
                part.mkdir()
                model.save_pretrained(part)
                tokenizer.save_pretrained(part)
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file, without its weights.

    Raises:
        ModelError: no GGUF file, or packages missing.
    """
    check_header(path)
    check_packages()
    with in_a_sentence(f"the tokenizer of {path} cannot be read", str(path)), _quietly():
        return _tokenizer(path)


def check_packages() -> None:
    """ModelError where a package is missing that reading GGUF files needs."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading GGUF files needs {' and '.join(missing)}: pip install 'sparseattn[models]'")


def _read(path: Path) -> tuple[Any, Any]:
    """Return the model in bfloat16, as if it had never been a GGUF file, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.bfloat16, trust_remote_code=False
    )
    weights = loaded.state_dict()
    packed = [name for name, tensor in weights.items() if not tensor.is_floating_point()]
    if packed:
        raise ValueError(f"transformers left {len(packed)} tensors packed, such as {packed[0]}")
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    config.name_or_path = path.stem
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model, _tokenizer(path)


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Return a file's header, which transformers parses in seconds each for the tokenizer, configuration and
    weights."""
    package: Any = importlib.import_module("gguf")
    reader = package.GGUFReader
    package.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        package.GGUFReader = reader


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Neither bars nor advice of transformers: its bars are for each file, and its advice is for packed weights."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
