"""`sparseattn capture`: queries, keys and values of a language model over texts, as trace files."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.cli.capture_options import CaptureOptions
from sparseattn.cli.inputs import named_text, open_model, open_text
from sparseattn.cli.progress import progress_bar, progress_of
from sparseattn.cli.results import check_tensor_file, results_folder
from sparseattn.reporting.terminal import Screen
from sparseattn.traces.trace import Trace
from sparseattn.utils.devices import usable_device
from sparseattn.utils.ranks import JobRanks, of_job


@dataclass(frozen=True)
class Passage:
    """A text to run a model on.

    Args:
        source: its name, or its file.
        content: its bytes.
        ids: its tokens.
        pieces: what each token is of the text; None: not kept.
    """

    source: str | Path
    content: bytes
    ids: Tensor
    pieces: list[str] | None


def run(options: CaptureOptions) -> None:
    """Run `sparseattn capture`."""
    values.integers(options.layers, "--layers")
    place = usable_device(options.device)
    sources = [named_text(name) for name in options.text]
    ranks = of_job()
    several = len(sources) > 1 or (isinstance(sources[0], Path) and sources[0].is_dir())
    if ranks and not several:
        raise ValueError(
            f"one text is one process's work, and torchrun has started {ranks.count}: name several --text and a folder "
            f"as --out, or start it without torchrun"
        )
    traces = _traces(sources, options.out) if several else _trace(sources[0], options.out)
    contents = {source: _content(source) for source in traces.values()}
    if several:
        results_folder(options.out)
    model, tokenizer = open_model(options.model, shared.torch_dtype(options.dtype), place)
    # All of them before the first takes its time.
    passages = {source: _passage(source, content, tokenizer, options) for source, content in contents.items()}
    if ranks:
        _share(ranks, options, model, traces, passages)
        if not ranks.first:
            return
    console = Screen()
    for target, source in traces.items():
        trace = Trace.open(target) if ranks else _captured(options, model, target, passages[source], several)
        size = target.stat().st_size / 2**20
        console.print(
            f"{target}: {trace.tokens} tokens, layers {', '.join(map(str, trace.layers))}, {size:.1f} MiB",
            soft_wrap=True,
        )


def _share(
    ranks: JobRanks,
    options: CaptureOptions,
    model: Any,
    traces: dict[Path, str | Path],
    passages: dict[str | Path, Passage],
) -> None:
    """Write the traces that this process takes, the longest first, and return once all are there."""
    targets = list(traces)
    costs = [passages[source].ids.shape[1] for source in traces.values()]
    with progress_bar() as bar:
        task = bar.add_task(f"capture, {ranks.count} processes", total=len(targets))
        for place in ranks.take(costs):
            _captured(options, model, targets[place], passages[traces[targets[place]]], True, shown=False)
            bar.update(task, completed=ranks.advance())
        ranks.meet(lambda done: bar.update(task, completed=done))


def _captured(
    options: CaptureOptions, model: Any, target: Path, passage: Passage, keep: bool, shown: bool = True
) -> Trace:
    """Write the trace of a text, or with `keep` find it written."""
    from sparseattn.models.capture import capture

    digest = hashlib.sha256(passage.content).hexdigest()
    bar = progress_of(f"capture {target.name}", passage.ids.shape[1]) if shown else contextlib.nullcontext(_silent)
    with bar as progress:
        return capture(
            model,
            passage.ids,
            target,
            layers=values.integers(options.layers, "--layers"),
            queries=options.queries,
            ahead=options.ahead,
            chunk=options.chunk,
            model_id=options.model,
            text={
                "name": _printable(passage.source.name if isinstance(passage.source, Path) else passage.source),
                "sha256": digest,
            },
            pieces=passage.pieces,
            keep=keep,
            progress=progress,
        )


def _silent(done: int, total: int) -> None:
    pass


def _passage(source: str | Path, content: bytes, tokenizer: Any, options: CaptureOptions) -> Passage:
    """Return a text as the model's tokens; ValueError naming the text that it cannot take."""
    from sparseattn.models.errors import ModelError
    from sparseattn.models.load import encode, pieces

    try:
        ids = encode(tokenizer, content)[:, : options.tokens]
        kept = pieces(tokenizer, content)[: options.tokens] if options.with_text else None
    except ModelError as error:
        raise ValueError(f"{source}: {error}") from error
    return Passage(source, content, ids, kept)


def _content(source: str | Path) -> bytes:
    """Return the bytes of a text; a file's need not be UTF-8, as a model of bytes takes any."""
    return source.read_bytes() if isinstance(source, Path) else open_text(source)[1].encode()


def _trace(text: str | Path, out: Path) -> dict[Path, str | Path]:
    """Return the trace file `out` -> its text."""
    check_tensor_file(out)
    if not out.parent.is_dir():
        raise ValueError(f"the folder of --out does not exist: {out.parent}")
    return {out: text}


def _traces(texts: list[str | Path], out: Path) -> dict[Path, str | Path]:
    """Return trace files in the folder `out` -> their texts; a folder among `texts` stands for its files, by name."""
    if out.suffix == ".safetensors":
        raise ValueError(f"several texts need a folder as --out, got {out}")
    traces: dict[Path, str | Path] = {}
    for text in texts:
        files: list[str | Path] = [text]
        if isinstance(text, Path) and text.is_dir():
            files = [*sorted(path for path in text.iterdir() if path.is_file())]
        if not files:
            raise ValueError(f"the folder {text} contains no text file")
        for source in files:
            target = out / f"{source.stem if isinstance(source, Path) else source}.safetensors"
            if target in traces:
                raise ValueError(f"{traces[target]} and {source} would both be written to {target}: rename one")
            traces[target] = source
    return traces


def _printable(name: str) -> str:
    """Return a text's name as JSON can hold it: one of a file that is no UTF-8 has its bytes written out."""
    return os.fsencode(name).decode(errors="backslashreplace")
