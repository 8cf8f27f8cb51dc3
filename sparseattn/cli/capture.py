"""`sparseattn capture`: queries, keys and values of a language model over texts, as trace files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from sparseattn.cli.common import (
    MODEL_HELP,
    TEXT_HELP,
    in_a_sentence,
    integers,
    named_text,
    open_model,
    open_text,
    progress_bar,
    results_folder,
)
from sparseattn.reporting.terminal import Screen
from sparseattn.utils.devices import usable_device
from sparseattn.utils.dtypes import stored_dtype


@in_a_sentence
def capture(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    text: Annotated[
        list[str], typer.Option(help=f"To run the model on: a folder of UTF-8 files, {TEXT_HELP} May be repeated.")
    ],
    out: Annotated[
        Path, typer.Option(help="Trace to write, a .safetensors file; a folder of traces for several texts.")
    ] = Path("trace.safetensors"),
    layers: Annotated[str | None, typer.Option(help="Layers to record, such as 0,5,17; default all.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Use only the first TOKENS tokens of each text.")] = None,
    queries: Annotated[
        int | None, typer.Option(help="Record the queries of the last QUERIES tokens alone; default of all.")
    ] = None,
    ahead: Annotated[
        bool,
        typer.Option(
            "--ahead", help="Record too the queries that layers make of the input of the layer before, for infinigen."
        ),
    ] = False,
    with_text: Annotated[
        bool,
        typer.Option(
            "--with-text", help="Keep the text in the trace, a piece a token, for `sparseattn report --trace`."
        ),
    ] = False,
    chunk: Annotated[int, typer.Option(help="Tokens run through the model at a time.")] = 1024,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16: the model's and the trace's; default the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
) -> None:
    """Run a causal language model over texts with its own attention and write queries, keys and values.

    Of several texts each has a trace of its name; traces that are there already, from the same command, are kept.
    """
    from sparseattn.models import capture as recording
    from sparseattn.models.errors import ModelError
    from sparseattn.models.load import encode, pieces

    indices = integers(layers, "--layers")
    kind = None if dtype is None else stored_dtype(dtype, "--dtype")
    place = usable_device(device)
    for name, number in (("--tokens", tokens), ("--queries", queries), ("--chunk", chunk)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is at least 1, got {number}")
    sources = [named_text(one) for one in text]
    several = len(sources) > 1 or (isinstance(sources[0], Path) and sources[0].is_dir())
    traces = _traces(sources, out) if several else _trace(sources[0], out)
    contents = {source: _content(source) for source in traces.values()}
    if several:
        results_folder(out)
    loaded, tokenizer = open_model(model, kind, place)
    ids, words = {}, {}
    for source, content in contents.items():  # all of them before the first takes its time
        try:
            ids[source] = encode(tokenizer, content)[:, :tokens]
            words[source] = pieces(tokenizer, content)[:tokens] if with_text else None
        except ModelError as error:
            raise ValueError(f"{source}: {error}") from error
    console = Screen()
    for target, source in traces.items():
        with progress_bar() as bar:
            task = bar.add_task(f"capture {target.name}", total=ids[source].shape[1])

            def show(done: int, total: int, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, completed=done, total=total)

            trace = recording.capture(
                loaded,
                ids[source].to(loaded.device),
                target,
                layers=indices,
                queries=queries,
                ahead=ahead,
                chunk=chunk,
                model_id=model,
                text={"name": getattr(source, "name", source), "sha256": hashlib.sha256(contents[source]).hexdigest()},
                pieces=words[source],
                keep=several,
                progress=show,
            )
        size = target.stat().st_size / 2**20
        console.print(
            f"{target}: {trace.tokens} tokens, layers {', '.join(map(str, trace.layers))}, {size:.1f} MiB",
            soft_wrap=True,
        )


def _content(source: str | Path) -> bytes:
    """The bytes of a text; a file's need not be UTF-8, as a model of bytes takes any."""
    return source.read_bytes() if isinstance(source, Path) else open_text(source)[1].encode()


def _trace(text: str | Path, out: Path) -> dict[Path, str | Path]:
    """The trace file `out` -> its text."""
    if out.suffix != ".safetensors" or (out.exists() and not out.is_file()):
        raise ValueError(f"--out is a .safetensors file to write, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out is in a folder that does not exist: {out.parent}")
    return {out: text}


def _traces(texts: list[str | Path], out: Path) -> dict[Path, str | Path]:
    """Trace files in the folder `out` -> their texts; a folder among `texts` stands for its files, by name."""
    if out.suffix == ".safetensors":
        raise ValueError(f"--out is a folder for the traces of several texts, got {out}")
    traces: dict[Path, str | Path] = {}
    for text in texts:
        files: list[str | Path] = [text]
        if isinstance(text, Path) and text.is_dir():
            files = [*sorted(path for path in text.iterdir() if path.is_file())]
        if not files:
            raise ValueError(f"the folder {text} holds no text file")
        for source in files:
            target = out / f"{source.stem if isinstance(source, Path) else source}.safetensors"
            if target in traces:
                raise ValueError(f"{traces[target]} and {source} would both be {target}: rename one")
            traces[target] = source
    return traces
