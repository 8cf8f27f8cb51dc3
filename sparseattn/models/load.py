"""Hugging Face transformers: load a causal language model and its tokenizer, the shipped reference model among them.

`transformers` is imported when a function runs, and by no file of the package outside this folder.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.resources
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparseattn.models import gguf, pypi_models
from sparseattn.models.errors import ModelError, in_a_sentence
from sparseattn.models.packaged import PACKAGED, REFERENCE
from sparseattn.utils.devices import usable_device
from sparseattn.utils.pypi_wheels import Progress

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def load_model(
    path_or_id: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    processes: int = 1,
) -> tuple[Any, Any]:
    """Return a causal LM in eval mode and its tokenizer, or None for a byte model (256 tokens, no tokenizer files).

    Code that comes with a model is not run (`trust_remote_code` is False).

    Args:
        path_or_id: a name of `NAMED`, a folder, a GGUF file, or a name on the Hugging Face hub. For a folder with
            the same name as one of `NAMED`, write `./reference`, or pass a `Path`.
        dtype: of the weights; as they are stored by default (float32 for the reference model).
        device: where to put the model; by default a CUDA device if there is one, else the CPU.
        progress: called with the current action, steps done and all steps, while a model is fetched or converted.
        processes: of `torchrun` that share its layers, each with its own heads (transformers' `tp_plan="auto"`): all of
            them, and they call this together.

    Raises:
        ModelError: no such folder, hub or package index out of reach, not a causal LM, a faulty config.json, weights of
            other shapes, no tokenizer, no such device or no room on it; a model that cannot be shared.
    """
    _check_transformers("a model")
    try:
        place = usable_device(device)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if dtype is None and path_or_id == REFERENCE and isinstance(path_or_id, str):
        dtype = torch.float32  # it is stored in float16, for its size
    return _pretrained(folder_of(path_or_id, progress), dtype, place, processes)


def folder_of(path_or_id: str | os.PathLike[str], progress: Progress | None = None) -> str:
    """Return the folder or hub name by which transformers, and engines that load like it, know a model.

    A model of `NAMED` is fetched, and a GGUF file converted, unless that was done before. Hub names are not checked.

    Args:
        path_or_id, progress: see `load_model`.

    Raises:
        ModelError: no such folder or GGUF file, a folder that holds no model, a model that cannot be fetched.
    """
    if isinstance(path_or_id, str) and path_or_id in NAMED:
        return str(NAMED[path_or_id](progress))
    if gguf.is_gguf(path_or_id):
        return str(gguf.converted(Path(path_or_id), progress))
    name = os.fspath(path_or_id)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name} is a folder without config.json, so not a model")
        return str(folder)
    if folder.exists():
        raise ModelError(f"{name} is a file, not a model folder")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"no such model folder: {name}")
    return name


def load_tokenizer(path_or_id: str | os.PathLike[str], progress: Progress | None = None) -> Any:
    """Return the tokenizer of a model without its weights, or None for a byte model; arguments as for `load_model`.

    From a GGUF file that is not converted yet, only the tokenizer is read.

    Raises:
        ModelError: no such folder, hub or package index out of reach, a faulty config.json, or no tokenizer.
    """
    _check_transformers("a tokenizer")
    if gguf.is_gguf(path_or_id) and not (gguf.folder_of(Path(path_or_id)) / "config.json").is_file():
        return gguf.tokenizer(Path(path_or_id))
    name = folder_of(path_or_id, progress)
    return _tokenizer(name, _config(name))


def positions_of(path_or_id: str | os.PathLike[str], progress: Progress | None = None) -> int | None:
    """Return how many tokens a model tells apart by place, without loading its weights; None: any number, or a GGUF
    file that is not converted yet. Arguments and errors as of `load_tokenizer`."""
    _check_transformers("a model's config")
    if gguf.is_gguf(path_or_id) and not (gguf.folder_of(Path(path_or_id)) / "config.json").is_file():
        return None
    config = _config(folder_of(path_or_id, progress)).get_text_config(decoder=True)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    return positions


def _check_transformers(what: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(f"loading {what} needs transformers: pip install 'sparseattn[transformers]'") from error


def _config(name: str) -> Any:
    """Of what `folder_of` gave."""
    from transformers import AutoConfig

    where = f"the config.json of {name} cannot be read"
    if not Path(name).is_dir():
        where = f"{name} is neither a local folder nor a model that the hub returns"
    with in_a_sentence(where, name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def _pretrained(name: str, dtype: torch.dtype | None, device: torch.device, processes: int) -> tuple[Any, Any]:
    """`load_model` of what `folder_of` gave."""
    from transformers import AutoModelForCausalLM

    config = _config(name)
    where = f"the weights of {name} cannot be loaded into the model that its config.json describes"
    with in_a_sentence(where, name), _no_loading_bar(), _log_held_back():
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype or "auto",
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # to refuse them below: transformers would print a table of them
                output_loading_info=True,
                **_sharing(config, name, processes),
            )
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):
                raise ModelError(
                    f"{name} is a {config.model_type} model, which is no causal LM to transformers"
                ) from error
            raise
        _check_loaded(name, loading)
        model = (model.to(device) if processes == 1 else model).eval()
    return model, _tokenizer(name, config)


def _sharing(config: Any, name: str, processes: int) -> dict[str, Any]:
    """Return what transformers is told so that so many processes share a model's layers; nothing for one.

    Raises:
        ModelError: heads that they cannot share evenly, or a model that transformers has no plan for.
    """
    if processes == 1:
        return {}
    text = config.get_text_config(decoder=True)
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % processes:
        raise ModelError(
            f"{processes} processes cannot share the {heads} KV heads of {name} evenly: start as many as divide {heads}"
        )
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelError(f"transformers has no tensor-parallel plan for {config.model_type} models, such as {name}")
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=processes, tp_plan="auto")}
    except (ImportError, TypeError):  # older releases
        return {"tp_plan": "auto"}


def _tokenizer(name: str, config: Any) -> Any:
    """Of what `folder_of` gave; None for a model of bytes."""
    from transformers import AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not has_tokenizer(folder):
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        if vocabulary != 256:
            raise ModelError(f"{name} has {vocabulary} tokens and no tokenizer files; a model of bytes has 256")
        return None
    with in_a_sentence(f"the tokenizer of {name} cannot be loaded", name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder holds a tokenizer; a byte model has none."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def _check_loaded(name: str, loading: Mapping[str, Any]) -> None:
    """Refuse weights that transformers made up, for want of ones that fit."""
    if mismatched := sorted(loading["mismatched_keys"]):
        tensor, theirs, ours = mismatched[0]
        raise ModelError(
            f"the weights of {name} are not those of its config.json: {len(mismatched)} tensors have another shape, "
            f"such as {tensor}, which is {list(theirs)} and would be {list(ours)}"
        )
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"the weights of {name} lack {len(missing)} tensors, such as {missing[0]}")


@contextlib.contextmanager
def _log_held_back() -> Iterator[None]:
    """Show what transformers logs only if the block ends well; if it raises, the error says enough."""
    logger = logging.getLogger("transformers")
    handlers, kept = logger.handlers, BufferingHandler(capacity=10_000)
    logger.handlers = [kept]
    try:
        yield
    finally:
        logger.handlers = handlers
    for record in kept.buffer:
        logger.handle(record)


@contextlib.contextmanager
def _no_loading_bar() -> Iterator[None]:
    """Hide the "Loading weights" bar of transformers.

    Not by its `disable_progress_bar`, which would silence the hub's downloads with it.
    """
    from transformers.utils import logging as theirs

    shown = theirs._tqdm_active
    theirs._tqdm_active = False
    try:
        yield
    finally:
        theirs._tqdm_active = shown


def reference_model() -> Any:
    """Return the byte-level model that ships with the package, in float32 on the CPU.

    Raises:
        ModelError: this installation has no weights.
    """
    return load_model(REFERENCE, device="cpu")[0]


def _reference(_: Progress | None) -> Path:
    folder = reference_folder()
    if not (folder / "model.safetensors").is_file():
        raise ModelError(f"the reference model's weights are missing from {folder}; reinstall sparseattn")
    return folder


def _packaged(name: str) -> Source:
    return lambda progress: pypi_models.fetched(PACKAGED[name], progress)


Source: TypeAlias = Callable[[Progress | None], Path]
# Models by name -> what gives their folder, and tells somebody how far it is.
NAMED: dict[str, Source] = {REFERENCE: _reference} | {name: _packaged(name) for name in PACKAGED}


def reference_folder() -> Path:
    """Return the folder of the reference model."""
    return Path(str(importlib.resources.files("sparseattn"))) / "data" / "reference"


def encode(tokenizer: Any, data: bytes) -> Tensor:
    """Return the token ids `[1,T]` of a text file's bytes; without a tokenizer the bytes are the ids.

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


def pieces(tokenizer: Any, data: bytes) -> list[str]:
    """Return the text of each token of `encode`; joined, they are the text. A character of several tokens goes to one.

    Raises:
        ModelError: as `encode`, or a tokenizer that does not say where its tokens stand.
    """
    encode(tokenizer, data)  # refuses what it refuses
    if tokenizer is None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(data[i : i + 1], i + 1 == len(data)) for i in range(len(data))]
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError("this tokenizer does not say where its tokens stand in a text, so no text can be kept")
    text, made, done = data.decode(), [], 0
    for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]:
        made.append(text[done : max(end, done)])
        done = max(end, done)
    return made
