"""`sparseattn report`: one page of HTML from the records that other commands left, to look at instead of tables."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sparseattn.cli import report_defaults
from sparseattn.cli.command import errors, say
from sparseattn.cli.inputs import distinct_labels, open_trace
from sparseattn.cli.progress import model_progress, progress_bar
from sparseattn.cli.report_options import Explored, ReportOptions
from sparseattn.core.budget import budget_label
from sparseattn.evaluation.builtin_traces import pieces_of
from sparseattn.evaluation.replay_settings import usable_layers
from sparseattn.evaluation.token_explorer import explore
from sparseattn.models.errors import ModelError
from sparseattn.models.packaged import PACKAGED
from sparseattn.reporting.html import bench, explorer, html, origin
from sparseattn.reporting.html import folders as reading
from sparseattn.reporting.html.heading import heading
from sparseattn.reporting.html.kinds import CHECKS, KINDS
from sparseattn.reporting.html.origin import Facts
from sparseattn.reporting.html.views import Section
from sparseattn.reporting.terminal import plain
from sparseattn.roles.roles import as_method
from sparseattn.utils.files import write_atomic
from sparseattn.utils.pypi_wheels import FetchError

MODEL_NAMES = {name: packaged.title for name, packaged in PACKAGED.items()}


def run(options: ReportOptions) -> None:
    """Run `sparseattn report`."""
    folders = options.folders or []
    measured = reading.read(folders, CHECKS).get(bench.FILE, []) if options.trace else []
    explored, left_out = report_defaults.explored(options, [record for source in measured for record in source.records])
    for label in left_out:
        say(f"{label} is not in the explorer, since its code would run: add --selector {label}")
    path = write_report(folders, options.out, options.title, explored)
    errors.print(f"report: {path}", soft_wrap=True)


def write_report(
    folders: Sequence[Path], out: Path, title: str | None = None, explored: Explored | None = None
) -> Path:
    """Read the records, explore the traces, make the page and return its path.

    Raises:
        ValueError: neither folders nor traces, `out` is no .html file to write, or what `folders.read` and `explore`
            refuse.
        OSError: the page cannot be written.
    """
    traces = () if explored is None else explored.traces
    if not folders and not traces:
        raise ValueError("name a folder that bench, inspect, recall, eval or recommend wrote, or a --trace to explore")
    if out.suffix != ".html" or out.is_dir():
        raise ValueError(f"--out must be an .html file, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"the folder of --out does not exist: {out.parent}")
    sources = reading.read(folders, CHECKS)
    sections = [section for name, make in KINDS.items() for section in _sections(sources.get(name, []), make)]
    settings: dict[str, Facts] = {}
    if explored is not None:
        labels = distinct_labels(traces)
        for number, (name, label) in enumerate(zip(traces, labels, strict=True)):
            section, facts = _explored(number, name, label, explored)
            sections.append(section)
            settings |= facts
    sections.append(origin.section(sources, settings))
    named = ", ".join(
        dict.fromkeys([*(folder.resolve().name for folder in folders), *(Path(trace).stem for trace in traces)])
    )
    made = f"Written on {datetime.date.today().isoformat()} from {', '.join([*map(str, folders), *traces])}."
    title = title or heading(sections, MODEL_NAMES) or f"Sparse attention: {named}"
    write_atomic(out, html.written(plain(title), sections, plain(made)).encode())
    return out


def _sections(
    sources: Sequence[reading.RecordSource], make: Callable[[Sequence[reading.Record]], Section]
) -> list[Section]:
    """Return a section of each source; several of a kind are told apart by their folders."""
    made = [make(source.records) for source in sources]
    if len(made) < 2:
        return made
    return [
        replace(section, name=f"{section.name}-{number}", title=f"{section.title}: {source.path.parent}")
        for number, (section, source) in enumerate(zip(made, sources, strict=True), 1)
    ]


def _explored(number: int, name: str, label: str, shown: Explored) -> tuple[Section, dict[str, Facts]]:
    """Return the section of a trace, which is to be called `label`, and what it was made with."""
    with model_progress() as progress:
        trace = open_trace(name, progress)
        trace.name = label
        try:
            pieces = pieces_of(trace, progress)
        except (ModelError, FetchError) as error:
            errors.print(plain(f"sparseattn: {trace.name} is shown without its text: {error}"), soft_wrap=True)
            pieces = None
    steps = len(usable_layers(trace, shown.layers)) * shown.queries * len(shown.selectors)
    with progress_bar() as bar:
        advance = functools.partial(bar.advance, bar.add_task(f"{trace.name}: what its tokens attend to", total=steps))
        exploration = explore(
            trace,
            shown.selectors,
            shown.budget,
            queries=shown.queries,
            sink=shown.sink,
            window=shown.window,
            layers=shown.layers,
            device=shown.device,
            progress=advance,
        )
    settings = {
        "selectors": [repr(as_method(selector)) for selector in shown.selectors],
        "budget": budget_label(shown.budget),
        "sink": shown.sink,
        "window": shown.window,
        "tokens": trace.tokens,
        "tokens that ask": list(exploration.tokens),
        "layers": list(exploration.layers),
        "trace_meta": trace.meta,
    }
    section = explorer.section(number, exploration, pieces, trace.meta.get("model"))
    return section, {f"the attention of {trace.name}": settings}
