"""Which command made each record: `made.json` beside the records."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.evidence.step import RESULTS, WORK, Step
from sparseattn.utils.files import open_lock, take_lock, write_atomic

NAME = "made.json"
MISSING, MADE, OTHER, CHANGED = "missing", "there", "of another command", "changed since"


def read(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Record -> `command`, `date`, `seconds` and `sha256` of the file it left."""
    path = results / NAME
    return json.loads(path.read_text()) if path.exists() else {}


def state(step: Step, made: Mapping[str, Mapping[str, Any]], results: Path = RESULTS) -> str:
    """Whether a step is done: `MADE`, or why it is to be run."""
    path, mine = step.record(results), made.get(step.name)
    if mine is None or not path.exists():
        return MISSING
    if mine["command"] != step.command:
        return OTHER
    return MADE if mine["sha256"] == digest(path) else CHANGED


def note(step: Step, seconds: float | None, results: Path = RESULTS) -> None:
    """Says that the record that lies there now is of this step's command; `seconds` is None where nobody timed it."""
    WORK.mkdir(parents=True, exist_ok=True)
    with open_lock(WORK / "made.lock") as lock:
        take_lock(lock, wait=True)  # of two runs, one would lose its line
        _write(step, seconds, results)


def _write(step: Step, seconds: float | None, results: Path) -> None:
    made = read(results)
    made[step.name] = {
        "command": step.command,
        "date": datetime.date.today().isoformat(),
        "seconds": None if seconds is None else round(seconds, 1),
        "sha256": digest(step.record(results)),
    }
    write_atomic(results / NAME, (json.dumps(dict(sorted(made.items())), indent=1) + "\n").encode())


def adopt(step: Step, results: Path = RESULTS) -> None:
    """`note` for a record that was made by hand.

    Raises:
        OSError: there is none.
        ValueError: it says that another command made it.
    """
    theirs = json.loads(step.record(results).read_bytes()).get("command", step.command)
    if theirs != step.command:
        raise ValueError(f"{step.record(results)} is of another command: {theirs}")
    note(step, None, results)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
