"""Shared set-up: what must be chosen before imports, caches that last between runs."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

# One thread for each worker: the tests' tensors are small, a second thread costs more than it brings. Those that a test
# asks for sleep when idle, as spinning would take the core of the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell's background job ignores interrupts, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from filelock import FileLock

from sparseattn.utils.cache_folder import cache_folder

# Tests that name another cache folder keep compiled code here all the same.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
if not torch.cuda.is_available():  # Triton kernels run under its interpreter, which must be chosen before its import
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)  # whatever OMP_NUM_THREADS was

# Until the first test runs nearly all that is made stays: 760,000 objects, over which Python's collector went 22 times,
# a third of the time that imports and collection took. While tests run, each of its full rounds went over them again;
# and at the number of new objects at which Python begins a round, rounds took a twelfth of the time of tests.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip, with the reason printed, where there is no CUDA device. Second forms of a method
    (`cases.Case.second`) meet each law once, in the slow run; first forms meet a third of the laws in the fast run
    (`cases.FEW` all), the others in the slow run."""
    for item in items:
        if getattr(_case(item), "by_turns", False) and zlib.crc32(item.nodeid.encode()) % 3:
            item.add_marker("slow")
    second = [item for item in items if getattr(_case(item), "second", False)]
    twice = {id(item) for item in second if item.get_closest_marker("slow")}
    for item in second:
        item.add_marker("slow")
    if twice:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in twice])
        items[:] = [item for item in items if id(item) not in twice]
    if part := os.environ.get("SLOW_PART"):  # "1/4": of the slow tests, the second of four parts
        number, parts = map(int, part.split("/"))
        others = [item for item in items if item.get_closest_marker("slow") and part_of_slow(item, parts) != number]
        config.hook.pytest_deselected(items=others)
        left = set(map(id, others))
        items[:] = [item for item in items if id(item) not in left]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # `keywords` would hold the names of folders above too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def part_of_slow(item: pytest.Item, parts: int) -> int:
    """Which of so many parts of the slow tests it is in. Those of one parameter in a file stay together, as they share
    what is made for it."""
    file, _, rest = item.nodeid.partition("::")
    _, bracket, parameter = rest.partition("[")
    return zlib.crc32(f"{file} {parameter if bracket else rest}".encode()) % parts


def _case(item: pytest.Item) -> object:
    return getattr(getattr(item, "callspec", None), "params", {}).get("case")


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache that a test makes holds its selector against the contract, unless it says `check=False`."""
    from sparseattn import KVCache

    monkeypatch.setitem(KVCache.__init__.__kwdefaults__, "check", True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that was never written holds NaN, so that reading it shows."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all workers of a run have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def once(shared: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    """`once(name, make)`: a folder that `make(folder)` fills in one worker; the others wait for it and only read it."""

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, part = shared / name, shared / f"{name}.part"
        with FileLock(shared / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(part, ignore_errors=True)  # of a worker that failed
                part.mkdir()
                make(part)
                part.rename(folder)
        return folder

    return once


@pytest.fixture
def linked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`linked(folder)`: a folder of the test's own with the same files. Who fetches a model locks its cache folder, and
    in one that workers have in common another is refused."""

    def linked(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp("linked") / "cache", copy_function=os.link))

    return linked


@pytest.fixture
def offline(builtin_cache: Path, linked: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No package index and no model but the one that ships, which then leads where nothing is named."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SPARSEATTN_CACHE", str(linked(builtin_cache)))


@pytest.fixture(scope="session")
def builtin_cache(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A cache folder in which the byte model's built-in traces lie, made by this run, and no other model."""
    from sparseattn.evaluation.builtin_traces import BYTES, builtin_trace

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARSEATTN_CACHE", str(folder))
            for name in BYTES:
                builtin_trace(name)

    return once("builtin-traces", make)
