"""`njit` as this package uses it: what numba compiles is kept on disk by the sources of all that it compiles.

Of itself numba keeps a function's code by the one file in which the function stands. It does not see a change in
another file whose functions, constants or intrinsics it compiled in. Here a folder is named by a hash of every such
file. So compiled functions may stand in as many files as are good to read, and clones of one source share what they
compile.

The folder is `$NUMBA_CACHE_DIR/sparseattn/HASH` where the user has set that, else `numba/HASH` in `cache_folder()`.
What numba compiles for others in this process is kept where it always was.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from sparseattn.kernels.numba_linking import KernelCompiler, for_kernels
from sparseattn.utils.cache_folder import cache_folder

PACKAGE = Path(__file__).parent.parent
COMPILES = re.compile(rb"^(?:from|import) (?:numba|llvmlite)\b|^from \S+\.numba_(?:cache|entry) import ", re.MULTILINE)
HINTS = (b"numba", b"llvmlite")  # what such a file holds: found six times faster
IMPORTS = re.compile(rb"^from (\S+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)
CONSTANT = re.compile(rb"\b[A-Z][A-Z0-9_]*\b")
KEPT = 8  # folders of other sources: of branches and clones, of releases before an update. Each has 5 to 10 MB.
UNUSED = 86_400  # seconds since a process last began to use a folder that may go


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """Compile as numba's `njit` does; with `cache` keep the compiled code in `folder()`.

    Without `cache` only compiled code can call the function, see `numba_linking.py`. Where nothing can be written
    there, every process compiles anew, and a warning says so once. No way in for C is compiled, which nothing here
    calls. In compiled code numbers are copied from array to array in a loop: the first `array[:n] = other[:n]` of a
    process compiles the text of an error for seconds.
    """
    if function is None:
        return functools.partial(njit, cache=cache, **options)
    if cache:
        options["pipeline_class"] = KernelCompiler
    made: Any = numba.njit(no_cfunc_wrapper=True, no_cpython_wrapper=not cache, **options)(function)
    if made is function:  # with NUMBA_DISABLE_JIT
        return made
    if cache:
        made._cache = KeptCode(function)  # as `enable_caching` sets numba's own
    else:
        for_kernels(made)
    return made


def compiled(package: Path) -> dict[str, bytes]:
    """Return the files of a package whose change changes compiled code, by their paths in it: those that import numba,
    LLVM, this `njit` or `entry`, and those from which they import a constant, which is compiled in."""
    sources = {path.relative_to(package).as_posix(): path.read_bytes() for path in package.rglob("*.py")}
    own = {path for path, source in sources.items() if any(x in source for x in HINTS) and COMPILES.search(source)}
    left = list(own)
    while left:  # a constant may be made of others
        for module, listed, line in IMPORTS.findall(sources[left.pop()]):
            name, *parts = module.decode().split(".")
            if name == package.name and CONSTANT.search(listed or line):
                more = {"/".join(parts) + ".py", "/".join([*parts, "__init__.py"])} & sources.keys() - own
                own |= more
                left += more
    return {path: sources[path] for path in sorted(own)}


def hash_of(package: Path) -> str:
    """Return 16 hexadecimal digits of the compiled sources of a package and of the versions that compile them."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path, source in compiled(package).items():
        digest.update(f"\n{path} {len(source)}\n".encode() + source)
    return digest.hexdigest()[:16]


@functools.cache
def folder() -> Path:
    """Return where compiled code of this package is kept, which may not exist yet, and note there that it is in use."""
    own = numba.config.CACHE_DIR  # $NUMBA_CACHE_DIR
    kept = (Path(own) / "sparseattn" if own else cache_folder() / "numba") / hash_of(PACKAGE)
    with contextlib.suppress(OSError):
        os.utime(kept)
    return kept


def remove_stale(parent: Path, now: float) -> None:
    """Remove the folders of other sources that are not in use any more, but for the newest `KEPT`.

    A folder gets another name first, so that no process finds half of one. A process that still needs it compiles anew.
    """
    with contextlib.suppress(OSError):
        for left in parent.glob("*.stale"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        named = [path for path in parent.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)]
        used = sorted(((path.stat().st_mtime, path) for path in named), reverse=True)
        for last, path in used[KEPT:]:
            if now - last > UNUSED:
                gone = path.with_name(f"{path.name}.{secrets.token_hex(4)}.stale")
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


@functools.cache
def _not_kept(where: Path, error: str) -> None:
    warnings.warn(
        f"what numba compiles cannot be kept in {where} ({error}), so every process compiles anew, which takes "
        f"up to minutes: set NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


class _Locator(_CacheLocator):
    """Tells numba the folder, and how functions of one name are told apart there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._where = f"{function.__module__}-{function.__code__.co_firstlineno}"
        self._py_file = function.__code__.co_filename  # which numba names in a warning

    def get_cache_path(self) -> str:
        return str(folder())

    def get_source_stamp(self) -> str:
        return folder().name

    def get_disambiguator(self) -> str:
        return self._where

    def ensure_cache_path(self) -> None:
        if not folder().is_dir():
            folder().mkdir(parents=True, exist_ok=True)
            remove_stale(folder().parent, time.time())

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(function)


class _Impl(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class KeptCode(FunctionCache):
    """numba's cache of a function in `folder()`. A folder that cannot be read or written is as good as none."""

    _impl_class = _Impl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        if not isinstance(self._impl.locator, _Locator):  # of NUMBA_CACHE_LOCATOR_CLASSES: it would keep what is stale
            self.disable()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _not_kept(folder(), error.strerror or str(error))
