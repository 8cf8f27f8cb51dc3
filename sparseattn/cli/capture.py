"""`sparseattn capture`: queries, keys and values of a language model over a text, as a trace file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sparseattn.cli.common import in_a_sentence, integers, progress_bar

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@in_a_sentence
def capture(
    model: Annotated[str, typer.Option(help="Folder or hub id of a transformers causal language model.")],
    text: Annotated[Path, typer.Option(help="Text file to run the model on (UTF-8).")],
    out: Annotated[Path, typer.Option(help="Trace to write, a .safetensors file.")] = Path("trace.safetensors"),
    layers: Annotated[str | None, typer.Option(help="Layers to record, such as 0,5,17; default all.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Use only the first TOKENS tokens of the text.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens run through the model at a time.")] = 1024,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16: the model's and the trace's; default the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
) -> None:
    """Run a causal language model over a text with its own attention and write queries, keys and values."""
    from sparseattn.integrations import capture as recording
    from sparseattn.integrations import models

    indices = integers(layers, "--layers")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is one of {', '.join(DTYPES)}, got {dtype!r}")
    for name, number in (("--tokens", tokens), ("--chunk", chunk)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is at least 1, got {number}")
    content = text.read_bytes()
    if out.suffix != ".safetensors" or (out.exists() and not out.is_file()):
        raise ValueError(f"--out is a .safetensors file to write, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out is in a folder that does not exist: {out.parent}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded, tokenizer = models.load_model(model, dtype=DTYPES[dtype] if dtype else None, device=device)
    ids = models.encode(tokenizer, content)[:, :tokens]
    with progress_bar() as bar:
        task = bar.add_task(f"capture {out.name}", total=ids.shape[1])
        trace = recording.capture(
            loaded,
            ids.to(loaded.device),
            out,
            layers=indices,
            chunk=chunk,
            model_id=model,
            text={"name": text.name, "sha256": hashlib.sha256(content).hexdigest()},
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    size = out.stat().st_size / 2**20
    Console(highlight=False).print(
        f"{out}: {trace.tokens} tokens, layers {', '.join(map(str, trace.layers))}, {size:.1f} MiB", soft_wrap=True
    )
