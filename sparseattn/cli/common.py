"""What the subcommands share: one-sentence errors, lists in options, traces and texts by name, screens, progress."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
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

from sparseattn.evaluation.builtin_traces import BUILTIN, BYTES, LEADING, builtin_trace, prepare
from sparseattn.evaluation.tasks.prompts import read_text
from sparseattn.kernels.attend_quantized.reference import BITS
from sparseattn.models.errors import ModelError
from sparseattn.models.load import NAMED, REFERENCE, load_model, load_tokenizer
from sparseattn.models.pypi_models import PACKAGED, fetched
from sparseattn.reporting.terminal import Screen, plain
from sparseattn.roles.roles import Roles
from sparseattn.selectors.registry import SELECTORS
from sparseattn.selectors.trust import named_modules, trusted_modules
from sparseattn.traces.texts import TEXTS, read_named
from sparseattn.traces.trace import Trace
from sparseattn.utils.files import naming
from sparseattn.utils.pypi_wheels import FetchError

LEAD = "smollm2"  # the model that is asked where none is named
Command = TypeVar("Command", bound=Callable[..., Any])
Number = TypeVar("Number", int, float)

SELECTOR_HELP = (
    f"NAME[:arg=value,...], NAME one of {', '.join(SELECTORS)} or package.module:Class, which runs the code of that "
    f"module; repeat for more."
)


ROLES_HELP = (
    "File of roles: a selector for each layer, or for each KV head of it, compared as one method; repeat for more."
)


PLAN_HELP = "Plan, a file that `sparseattn recommend` wrote for this model, compared as one method; repeat for more."


KV_BITS_HELP = (
    "Bits of a number of sealed rows' keys and values: 16 as they come; 8 or 4 rounded as in KIVI, which methods that "
    "score stored keys refuse. Several with commas are compared."
)


MODEL_HELP = (
    f"{', '.join(NAMED)} (see `sparseattn models`); or the folder, the GGUF file or the name on the Hugging Face hub "
    f"of a transformers causal LM."
)

TEXT_HELP = f"a UTF-8 file, or a text by name: {', '.join(TEXTS)} (a file of such a name is meant by ./NAME)."


errors = Screen(stderr=True)


def in_a_sentence(command: Command) -> Command:
    """Turns what users can cause (bad values, files, disks, missing packages) into one sentence and exit status 2.

    Warnings of the package are a line of theirs each.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _say
                return command(*args, **kwargs)
        except OSError as error:
            where = f" {os.fspath(error.filename)}" if error.filename else ""
            what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            _fail(f"cannot use{where}: {what}" if where else what)
        except KeyboardInterrupt:
            errors.print("sparseattn: interrupted", style="red")
            raise typer.Exit(130) from None
        except (ValueError, ImportError) as error:
            if not raised_here(error):
                raise  # a fault in somebody's own selector or in a library: its traceback is what helps
            _fail(str(error))

    return run  # type: ignore[return-value]


def raised_here(error: BaseException) -> bool:
    """Whether a line of this package raised it, and no selector of somebody's own or library."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("sparseattn.")


def _say(message: Warning | str, *where: Any, **more: Any) -> None:
    errors.print(f"sparseattn: {plain(message)}", soft_wrap=True)


def _fail(sentence: str) -> None:
    errors.print(f"sparseattn: {plain(sentence)}", style="red", soft_wrap=True)
    raise typer.Exit(2)


def own_selectors(given: Any) -> Any:
    """Callback of options that take texts of selectors: lets modules that they name lie in the current folder."""
    if named_modules([given] if isinstance(given, str) else given or ()):
        _search_here()
    return given


def own_modules(given: Any) -> Any:
    """Callback of `--trust`: lets the modules lie in the current folder."""
    if given:
        _search_here()
    return given


def _search_here() -> None:
    """Searches the current folder for modules, behind all folders of Python's. Nothing else makes it do so: in a
    folder of somebody else's a file may have the name of any module."""
    with contextlib.suppress(FileNotFoundError):  # it is gone, and holds no module
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)


def trusted(modules: Iterable[str] | None, selectors: Iterable[str] | None) -> frozenset[str]:
    """The modules that the user named, by `--trust` or in selectors; ValueError for what is no name of one."""
    return trusted_modules(list(modules or ())).union(named_modules(selectors or ()))


Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        callback=own_modules,
        help="Module whose classes a file of roles or a plan may name, as MODULE:Class; it is imported, which runs its "
        "code. A file that names another one is refused. Repeat for more.",
    ),
]


def open_roles(paths: Iterable[Path] | None, kind: type[Roles] = Roles, trusted: Collection[str] = ()) -> list[Roles]:
    """The roles of `--roles`, or of another kind, whose files may name classes of `trusted` modules.

    Raises:
        ValueError: a file of none, or two of one name that are not the same.
    """
    found: dict[str, Roles] = {}
    for path in paths or ():
        one = kind.load(path, trusted)
        if repr(found.setdefault(one.label(), one)) != repr(one):
            raise ValueError(
                f"two files of --{kind.KIND} are called {one.name}, the second is {path}: name one otherwise"
            )
    return list(found.values())


def integers(text: str | None, option: str) -> list[int] | None:
    """`"0,2,5"` as a list; None stays None. Raises ValueError naming the option."""
    return None if text is None else _numbers(text, option, int, "integers")


