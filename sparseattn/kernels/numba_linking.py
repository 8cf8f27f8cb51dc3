"""Only what Python calls becomes machine code; what compiled code calls is linked in as it is, and optimised there.

Of itself numba takes every function that a kernel calls for one that Python may call too: each is optimised in full and
made into machine code by itself, with all that it calls in turn, and a parallel loop's body twice more. Of a kernel six
calls deep this is most of the time to compile it. Here such code stays LLVM's intermediate representation until the
kernel into which it is linked is optimised as a whole. The kernel's results and its speed are the same, and it is
compiled in 40 to 45 % of the time (numba 0.68; docs/lab/log/2026-11.md).
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class LinkedCode(JITCodeLibrary):
    """Code of a function that is only linked into others: neither optimised as a whole nor made machine code."""

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments(self._codegen)

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no such code."""
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _WithoutEnvironments:
    """A code generator that sets no constants of a function which is not there to read them.

    A kernel that is read from a file has them for none of its callees either.
    """

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)


class KernelCompiler(Compiler):
    """Compiles what Python calls as numba does, and as `LinkedCode` whatever has to be compiled for it.

    numba lets one thread compile at a time, so no code of another's is made in the meantime. Python's collector, which
    would go through numba's many small objects again and again, waits until it is done: a quarter of the time left.
    """

    def compile_extra(self, function: Any) -> Any:
        """Compile a function."""
        codegen = self.state.targetctx.codegen()
        self.state.library = JITCodeLibrary(codegen, function.__qualname__)
        self.state.library.enable_object_caching()
        outer, codegen._library_class = codegen._library_class, LinkedCode
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(function)
        finally:
            codegen._library_class = outer
            if collects:
                gc.enable()


def for_kernels(dispatcher: Any) -> None:
    """Let only compiled code call a function that numba compiles without a way in for Python: TypeError elsewhere."""
    dispatcher.add_overload = functools.partial(_add, dispatcher)
    dispatcher._compile_for_args = functools.partial(_refuse, dispatcher)


def _add(dispatcher: Any, compiled: Any) -> None:
    """Note that a function is compiled, where numba looks for it; not where a call from Python finds it."""
    dispatcher.overloads[tuple(compiled.signature.args)] = compiled


def _refuse(dispatcher: Any, *arguments: Any, **named: Any) -> None:
    name = f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}"
    raise TypeError(f"{name} is for compiled code to call: from Python call its .py_func, or wrap it with `entry`")
