"""GGUF files, as llama.cpp and its relatives keep models: converted once to a model folder in bfloat16.

transformers reads them, but slowly, and cannot save what it read: so its weights are put into a model without the
quantisation's configuration, and that one is saved.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from sparseattn.integrations.errors import ModelError, reason
from sparseattn.places import cache_folder

Progress: TypeAlias = Callable[[str, int, int], None]  # what is being done, bytes or steps done, of how many
MAGIC = b"GGUF"
RECIPE = 1  # to be raised when what is made of the same file changes


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is the path of a GGUF file, by its ending."""
    return os.fspath(name).lower().endswith(".gguf")


def converted(path: Path, progress: Progress | None = None) -> Path:
    """The model folder made of the GGUF file `path`, in the cache; made now if it is not there.

    A file is known again by its place, size and time of change, so that gigabytes need not be read to see that.
    `progress` is called with what is being done, steps done and steps.

    Raises:
        ModelError: see `convert`.
    """
    try:
        real = path.expanduser().resolve(strict=True)
        facts = real.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    known = f"{real}|{facts.st_size}|{facts.st_mtime_ns}|{RECIPE}"
    folder = cache_folder() / "models" / f"{real.stem}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    if not (folder / "config.json").is_file():
        report = progress or (lambda what, done, total: None)
        report(f"convert {real.name}", 0, 1)
        convert(real, folder)
        report(f"convert {real.name}", 1, 1)
    return folder


def convert(path: Path, folder: Path) -> None:
    """Writes the GGUF file `path` as the model folder `folder`: safetensors in bfloat16, configuration and tokenizer.

    The folder appears whole or not at all.

    Raises:
        ModelError: no GGUF file, of an architecture that transformers does not know, packages missing, or no room.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if magic != MAGIC:
        raise ModelError(f"{path} is no GGUF file: it begins with {magic!r}, such files with {MAGIC!r}")
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading GGUF files needs {' and '.join(missing)}: pip install 'sparseattn[models]'")
    try:
        with _quietly():
            model, tokenizer = _read(path)
    except Exception as error:  # gguf and transformers raise types of their own
        raise ModelError(f"{path} cannot be converted: {reason(error)}") from error
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        part.mkdir(parents=True)
        with _quietly():
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
        with contextlib.suppress(OSError):  # another process was first, and its folder is like this one
            part.rename(folder)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} cannot be written: something else is there")
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _read(path: Path) -> tuple[Any, Any]:
    """The model in bfloat16, as if it had never been a GGUF file, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    held = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.bfloat16)
    weights = held.state_dict()
    packed = [name for name, tensor in weights.items() if not tensor.is_floating_point()]
    if packed:
        raise ValueError(f"transformers left {len(packed)} tensors packed, such as {packed[0]}")
    config = copy.deepcopy(held.config)
    del config.quantization_config
    config.name_or_path = path.stem
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = held.generation_config
    return model, tokenizer


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
