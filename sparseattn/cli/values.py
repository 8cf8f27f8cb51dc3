"""Options' texts as values, each refused by a ValueError that names its option."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from sparseattn.core.budget import Budget, parse_budget

if TYPE_CHECKING:
    from sparseattn.codecs.base import RowCodec

Number = TypeVar("Number", int, float)
EXACT = "exact"  # rows as they come


def integers(text: str | None, option: str) -> list[int] | None:
    """Return `"0,2,5"` as a list; None stays None."""
    return None if text is None else _numbers(text, option, int, "integers")


def decimals(text: str, option: str) -> list[float]:
    """Return `"0.1,0.26"` as a list."""
    return _numbers(text, option, float, "numbers")


def row_codecs(texts: Sequence[str] | None) -> list[RowCodec | None]:
    """Return `["exact", "kivi:bits=4"]` as codecs without repetitions, None for "exact"; without any, None alone."""
    from sparseattn.codecs.registry import make_codec

    named = list(dict.fromkeys(texts or ())) or [EXACT]
    return list(
        {str(codec): codec for codec in (None if text == EXACT else make_codec(text) for text in named)}.values()
    )


def budgets(text: str) -> list[Budget | None]:
    """Return `"64,10%,mass:0.95,all"` as a list without repetitions."""
    return list(dict.fromkeys(parse_budget(part) for part in text.split(",")))


def row_count(text: str, option: str) -> int:
    """Return `"1M"`, `"128k"` or `"131072"` as rows."""
    factor = {"k": 1024, "M": 1024**2}.get(text[-1:], 1)
    number = text if factor == 1 else text[:-1]
    if not number.isdecimal():
        raise ValueError(f"{option} takes a number of tokens such as 32768, 128k or 1M, got {text!r}")
    return int(number) * factor


def names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """Return `"a,b"` as a list without repetitions, of names among `known`."""
    parts = list(dict.fromkeys(text.split(","))) if text else []
    for name in parts:
        if name not in known:
            raise ValueError(f"{option} takes one or more of {', '.join(known)}, separated by commas, got {name!r}")
    return parts


def check_positive(numbers: dict[str, int | None]) -> None:
    """Refuse a number below 1, by the name of its option."""
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{option} must be 1 or more, got {number}")


def check_one_of(option: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not among `known`."""
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")


def _numbers(text: str, option: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes {what} separated by commas, got {text!r}") from None
