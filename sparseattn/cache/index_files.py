"""Index files: what a selector built from a prompt's rows, kept so that the same prompt need not be indexed again.

Of selectors that say what a state of theirs must be (`Selector.check_state`), which is asked before one is filled.

A file is safetensors: the tensors of the selector's row buffers, and the order it stored the rows in, if any. Its
metadata (strings, as safetensors requires):

    format     "sparseattn-index"
    version    "4"
    selector   the class: its name in the registry, or `module:Class` (`selectors.identity`); it is compared, and
               nothing is imported by it
    arguments  JSON object, `Selector.index_arguments`: what the index depends on beside the rows
    rows       SHA-256 of the keys and positions indexed and of the queries learned from, with the keys not indexed
               that these attend to: the trace's, not a file's name
    warnings   JSON list: what the selector warned of while building
    sha256     SHA-256 of metadata and tensors (`tensor_files`)
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.selector_state import check_described, described, filled
from sparseattn.cache.state_checks import append_first
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.base import Rows, Selector
from sparseattn.selectors.registry import SELECTORS
from sparseattn.utils.hashing import tensors_hash
from sparseattn.utils.json_text import parse_entry
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors

FORMAT = "sparseattn-index"
VERSION = "4"
ORDER = "order"
# Of which methods and folders it was said that nothing is kept: a model has a cache for every layer. Python's own count
# of what was said begins again wherever warnings are caught.
_WARNED: set[tuple[str, Path]] = set()


class IndexFileError(ValueError):
    """An index file that cannot be read or written, in one sentence."""


def usable_folder(path: str | os.PathLike[str]) -> Path:
    """`path` as a folder that files can be written to, made if it is not there; else IndexFileError."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise IndexFileError(f"index files cannot be kept in {folder}: {error.strerror or error}") from error
    return folder


def append_kept(selector: Selector, rows: Rows, folder: str | os.PathLike[str]) -> Tensor | None:
    """`append_first(selector, rows)`, by the file of these rows in `folder` if it holds one.

    Else the file is written once the index is built. Selectors whose state is not in row buffers (faiss's indexes), or
    that do not say what it must be (`check_state`), are built every time.

    Raises:
        IndexFileError: a file with that name is damaged or foreign. One that cannot be written is only warned of.
        ValueError: what `append_first` refuses; no file is written then.
    """
    if not kept(selector):
        return append_first(selector, rows)
    known = _rows_hash(rows)
    path = Path(folder) / _file_name(selector, known)
    if path.exists():
        return _load(selector, rows, known, path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        order = append_first(selector, rows)
    texts = [str(warning.message) for warning in said]
    try:
        _save(selector, rows, known, order, path, texts)
    except IndexFileError as error:  # what was built is good, and it took long
        texts.append(f"the index serves, but it could not be kept: {error}")
    for text in texts:
        warnings.warn(text, stacklevel=2)
    return order


def _save(
    selector: Selector, rows: Rows, known: str, order: Tensor | None, path: str | os.PathLike[str], said: Sequence[str]
) -> None:
    """Write what `selector` built from `rows`, whole or not at all; `said` is what `_load` warns of again."""
    tensors = {name: state.data.cpu() for name, state in filled(selector)}
    try:
        selector.check_state(tensors, rows, None if order is None else order.cpu())
    except ValueError as error:  # a subclass keeps more than its base knows of
        raise IndexFileError(f"{selector!r} would not read {os.fspath(path)} back: {error}") from error
    if order is not None:
        tensors[ORDER] = order
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        **described(selector),
        "rows": known,
        "warnings": json.dumps(list(said)),
    }
    try:
        save_tensors(path, tensors, metadata)
    except TensorFileError as error:
        raise IndexFileError(str(error)) from error


def load_index(selector: Selector, rows: Rows, path: str | os.PathLike[str]) -> Tensor | None:
    """Fill an empty `selector` with the index that `path` holds for `rows`; return the order to store them in.

    Raises:
        IndexFileError: missing, damaged, not an index, of another version, selector, arguments or rows, or a state that
            does not fit them. The selector stays empty then.
    """
    return _load(selector, rows, _rows_hash(rows), path)


def _load(selector: Selector, rows: Rows, known: str, path: str | os.PathLike[str]) -> Tensor | None:
    if not Path(path).is_file():
        raise IndexFileError(f"{path} is no file")
    try:
        metadata, tensors = load_tensors(path, FORMAT, VERSION, "an index of sparseattn")
    except TensorFileError as error:
        raise IndexFileError(f"{error}; delete it") from error
    try:
        check_described(metadata, selector, rows=known)
    except ValueError as error:
        raise IndexFileError(f"{path} is {error}") from None
    order = tensors.pop(ORDER, None)
    try:
        if order is not None:
            input_checks.check_order(order, rows.keys, rows.keys.shape[2])
        selector.check_state(tensors, rows, order)
        said = parse_entry(metadata, "warnings", "[]")
        if not isinstance(said, list) or not all(isinstance(text, str) for text in said):
            raise ValueError("its warnings are no list of texts")
    except ValueError as error:
        raise IndexFileError(f"{path} is a damaged index: {error}; delete it") from error
    device, states = rows.keys.device, dict(selector.buffers())
    for name, tensor in tensors.items():
        state = states[name]
        assert isinstance(state, RowBuffer)
        state.append(tensor.to(device))
    for text in said:
        warnings.warn(text, stacklevel=2)
    return None if order is None else order.to(device)


def kept(selector: Selector) -> bool:
    """Whether its index is kept in files: all state is in row buffers, and it says what that must be, parts too."""
    tensors_only = all(isinstance(state, RowBuffer) for _, state in selector.buffers())
    return tensors_only and _says(selector)


def _says(selector: Selector) -> bool:
    """Whether it overrides `check_state`, and so do its parts."""
    return _overrides(type(selector)) and all(_says(part) for _, part in selector.parts())


def _overrides(method: type[Selector]) -> bool:
    return method.check_state is not Selector.check_state


def keepers() -> list[str]:
    """Return the names of the methods whose index is kept in files, but for those made of other methods."""
    return [name for name, method in SELECTORS.items() if _overrides(method) and not method.part_names]


def warn_if_built_anew(selector: Selector, folder: Path) -> None:
    """Warn, once for each folder, of a method that builds an index and does not keep it in files."""
    about = str(selector), folder.resolve()
    if kept(selector) or not any(True for _ in selector.buffers()) or about in _WARNED:
        return
    _WARNED.add(about)
    warnings.warn(
        f"{selector} keeps no index in a folder, it is built anew: methods that do are {', '.join(keepers())}",
        stacklevel=3,
    )


def _file_name(selector: Selector, rows_hash: str) -> str:
    # With the version a file of another release has another name: it is passed over, and the index is built.
    whose, arguments = described(selector).values()
    known = (VERSION, whose, arguments, rows_hash)
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()
    return f"{whose.replace(':', '.').rpartition('.')[2]}-{digest[:24]}.safetensors"


def _rows_hash(rows: Rows) -> str:
    learned = ("queries", "query_positions", "last_queries", "last_positions", "unsealed", "unsealed_positions")
    shown = {name: getattr(rows, name) for name in ("keys", "positions", *learned)}
    return tensors_hash({name: tensor for name, tensor in shown.items() if tensor is not None})
