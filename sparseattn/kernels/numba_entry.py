"""What Python calls of numba's code is compiled apart from its caller, whose rows would else outlive it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sparseattn.kernels.numba_cache import njit

_COMPILING = threading.local()  # `here`: set in a thread that does nothing else, where numba compiles what it calls too


def entry(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba_cache.njit` with these options for a function that Python calls.

    numba leaves frames in a cycle when it compiles (0.68), and a frame holds those of its callers: a cache that was the
    first to need a kernel, with all of its rows, then waits for Python's collector. In a thread of its own there are
    no callers.
    """

    def made(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        compile_here = dispatcher.compile

        def compile_apart(signature: Any) -> Any:
            if hasattr(_COMPILING, "here"):
                return compile_here(signature)
            with ThreadPoolExecutor(1, initializer=setattr, initargs=(_COMPILING, "here", True)) as thread:
                return thread.submit(compile_here, signature).result()

        dispatcher.compile = compile_apart
        return dispatcher

    return made
