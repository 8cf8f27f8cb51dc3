"""Only what Python calls becomes machine code; what compiled code calls is linked in as it is, and optimised there.

Of itself numba takes every function that a kernel calls for one that Python may call too: each is optimised in full and
made into machine code by itself, with all that it calls in turn, and a parallel loop's body twice more. Of a kernel six
calls deep this is most of the time to compile it. Here such code stays LLVM's intermediate representation until the
kernel into which it is linked is optimised as a whole. docs/lab/kernels.md says how much time that saves. `inspect_asm`
and the like show no code of such a function, or code that is not optimised yet.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.environment import lookup_environment

SELDOM = 100_000  # objects that Python makes before its collector comes, while numba compiles
ENVIRONMENT = "_ZN08NumbaEnv"  # begins the names that numba gives to a function's constants


class LinkedCode(JITCodeLibrary):
    """Code of a function that is only linked into others: neither optimised as a whole nor made machine code.

    A function of numba's own `njit`, which Python may call, must not be first compiled as such.
    """

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments(self._codegen)

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no such code."""
        self._ensure_finalized()
        return 0

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        """Return what a file has: machine code of a kernel that another kernel calls, which Python calls too."""
        outer, codegen._library_class = codegen._library_class, JITCodeLibrary
        try:
            return JITCodeLibrary._unserialize(codegen, state)
        finally:
            codegen._library_class = outer

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _WithoutEnvironments:
    """A code generator that sets no constants of a function which is not there to read them. The kernel has them."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)


class KernelCompiler(Compiler):
    """Compiles what Python calls as numba does, and as `LinkedCode` whatever has to be compiled for it.

    numba lets one thread compile at a time, so no code of another's is made in the meantime. Python's collector, which
    would go through numba's many small objects again and again, comes less often until it is done: a quarter of the
    time that is left.
    """

    def compile_extra(self, function: Any) -> Any:
        """Compile a function."""
        codegen = self.state.targetctx.codegen()
        self.state.library = JITCodeLibrary(codegen, function.__qualname__)
        self.state.library.enable_object_caching()
        outer, codegen._library_class = codegen._library_class, LinkedCode
        often = gc.get_threshold()
        gc.set_threshold(max(often[0], SELDOM) if often[0] else 0, *often[1:])
        try:
            compiled = super().compile_extra(function)
        finally:
            codegen._library_class = outer
            gc.set_threshold(*often)
        for variable in compiled.library._final_module.global_variables:
            if variable.name.startswith(ENVIRONMENT) and (environment := lookup_environment(variable.name)) is not None:
                codegen.set_env(variable.name, environment)  # a callee's, which its own compiled form keeps alive
        return compiled


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
