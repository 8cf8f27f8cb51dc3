"""What a step of the evidence is: a command, and the one record that it leaves."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
REPORTED = REPOSITORY / "benchmarks" / "reported"  # records that others measured, on machines that we have none of
WORK = REPOSITORY / "build" / "evidence"
SETTING = re.compile("[A-Z_]+=.*")  # of an environment variable, before a command
OUT = "OUT"  # stands in a command for the folder that it writes to


@dataclass(frozen=True)
class Step:
    """One command and its record.

    Args:
        name: of the record, `benchmarks/results/NAME.json`.
        why: what it is for, in a phrase.
        command: as one types it in the repository root, with `OUT` for its folder; several are joined by `&&`.
        minutes: that it takes on two quiet cores; what it makes on first use (models, traces) is not counted.
        left: what it leaves in its folder: a record as it is (`speed-cpu.json`), or lines of measurements that
            `condensing.py` makes a record of (`bench.jsonl`).
        needs: steps that come before it.
    """

    name: str
    why: str
    command: str
    minutes: float
    left: str
    needs: tuple[str, ...] = ()

    def record(self, results: Path = RESULTS) -> Path:
        """Where its record lies."""
        return results / f"{self.name}.json"

    def folder(self, work: Path = WORK) -> Path:
        """Where its command writes: another command of the same name begins in another folder."""
        return work / f"{self.name}-{hashlib.sha256(self.command.encode()).hexdigest()[:8]}"

    def commands(self) -> list[list[str]]:
        """The words of each command."""
        return [shlex.split(one) for one in self.command.split(" && ")]

    def runs(self, folder: Path) -> list[list[str]]:
        """What to run, one after another: this Python for `python` and for `sparseattn`, another by its path."""
        every = []
        for words in self.commands():
            settings = list(itertools.takewhile(SETTING.fullmatch, words))
            first, *rest = words[len(settings) :]
            python = [sys.executable] if first in ("python", "sparseattn") else [first]
            start = [*settings, *python, *(("-m", "sparseattn") if first == "sparseattn" else ()), *rest]
            every.append([*(("env",) if settings else ()), *(word.replace(OUT, str(folder)) for word in start)])
        return every
