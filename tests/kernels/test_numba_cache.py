"""Where compiled code is kept: by all sources that are compiled, apart from other users of numba."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import sparseattn

pytest.importorskip("numba")
from sparseattn.kernels import numba_cache

PACKAGE = Path(sparseattn.__file__).parent
TOY = {
    "one.py": "from sparseattn.kernels.numba_cache import njit\n\n@njit\ndef inner(x):\n    return x + 1\n",
    "two.py": """
        from sparseattn.kernels.numba_cache import njit
        from toy.one import inner
        from toy.three import FACTOR

        @njit(cache=True)
        def outer(x):
            return inner(x) * FACTOR
        """,
    "three.py": "FACTOR = 10\n",
    "four.py": "from numba import njit\n\n@njit(cache=True)\ndef other(x):\n    return -x\n",
    "five.py": "import math\n",
    "__init__.py": "",
}
# Does once what takes long, and runs the toy in as many forks as a line asks for, which it answers by what they say.
SERVER = """
import json, os, sys, traceback, warnings
from pathlib import Path
import numba
from sparseattn.kernels import numba_cache
numba.njit(lambda x: x + 1)(1)

def run(folder, variables):
    for name in ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    numba.config.reload_config()
    numba_cache.PACKAGE = Path(folder, "toy")
    sys.path.insert(0, folder)
    from toy.two import outer
    from toy.four import other
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [outer(1), other(1)]
    hits = sum(outer.stats.cache_hits.values())
    return results, hits, outer.stats.cache_path, other.stats.cache_path, [str(one.message) for one in said]

for line in sys.stdin:
    folder, variables, many = json.loads(line)
    children = []
    for _ in range(many):
        reads, writes = os.pipe()
        if not (child := os.fork()):
            try:
                answer = run(folder, variables)
            except BaseException:
                answer = traceback.format_exc()
            os.write(writes, json.dumps(answer).encode())
            os._exit(0)
        os.close(writes)
        children.append((child, reads))
    answers = []
    for child, reads in children:
        os.waitpid(child, 0)
        answers.append(json.loads(open(reads).read()))
    print(json.dumps(answers), flush=True)
