"""Runs steps one after another: what is there is skipped, and a step that fails does not lose the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.evidence import condensing, made
from scripts.evidence.step import REPOSITORY, RESULTS, WORK, Step
from sparseattn.utils.locks import locked

LOG = "output.txt"  # what the command of a step printed, in its folder


def order(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """The steps called so, in the order of the table; all of them for no name.

    Raises:
        ValueError: there is no such step.
    """
    known = [step.name for step in steps]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no step {unknown[0]!r}; there are {', '.join(known)}")
    return [step for step in steps if not names or step.name in names]


def run(
    steps: Sequence[Step],
    every: Sequence[Step],
    say: Callable[[str], None],
    results: Path = RESULTS,
    work: Path = WORK,
    again: bool = False,
) -> dict[str, str]:
    """Runs what is not there yet.

    Args:
        steps: to run.
        every: the whole table, for what they need.
        say: takes a line of progress.
        results, work: folders of the records and of what is under way.
        again: whether to run what is there, too.

    Returns:
        Step -> why it did not end well, for those that did not.
    """
    results.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    by_name = {step.name: step for step in every}
    due = [step for step in steps if again or made.state(step, made.read(results), results) != made.MADE]
    if skipped := len(steps) - len(due):
        say(f"{skipped} of {len(steps)} steps are there already")
    for at, step in enumerate(due, 1):
        now = made.read(results)
        absent = [name for name in step.needs if made.state(by_name[name], now, results) != made.MADE]
        if absent:
            failed[step.name] = f"needs {', '.join(absent)} first"
            say(f"[{at}/{len(due)}] {step.name}: {failed[step.name]}")
            continue
        say(f"[{at}/{len(due)}] {step.name}, about {step.minutes:g} minutes: {step.command}")
        began = time.perf_counter()
        try:
            work.mkdir(parents=True, exist_ok=True)
            with locked(work / f"{step.name}.lock", f"the step {step.name}"):
                _one(step, results, work)
        except (ValueError, OSError, RuntimeError) as error:
            failed[step.name] = str(error)
            say(f"    failed after {time.perf_counter() - began:.0f} s: {error}")
        else:
            say(f"    {time.perf_counter() - began:.0f} s, {step.record(results)}")
    return failed


def _one(step: Step, results: Path, work: Path) -> None:
    """Runs one command in its folder and puts its record in its place.

    Raises:
        RuntimeError: the command ended with another status than 0.
        ValueError, OSError: it left nothing to make a record of.
    """
    folder = step.folder(work)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # so that threads wait as a user's do
    with open(folder / LOG, "wb") as log:
        for words in step.runs(folder):
            status = subprocess.run(words, cwd=REPOSITORY, stdout=log, env=environment).returncode
            if status:
                raise RuntimeError(f"exit status {status}; what it printed is in {folder / LOG}, run it again to go on")
    took = time.perf_counter() - began
    condensing.keep(step, folder, step.record(results), took)
    made.note(step, took, results)
    shutil.rmtree(folder)  # traces and lines of a step that is done are not needed any more
