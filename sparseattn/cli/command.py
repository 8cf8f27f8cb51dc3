"""What makes a function a console command: options from a dataclass, and one sentence for what a user can cause."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_type_hints

import typer

from sparseattn.cli.options import allow_own_modules
from sparseattn.reporting.terminal import Screen, plain
from sparseattn.utils.ranks import job_rank, job_size

Options = TypeVar("Options")

errors = Screen(stderr=True)


def command(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """Return a function that typer makes a command of: it sees each field of a dataclass of options as a parameter.

    A field's type is an `Annotated` one, often of `cli.options`; its default is the option's. The docstring of the
    class is the command's help. What the fields must be to each other the dataclass checks in `__post_init__`, by a
    ValueError that names the option. Modules that fields called `selector` and `trust` name may lie in the current
    folder.

    A module of options imports neither torch nor anything that does, at its top: help and shells' completion need
    nothing else.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = inspect.signature(options).parameters.values()

    def called(**values: Any) -> None:
        with sentences():
            allow_own_modules(values.get("selector"), values.get("trust"))
            run(options(**values))

    called.__doc__ = options.__doc__
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [field.replace(annotation=hints[field.name]) for field in parameters]
    )
    called.__annotations__ = {field.name: hints[field.name] for field in parameters}
    return called


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turn what users can cause (bad values, files, disks, missing packages) into one sentence and exit status 2.

    A warning of the package is a line of its own.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except OSError as error:
        where = f" {os.fspath(error.filename)}" if error.filename else ""
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        _fail(f"cannot use{where}: {what}" if where else what)
    except (ValueError, ImportError) as error:
        if not raised_here(error):
            raise  # a fault in a user's own selector or in a library: its traceback is what helps
        _fail(str(error))


def raised_here(error: BaseException) -> bool:
    """Return whether a line of this package raised the error, and none of a user's selector or of a library."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("sparseattn.")


def say(line: str, style: str | None = None) -> None:
    """Print a line of the command's own on standard error; of several processes the first one speaks."""
    if not job_rank():
        _print(line, style)


def _print(line: str, style: str | None) -> None:
    """Print a line on standard error; where it goes nowhere any more (a log on a full disk), the run goes on."""
    with contextlib.suppress(OSError):
        errors.print(f"sparseattn: {plain(line)}", style=style, soft_wrap=True)


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    say(str(message))


def _fail(sentence: str) -> None:
    _print(f"process {job_rank()} of {job_size()}: {sentence}" if job_size() > 1 else sentence, "red")
    raise typer.Exit(2)