"""


class Answer(NamedTuple):
    """Of a process that calls both functions of the toy: what they return, how often the first was found in its cache,
    where both are kept, and warnings."""

    results: list[int]
    hits: int
    ours: str
    theirs: str
    warnings: list[str]


Runs = Callable[..., list[Answer]]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that runs the toy in forks, see `SERVER`."""
    started = [sys.executable, "-c", SERVER]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def ran(server: subprocess.Popen[str], toy: Path) -> Runs:
    """`ran(many, **environment)`: what so many processes say at once. Their cache folder is `kept` in the toy's."""

    def ran(many: int = 1, **environment: str) -> list[Answer]:
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps([str(toy), {"SPARSEATTN_CACHE": str(toy / "kept")} | environment, many]), file=server.stdin)
        server.stdin.flush()
        answers = json.loads(server.stdout.readline())
        for answer in answers:
            assert isinstance(answer, list), answer
        return [Answer(*answer) for answer in answers]

    return ran


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A package of compiled code in `tmp_path`: one function calls another file's and holds a third's constant."""
    (tmp_path / "toy").mkdir()
    for name, source in TOY.items():
        (tmp_path / "toy" / name).write_text(textwrap.dedent(source))
    return tmp_path


def change(folder: Path, name: str, old: str, new: str) -> None:
    """Changes a source, and leaves its size and time as they were where `new` is as long as `old`."""
    path = folder / "toy" / name
    before = path.stat()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_function_is_compiled_anew_when_any_source_that_is_compiled_in_changes(toy: Path, ran: Runs) -> None:
    [first] = ran()
    assert (first.results, first.hits) == ([20, -1], 0)
    [again] = ran()
    assert again == first._replace(hits=1), "kept by the first process"
    folders = {first.ours}
    changes = [
        ("one.py", "x + 1", "x + 2", 30),  # the callee
        ("three.py", "10", "20", 60),  # a constant
        ("two.py", ") * FACTOR", ") - FACTOR", -17),  # the caller
    ]
    for name, old, new, result in changes:
        change(toy, name, old, new)
        [now] = ran()
        assert (now.results, now.hits) == ([result, -1], 0), name
        assert now.ours not in folders
        folders.add(now.ours)
    for name, old, new, _ in changes:
        change(toy, name, new, old)
    assert ran() == [again], "the first sources again"


def test_the_folder_lies_where_the_user_says_and_other_users_of_numba_are_left_alone(toy: Path, ran: Runs) -> None:
    [answer] = ran()
    assert Path(answer.ours).parent == toy / "kept" / "numba"
    assert Path(answer.theirs) == toy / "toy" / "__pycache__"
    [answer] = ran(NUMBA_CACHE_DIR=str(toy / "own"))
    assert Path(answer.ours).parent == toy / "own" / "sparseattn"
    assert Path(answer.theirs).parent == toy / "own"


def test_without_a_folder_that_can_be_written_code_runs_and_a_warning_says_so_once(toy: Path, ran: Runs) -> None:
    (toy / "kept").write_text("no folder")
    [answer] = ran()
    assert (answer.results, answer.hits) == ([20, -1], 0)
    [warning] = answer.warnings
    assert f"cannot be kept in {toy / 'kept' / 'numba'}" in warning
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in warning


def test_a_cache_that_numbas_own_setting_would_keep_by_one_file_is_left_out(toy: Path, ran: Runs) -> None:
    for _ in range(2):
        [answer] = ran(NUMBA_CACHE_LOCATOR_CLASSES="InTreeCacheLocator")
        assert (answer.results, answer.hits, answer.warnings) == ([20, -1], 0, [])


def test_processes_that_begin_at_once_share_one_folder(toy: Path, ran: Runs) -> None:
    """Each finds stale folders to remove and the same code to write."""
    for number in range(20):
        old = toy / "kept" / "numba" / f"{number:016x}"
        old.mkdir(parents=True)
        os.utime(old, (1, 1))
    answers = ran(4)
    assert all((answer.results, answer.warnings) == ([20, -1], []) for answer in answers)
    left = list((toy / "kept" / "numba").iterdir())
    assert len(left) == numba_cache.KEPT
    assert {Path(answer.ours) for answer in answers} <= set(left)
    assert ran()[0].hits == 1


def test_the_hash_is_of_what_is_compiled_and_of_the_compilers(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = toy / "toy"
    assert list(numba_cache.compiled(package)) == ["four.py", "one.py", "three.py", "two.py"]
    before = numba_cache.hash_of(package)
    change(toy, "five.py", "math", "this")
    assert numba_cache.hash_of(package) == before
    (package / "three.py").rename(package / "six.py")
    assert numba_cache.hash_of(package) != before
    (package / "six.py").rename(package / "three.py")
    for name in ("numba", "llvmlite"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{name}.__version__", "0.0")
            assert numba_cache.hash_of(package) != before
    assert numba_cache.hash_of(package) == before


def test_every_compiled_file_of_the_package_is_in_the_hash() -> None:
    held = numba_cache.compiled(PACKAGE)
    assert {
        "kernels/attend/cpu.py",
        "kernels/attend_vllm_blocks/cpu_tables.py",
        "kernels/numba_vectors.py",
        "kernels/graph/build_and_search.py",
        "kernels/quantized_keys/level_grid.py",
    } <= held.keys()
    constants = [name for name, source in held.items() if b"numba" not in source]  # and nothing compiled
    assert len(constants) < 9, "files that are not compiled would compile all anew"
    for path in PACKAGE.rglob("*.py"):
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if name != "kernels/numba_cache.py":
            assert not re.search(r"^from numba import .*\bn?jit\b|\bnumba\.n?jit\b", source, re.MULTILINE), name


def test_what_kernels_compile_is_kept_there() -> None:
    from sparseattn.kernels.attend import cpu as attend_cpu
    from sparseattn.kernels.graph import build_and_search

    for kernel in (attend_cpu.attend_lists, build_and_search.search_heads):
        assert kernel.stats.cache_path == str(numba_cache.folder())


def test_old_folders_go_but_for_the_newest_and_those_in_use(tmp_path: Path) -> None:
    now = time.time()
    days = [0, 0.5, *range(2, 12)]
    names = [f"{number:016x}" for number in range(len(days))]
    for name, day in zip(names, days, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.nbi").touch()
        os.utime(tmp_path / name, (now, now - day * 86_400))
    for other in ("sparseattn", f"{names[0]}.0badcafe.stale"):
        (tmp_path / other).mkdir()
    numba_cache.remove_stale(tmp_path, now)
    assert {path.name for path in tmp_path.iterdir()} == {*names[: numba_cache.KEPT], "sparseattn"}
    for name in names[: numba_cache.KEPT]:
        os.utime(tmp_path / name, (now, now))
    more = [f"{number:016x}" for number in range(100, 120)]
    for name in more:
        (tmp_path / name).mkdir()
    numba_cache.remove_stale(tmp_path, now + 3600)
    assert {*names[: numba_cache.KEPT], *more} < {path.name for path in tmp_path.iterdir()}, "used within a day"
