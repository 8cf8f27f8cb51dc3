"""What a user may have meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence, " (did you mean 'quest'?)", or "" where no known name is near."""
    alike = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {alike[0]!r}?)" if alike else ""
