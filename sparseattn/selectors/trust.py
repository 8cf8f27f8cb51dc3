"""Which modules the text of a selector names, and which of them a text that was read from a file may have imported."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable

from sparseattn.selectors.registry import SELECTORS

OURS = "sparseattn.selectors"
_CLASS = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*):[A-Za-z_]\w*(?=[:,\]]|$)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def named_modules(texts: Iterable[str]) -> list[str]:
    """Return the modules beside this package's that `make_selector` might import for these texts; import none.

    Those within brackets are among them, and what only looks like a class of a module, such as `artefact=a:b`.
    """
    modules = dict.fromkeys(match[1] for text in texts for match in _CLASS.finditer(text))
    return [module for module in modules if module not in (*SELECTORS, "sparseattn") and not _below(module, OURS)]


def trusted_modules(given: Collection[str]) -> frozenset[str]:
    """Return the modules that a user trusts; ValueError for what is no name of a module."""
    if isinstance(given, str):
        raise ValueError(f"trusted modules are a set, such as {{{given!r}}}, got the text {given!r}")
    for module in given:
        if not isinstance(module, str) or _MODULE.fullmatch(module) is None:
            raise ValueError(f"a trusted module is named without a class, such as mine or package.mine, got {module!r}")
    return frozenset(given)


def check_trusted(text: str, trusted: Collection[str]) -> None:
    """Refuse a selector's text out of a file that names a module which the user has not named.

    A trusted module stands for those below it, too.

    Raises:
        ValueError: naming the module, and both ways to allow it. Nothing has been imported then.
    """
    for module in named_modules([text]):
        if not any(_below(module, trusted_module) for trusted_module in trusted):
            raise ValueError(
                f"{reprlib.repr(text)} names a class of the module {module}, whose code would run, and a file may name "
                f"only modules that you name as well: if you trust it, add --trust {module} to the command, or "
                f"trusted={{{module!r}}} in Python"
            )


def _below(module: str, top: str) -> bool:
    return module == top or module.startswith(f"{top}.")
