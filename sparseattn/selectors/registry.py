"""Every method by name, and selectors made from texts. CONTRIBUTING.md says what a new method takes."""

from __future__ import annotations

from sparseattn.selectors.base import Selector
from sparseattn.selectors.methods import BASE, METHODS
from sparseattn.utils.specs import Registry

# Add a class of your own with `SELECTORS["mine"] = Mine`.
SELECTORS: Registry[Selector] = Registry(
    "selector", Selector, {name: BASE + method.place for name, method in METHODS.items()}
)


def make_selector(spec: str) -> Selector:
    """Return the selector that a text names: `name[:arg=value,...]` or `package.module:Class[:arg=value,...]`.

    `str` of a selector is the shortest such text (`Named.label`). A value that is a selector itself is such a text
    again, in brackets if it has arguments, and brackets nest: `twostage:pages=lowbit,times=4`,
    `twostage:pages=[quest:page=8,int8=True],times=4`. A shell may want quotes around them. A module is imported, which
    runs its code with the rights of this process: take no such text from where you would take no program. For texts out
    of files, see `sparseattn.selectors.trust`. Values are read as `utils.specs.Registry.make` says.

    Raises:
        ValueError: what `utils.specs.Registry.make` refuses.
    """
    return SELECTORS.make(spec)


def parsed(spec: str) -> tuple[str, list[tuple[str, str | None]]]:
    """Return the name in a selector's text, and its arguments: name and text of each, None for one without "=".

    Raises:
        ValueError: what `utils.specs.Registry.parsed` refuses.
    """
    return SELECTORS.parsed(spec)


def as_selector(given: Selector | str) -> Selector:
    """`given`, or the selector that it names (`make_selector`); ValueError for anything else."""
    made = make_selector(given) if isinstance(given, str) else given
    if not isinstance(made, Selector):
        raise ValueError(f'selector is a name ("quest") or an instance of a Selector, such as Quest(), got {made!r}')
    return made
