"""`--above auto`: from how many rows on a sparse step is faster than stock's, as an engine measures it at its start.

The measurement itself is in `break_even.py`, within an engine. Here is what follows from it, and where it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.files import write_atomic
from sparseattn.utils.json_fields import Items, Number, Object
from sparseattn.utils.json_text import parse

AUTO = "auto"
LENGTHS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)  # rows at which steps are timed
GAIN = 0.97  # of stock's time: what a sparse step takes at most, to be faster beyond what timings vary by
_FIELDS = Object({"timed": Items(Object({"rows": Number(1, whole=True), "stock": Number(0), "sparse": Number(0)}), 1)})


@dataclass(frozen=True)
class Timed:
    """A step of one sequence.

    Args:
        rows: of the sequence.
        stock, sparse: seconds of all sparse layers of the engine, by vLLM's own attention and by ours.
    """

    rows: int
    stock: float
    sparse: float

    @property
    def pays(self) -> bool:
        return self.sparse <= GAIN * self.stock


def lengths(least: int, longest: int) -> list[int]:
    """Return the rows at which to time steps.

    Args:
        least: rows that a sparse step reads whatever it chooses, with its budget; in shorter sequences it reads all.
        longest: of a sequence of the engine, 1 or more.
    """
    chosen = [rows for rows in LENGTHS if least < rows <= longest]
    return chosen or [min(longest, LENGTHS[-1])]


def pays_above(timed: Sequence[Timed], longest: int) -> int:
    """Return the rows above which sequences are to be sparse: at the next length and all measured ones beyond it pays.

    `longest` where even the longest measured length does not pay, so that no sequence of the engine is sparse.
    """
    above = longest
    for trial in sorted(timed, key=lambda trial: trial.rows, reverse=True):
        if not trial.pays:
            break
        above = trial.rows - 1
    return above


def said(timed: Sequence[Timed], above: int, longest: int) -> str:
    """Return a sentence of what was measured and what follows."""
    each = "; ".join(f"{trial.rows:,} rows {trial.stock * 1e3:.2f} and {trial.sparse * 1e3:.2f}" for trial in timed)
    measured = f"a step's attention in milliseconds, stock and sparse: {each}"
    if above >= longest:
        return f"{measured}. No sequence of this engine gains, so that all stay dense"
    return f"{measured}. Sequences of {above + 1:,} rows and more are sparse"


def _file(what: Mapping[str, Any]) -> Path:
    """Return where the times of an engine are kept: `what` is all that they depend on."""
    import hashlib

    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "above" / f"{name}.json"


def remembered(what: Mapping[str, Any]) -> list[Timed] | None:
    """Return the times of an earlier start of such an engine; None: there are none, or none that can be read."""
    try:
        record = parse(_file(what).read_text())
        _FIELDS.check(record, "times")
    except (OSError, ValueError):
        return None  # measured again, which takes seconds
    return [Timed(int(trial["rows"]), float(trial["stock"]), float(trial["sparse"])) for trial in record["timed"]]


def remember(what: Mapping[str, Any], timed: Sequence[Timed]) -> None:
    """Keep times for the next start of such an engine."""
    path = _file(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"of": dict(what), "timed": [asdict(trial) for trial in timed]}, indent=1).encode())
