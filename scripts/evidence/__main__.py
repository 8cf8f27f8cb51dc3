"""The command: runs the steps that are missing, lists them, draws the documents, or checks them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from scripts.evidence import made, pictures, tables
from scripts.evidence.documents import redraw
from scripts.evidence.frames import loader
from scripts.evidence.running import order, run
from scripts.evidence.step import Step
from scripts.evidence.steps import STEPS
from sparseattn.reporting.table import Column, Table


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m scripts.evidence",
        description="Remake the measurements of the documents: run the steps that are missing, draw the documents.",
    )
    out.add_argument("--list", action="store_true", help="print the steps, what is there, and the hours of the rest")
    out.add_argument("--only", default="", metavar="NAME,...", help="these steps")
    out.add_argument("--again", action="store_true", help="run the steps of --only though their records are there")
    out.add_argument("--documents", action="store_true", help="run nothing: draw the documents from the records there")
    out.add_argument("--check", action="store_true", help="run nothing: exit 1 where documents are not as records give")
    out.add_argument(
        "--adopt", action="store_true", help="run nothing: the records of --only were made by hand, by their commands"
    )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)
    try:
        steps = order(STEPS, [name for name in options.only.split(",") if name])
    except ValueError as error:
        command.error(str(error))
    if options.list:
        console.print(listed(steps))
        return 0
    if options.again and not options.only:
        command.error("--again is for the steps that --only names")
    if options.adopt:
        if not options.only:
            command.error("--adopt is for the steps that --only names")
        for step in steps:
            try:
                made.adopt(step)
            except (ValueError, OSError) as error:
                command.error(str(error))
        return 0
    failed: dict[str, str] = {}
    if not (options.documents or options.check):
        failed = run(steps, STEPS, lambda words: console.print(words, soft_wrap=True), again=options.again)
    load = loader()
    wrong = pictures.redraw(load, write=not options.check)
    wrong += redraw(tables.defined(), load, write=not options.check)
    for line in wrong + [f"step {name}: {why}" for name, why in failed.items()]:
        console.print(line, soft_wrap=True)
    return int(bool(wrong or failed))


def listed(steps: Sequence[Step]) -> Table:
    """The steps, and below them the hours of those that are to be run."""
    notes = made.read()
    states = {step.name: made.state(step, notes) for step in steps}
    left = [step for step in steps if states[step.name] != made.MADE]
    heads = ("step", "what for, and its command", "state", "needs")
    table = Table("", [*map(Column.text, heads), Column("minutes", "{:g}".format)])
    table.note = (
        f"{len(left)} of {len(steps)} steps to run: {sum(step.minutes for step in left) / 60:.1f} hours of two quiet "
        f"cores; all of them {sum(step.minutes for step in steps) / 60:.1f}"
    )
    for step in steps:
        table.add(step.name, f"{step.why}\n{step.command}", states[step.name], ", ".join(step.needs), step.minutes)
    return table


if __name__ == "__main__":
    sys.exit(main())
