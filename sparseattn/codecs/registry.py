"""Every codec by name, and codecs made from texts, as selectors are."""

from __future__ import annotations

from sparseattn.codecs.base import RowCodec
from sparseattn.codecs.table import BASE, CODECS
from sparseattn.utils.specs import Registry

# Add a class of your own with `ROW_CODECS["mine"] = Mine`.
ROW_CODECS: Registry[RowCodec] = Registry(
    "row codec", RowCodec, {name: BASE + codec.place for name, codec in CODECS.items()}
)


def make_codec(spec: str) -> RowCodec:
    """Return the codec that a text names: `kivi:bits=2`, or `package.module:Class[:arg=value,...]` of your own.

    A module is imported, which runs its code: take no such text from where you would take no program.

    Raises:
        ValueError: what `utils.specs.Registry.make` refuses.
    """
    return ROW_CODECS.make(spec)


def as_codec(given: RowCodec | str | None) -> RowCodec | None:
    """Return `given`, or the codec that it names (`make_codec`); None: rows as they come. Else ValueError."""
    made = make_codec(given) if isinstance(given, str) else given
    if made is not None and not isinstance(made, RowCodec):
        raise ValueError(
            f'rows is a codec by name ("kivi:bits=4"), an instance of a RowCodec, or None for rows as they come, got '
            f"{made!r}"
        )
    return made