def kv_bits(text: str) -> list[int | None]:
    """`"16,8"` as a list of `KVCache`'s bits, None for 16. Raises ValueError naming the option."""
    found = list(dict.fromkeys(_numbers(text, "--kv-bits", int, "integers")))
    if strange := [bits for bits in found if bits not in (16, *BITS)]:
        raise ValueError(f"--kv-bits takes 16, 8 and 4, separated by commas, got {strange[0]}")
    return [None if bits == 16 else bits for bits in found]


def decimals(text: str, option: str) -> list[float]:
    """`"0.1,0.26"` as a list. Raises ValueError naming the option."""
    return _numbers(text, option, float, "numbers")


def _numbers(text: str, option: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes {what} separated by commas, got {text!r}") from None


def open_trace(name: str, progress: Callable[[str, int, int], None]) -> Trace:
    """A trace file, or a built-in trace, which is made on first use. Raises ValueError for neither."""
    if name not in BUILTIN:
        if not Path(name).exists():
            raise ValueError(
                f"{name} is neither a file nor a built-in trace ({', '.join(BUILTIN)}){_near(name, BUILTIN)}"
            )
        return Trace.open(name)
    if not BUILTIN[name].path.is_file():
        say_terms(BUILTIN[name].model)
    return builtin_trace(name, progress)


def leading_traces(names: Sequence[str] = LEADING) -> list[str]:
    """The built-in traces to measure where none is named: these; `BYTES` where they cannot be had, and says so."""
    try:
        with model_progress() as progress:
            for name in names:
                if not BUILTIN[name].path.is_file():
                    say_terms(BUILTIN[name].model)
                prepare(name, progress)
    except (ModelError, FetchError) as error:
        _instead(error, f"the byte model's traces {' and '.join(BYTES)}")
        return list(BYTES)
    return list(names)


def leading_model() -> str:
    """The model to ask where none is named: `LEAD`; the byte model where that cannot be had, and says so."""
    say_terms(LEAD)
    try:
        with model_progress() as progress:
            fetched(PACKAGED[LEAD], progress)
    except ModelError as error:
        _instead(error, f"the byte model, {REFERENCE}")
        return REFERENCE
    return LEAD


def _instead(error: Exception, what: str) -> None:
    said = f"sparseattn: {LEAD} cannot be had here, so this takes {what}, which say little of language models: {error}"
    errors.print(plain(said), style="yellow", soft_wrap=True)


def named_text(name: str) -> str | Path:
    """A name of `TEXTS` as it is, or the path of a file or folder. Raises ValueError for neither."""
    if name in TEXTS:
        return name
    if not Path(name).exists():
        raise ValueError(f"{name} is neither a file nor a text known by name ({', '.join(TEXTS)}){_near(name, TEXTS)}")
    return Path(name)


def open_text(name: str) -> tuple[str, str]:
    """Name and words of a text of `TEXTS`, fetched on first use, or of a UTF-8 file (see `TEXT_HELP`).

    Raises:
        ValueError: neither, not UTF-8, or a text that has to be fetched and cannot be.
        OSError: the file cannot be read, or the cache folder cannot be written.
    """
    source = named_text(name)
    if isinstance(source, Path):
        return source.name, read_text(source)
    with model_progress() as progress:
        return source, read_named(source, progress)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def say_differences(trace: Trace) -> None:
    """Says for which layers of a trace full attention over its rows is not what the model computed, and why."""
    for layer, reason in trace.meta.get("attention_differs", {}).items():
        errors.print(plain(f"{trace.name}, layer {layer}: full attention here is not the model's: {reason}"))


def results_folder(out: Path) -> None:
    """Makes the folder `out`; one that cannot be written fails here, not after the work."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out is a folder, {out} is a file")
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


class _Words(ProgressColumn):
    """A task's description, which may hold the name of a file."""

    def render(self, task: Task) -> Text:
        return Text(plain(task.description), style="none")


def progress_bar() -> Progress:
    """A progress bar on standard error, so that standard output holds results only."""
    return Progress(
        _Words(table_column=Column(no_wrap=True)),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


@contextlib.contextmanager
def model_progress(latest: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Shows how far a model is on its way here: a bar for each thing that is being done, or for the `latest` alone."""
    with progress_bar() as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for done_with in list(tasks) if latest else ():
                    bar.remove_task(tasks.pop(done_with))
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show


def say_terms(name: str) -> None:
    """Prints what a packaged model is and under which terms it comes, where it is about to be fetched."""
    model = PACKAGED.get(name)
    if model is not None and not model.cached:
        errors.print(f"{name}: {model.about}. Terms: {model.licence}", soft_wrap=True)


def open_model(name: str, dtype: torch.dtype | None, device: torch.device) -> tuple[Any, Any]:
    """`load_model`, showing how far it is where a model has to be fetched or converted, and under which terms."""
    say_terms(name)
    with model_progress() as progress:
        return load_model(name, dtype, device, progress)


def open_tokenizer(name: str) -> Any:
    """`load_tokenizer`, showing what `open_model` shows."""
    say_terms(name)
    with model_progress() as progress:
        return load_tokenizer(name, progress)


def row_count(text: str, option: str) -> int:
    """`"128k"` or `"131072"` as rows; ValueError for another text."""
    number, factor = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    if not number.isdecimal():
        raise ValueError(f"{option} is rows such as 32768 or 128k, got {text!r}")
    return int(number) * factor
