"""What the subcommands share: sentences for errors, lists in options, a progress bar."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Command = TypeVar("Command", bound=Callable[..., Any])

errors = Console(stderr=True, highlight=False)


def in_a_sentence(command: Command) -> Command:
    """Turns what users can cause (bad values, files, disks, missing packages) into one sentence and exit status 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except OSError as error:
            where = f" {os.fspath(error.filename)}" if error.filename else ""
            what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            _fail(f"cannot use{where}: {what}" if where else what)
        except KeyboardInterrupt:
            errors.print("sparseattn: interrupted", style="red")
            raise typer.Exit(130) from None
        except (ValueError, ImportError) as error:
            if not _raised_here(error):
                raise  # a fault in somebody's own selector or in a library: its traceback is what helps
            _fail(str(error))

    return run  # type: ignore[return-value]


def _raised_here(error: BaseException) -> bool:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("sparseattn.")


def _fail(sentence: str) -> None:
    errors.print(f"sparseattn: {sentence}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(2)


def integers(text: str | None, option: str) -> list[int] | None:
    """`"0,2,5"` as a list; None stays None. Raises ValueError naming the option."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes integers separated by commas, got {text!r}") from None


def progress_bar() -> Progress:
    """A progress bar on standard error, so that standard output holds results only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
