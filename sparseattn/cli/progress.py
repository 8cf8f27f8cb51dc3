"""How far work is, as bars on standard error, so that standard output holds results only."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from sparseattn.cli.command import errors, say
from sparseattn.reporting.terminal import plain
from sparseattn.utils.ranks import job_rank

BAR = 20  # characters
NUMBERS = 32  # characters of all behind the bar: steps done and in all, times, and spaces


class _Words(ProgressColumn):
    """A task's description, which may hold the name of a file; it gives way to bar and numbers."""

    def render(self, task: Task) -> Text:
        words = Text(plain(task.description), style="none")
        words.truncate(max(errors.width - BAR - NUMBERS, 10), overflow="ellipsis")
        return words


def progress_bar() -> Progress:
    """Return a progress bar, which shows nothing where standard error is no terminal; of several processes the first
    one's shows."""
    return Progress(
        _Words(table_column=Column(no_wrap=True)),
        BarColumn(BAR),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal or job_rank() > 0,
    )


class Stages:
    """Lines of what begins, with the time since the first, where standard error is no terminal and shows no bar."""

    def __init__(self) -> None:
        self.begun = time.monotonic()

    def say(self, words: str) -> None:
        """Print the time and what begins now."""
        if not errors.is_terminal and not job_rank():
            say(f"{datetime.timedelta(seconds=int(time.monotonic() - self.begun))} {words}")


@contextlib.contextmanager
def progress_of(words: str, total: float | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show one bar; what the block gets is called with steps done and steps in all."""
    with progress_bar() as bar:
        task = bar.add_task(words, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def model_progress(latest: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show how far a model is on its way here: a bar for each thing that is being done, or for the `latest` alone."""
    with progress_bar() as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for finished in list(tasks) if latest else ():
                    bar.remove_task(tasks.pop(finished))
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show
