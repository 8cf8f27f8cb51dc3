"""Of what is compiled only what Python calls becomes machine code, and nobody else's code is touched by that."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
import numba
from numba.core.errors import TypingError
from numba.core.registry import cpu_target

from sparseattn.kernels import numba_cache
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_linking import KernelCompiler, LinkedCode


def square(x):
    room = np.zeros(2)
    room[1] = x
    return room[0] + room[1] * room[1]


_square = njit(fastmath=True)(square)


def kernel() -> tuple[Callable[..., Any], Any]:
    """A kernel that is not compiled, and a function it calls."""
    one = njit(fastmath=True)(square)

    @njit
    def line(rows, out):
        for i in range(len(rows)):
            out[i] = one(rows[i]) + 1

    def all_lines(rows, out):
        for which in numba.prange(len(rows)):
            line(rows[which], out[which])

    return all_lines, line


def library(function: Any) -> Any:
    """The code of the one compiled form of a function."""
    [form] = function.overloads.values()
    return form.library


def test_a_kernel_is_numbas_own_to_the_bit_and_what_it_calls_is_no_machine_code() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 33))
    results = []
    for own in ({}, {"pipeline_class": KernelCompiler}):
        function, called = kernel()
        compiled = numba.njit(parallel=True, **own)(function)
        results.append(np.empty_like(rows))
        compiled(rows, results[-1])
        assert not isinstance(library(compiled), LinkedCode)
        assert isinstance(library(called), LinkedCode) == bool(own)
    assert np.array_equal(*results)


def test_what_kernels_call_is_not_for_python() -> None:
    compiled = numba.njit(pipeline_class=KernelCompiler)(lambda x: _square(x))
    assert compiled(3.0) == 9
    for number in (3.0, 3):  # compiled, and not yet
        with pytest.raises(TypeError, match=r"square is for compiled code to call: from Python call its [.]py_func"):
            _square(number)
    assert _square.py_func(3.0) == 9


def test_others_use_what_was_compiled_for_a_kernel() -> None:
    def theirs(n):
        return np.full(n, 3, np.int16).sum() + np.arange(n)[::-1].copy()[0]

    ours = numba.njit(pipeline_class=KernelCompiler)(theirs)
    assert ours(7) == 27
    assert numba.njit(theirs)(7) == 27, "numba's own functions, of which there is no machine code now"
    assert numba.njit(lambda x: _square(x) + 1)(2.0) == 5


def test_after_a_fault_all_is_as_before() -> None:
    codegen = cpu_target.target_context.codegen()
    before, often = codegen._library_class, gc.get_threshold()
    wrong = numba.njit(pipeline_class=KernelCompiler)(lambda x: x.nowhere)
    with pytest.raises(TypingError, match="nowhere"):
        wrong(1)
    assert codegen._library_class is before
    assert before is not LinkedCode
    assert gc.get_threshold() == often
    gc.set_threshold(0)  # as some have it
    try:
        assert numba.njit(pipeline_class=KernelCompiler)(lambda x: x + 2)(1) == 3
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*often)


def test_an_error_of_what_a_kernel_calls_is_said_where_it_was_compiled() -> None:
    """Its text is made of constants of the callee's."""

    @njit
    def checked(x):
        if x < 0:
            raise ValueError(f"{x} is below nought")
        return x

    compiled = numba.njit(pipeline_class=KernelCompiler)(lambda x: checked(x))
    with pytest.raises(ValueError, match="-3 is below nought"):
        compiled(-3)


def test_a_kernel_that_another_calls_is_machine_code_if_it_comes_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_cache, "folder", lambda: tmp_path)

    def plus(x):
        return x + 5

    assert njit(plus, cache=True)(1) == 6
    inner = njit(plus, cache=True)  # as in another process
    assert numba.njit(pipeline_class=KernelCompiler)(lambda x: inner(x))(1) == 6
    assert sum(inner.stats.cache_hits.values()) == 1
    assert inner(2) == 7
