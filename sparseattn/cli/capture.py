"""`sparseattn capture`: queries, keys and values of a language model over texts, as trace files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from sparseattn.cli.common import MODEL_HELP, Screen, in_a_sentence, integers, progress_bar, results_folder
from sparseattn.devices import usable_device
from sparseattn.dtypes import stored_dtype


@in_a_sentence
def capture(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    text: Annotated[
        list[Path], typer.Option(help="Text file to run the model on (UTF-8), or a folder of them; may be repeated.")
    ],
    out: Annotated[
        Path, typer.Option(help="Trace to write, a .safetensors file; a folder of traces for several texts.")
    ] = Path("trace.safetensors"),
    layers: Annotated[str | None, typer.Option(help="Layers to record, such as 0,5,17; default all.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Use only the first TOKENS tokens of each text.")] = None,
    queries: Annotated[
        int | None, typer.Option(help="Record the queries of the last QUERIES tokens alone; default of all.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens run through the model at a time.")] = 1024,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16: the model's and the trace's; default the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
) -> None:
    """Run a causal language model over texts with its own attention and write queries, keys and values.

    Of several texts each has a trace of its name; traces that are there already, from the same command, are kept.
    """
    from sparseattn.integrations import capture as recording
    from sparseattn.integrations import models

    indices = integers(layers, "--layers")
    kind = None if dtype is None else stored_dtype(dtype, "--dtype")
    place = usable_device(device)
    for name, number in (("--tokens", tokens), ("--queries", queries), ("--chunk", chunk)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is at least 1, got {number}")
    several = len(text) > 1 or text[0].is_dir()
    traces = _traces(text, out) if several else _trace(text[0], out)
    contents = {path: path.read_bytes() for path in traces.values()}
    if several:
        results_folder(out)
    loaded, tokenizer = models.load_model(model, dtype=kind, device=place)
    ids = {}
    for path, content in contents.items():  # all of them before the first takes its time
        try:
            ids[path] = models.encode(tokenizer, content)[:, :tokens]
        except models.ModelError as error:
            raise ValueError(f"{path}: {error}") from error
    console = Screen()
    for target, path in traces.items():
        with progress_bar() as bar:
            task = bar.add_task(f"capture {target.name}", total=ids[path].shape[1])

            def show(done: int, total: int, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, completed=done, total=total)

            trace = recording.capture(
                loaded,
                ids[path].to(loaded.device),
                target,
                layers=indices,
                queries=queries,
                chunk=chunk,
                model_id=model,
                text={"name": path.name, "sha256": hashlib.sha256(contents[path]).hexdigest()},
                keep=several,
                progress=show,
            )
        size = target.stat().st_size / 2**20
        console.print(
            f"{target}: {trace.tokens} tokens, layers {', '.join(map(str, trace.layers))}, {size:.1f} MiB",
            soft_wrap=True,
        )


def _trace(text: Path, out: Path) -> dict[Path, Path]:
    """The trace file `out` -> its text."""
    if out.suffix != ".safetensors" or (out.exists() and not out.is_file()):
        raise ValueError(f"--out is a .safetensors file to write, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out is in a folder that does not exist: {out.parent}")
    return {out: text}


def _traces(texts: list[Path], out: Path) -> dict[Path, Path]:
    """Trace files in the folder `out` -> their texts; a folder among `texts` stands for its files, by name."""
    if out.suffix == ".safetensors":
        raise ValueError(f"--out is a folder for the traces of several texts, got {out}")
    traces: dict[Path, Path] = {}
    for text in texts:
        files = sorted(path for path in text.iterdir() if path.is_file()) if text.is_dir() else [text]
        if not files:
            raise ValueError(f"the folder {text} holds no text file")
        for path in files:
            target = out / f"{path.stem}.safetensors"
            if target in traces:
                raise ValueError(f"{traces[target]} and {path} would both be {target}: rename one")
            traces[target] = path
    return traces
