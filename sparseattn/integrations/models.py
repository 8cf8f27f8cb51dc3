"""Hugging Face transformers: load a causal language model and its tokenizer, the shipped reference model among them.

`transformers` is imported when a function runs, and by no file of the package outside this folder.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.devices import usable_device

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


class ModelError(ValueError):
    """A model that cannot be loaded or captured, in one sentence."""


def load_model(
    path_or_id: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[Any, Any]:
    """A causal LM in eval mode and its tokenizer, or None for a byte model (256 tokens, no tokenizer files).

    Args:
        path_or_id: a folder, or a name on the Hugging Face hub.
        dtype: of the weights; as they are stored by default.
        device: where to put the model; by default a CUDA device if there is one, else the CPU.

    Raises:
        ModelError: no such folder, hub out of reach, not a causal LM, no tokenizer, no such device or no room on it.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelError("loading a model needs transformers: pip install 'sparseattn[transformers]'") from error

    try:
        place = usable_device(device)
    except ValueError as error:
        raise ModelError(str(error)) from error
    name = os.fspath(path_or_id)
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        raise ModelError(f"{name} is a folder without config.json, so not a model")
    if not local and (folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ModelError(
            f"{name} is a file, not a model folder" if folder.exists() else f"no such model folder: {name}"
        )
    source = str(folder) if local else name
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        where = "cannot be read" if local else "is neither a folder here nor a model that the hub gives"
        raise ModelError(f"{name} {where}: {first_sentence(error)}") from error
    try:
        with _no_loading_bar():
            model, loading = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype or "auto", output_loading_info=True
            )
        model = model.to(place).eval()
    except Exception as error:  # safetensors and the hub raise types of their own
        if "Unrecognized configuration class" in str(error):
            raise ModelError(f"{name} is a {config.model_type} model, which is no causal LM to transformers") from error
        raise ModelError(f"the weights of {name} cannot be loaded: {first_sentence(error)}") from error
    if missing := sorted(loading["missing_keys"]):  # transformers would make them up
        raise ModelError(f"the weights of {name} lack {len(missing)} tensors, such as {missing[0]}")
    if local and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        vocabulary = config.get_text_config().vocab_size
        if vocabulary != 256:
            raise ModelError(f"{name} has {vocabulary} tokens and no tokenizer files; a model of bytes has 256")
        return model, None
    try:
        return model, AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {first_sentence(error)}") from error


@contextlib.contextmanager
def _no_loading_bar() -> Iterator[None]:
    """No "Loading weights" bar of transformers.

    Not by its `disable_progress_bar`, which would silence the hub's downloads with it.
    """
    from transformers.utils import logging

    shown = logging._tqdm_active
    logging._tqdm_active = False
    try:
        yield
    finally:
        logging._tqdm_active = shown


def reference_model() -> Any:
    """The byte-level model that ships with the package.

    Raises:
        ModelError: this installation has no weights.
    """
    folder = reference_folder()
    if not (folder / "model.safetensors").is_file():
        raise ModelError(f"the reference model's weights are missing from {folder}; reinstall sparseattn")
    return load_model(folder, dtype=torch.float32, device="cpu")[0]


def reference_folder() -> Path:
    """Where the reference model's files lie."""
    return Path(str(importlib.resources.files("sparseattn"))) / "data" / "reference"


def encode(tokenizer: Any, data: bytes) -> Tensor:
    """Token ids `[1,T]` of a text file's bytes; `tokenizer` None: the bytes are the ids.

    Raises:
        ModelError: an empty text, or one that is not UTF-8 for a model with a tokenizer.
    """
    if tokenizer is None:
        ids = list(data)
    else:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"the text is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from error
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise ModelError("the text is empty, a trace has at least one token")
    return torch.tensor([ids])


def first_sentence(error: BaseException) -> str:
    """The first line of a library's message, without its full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
