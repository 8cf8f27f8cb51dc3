"""Measures on traces how well one layer's choice serves another, as Kascade does. https://arxiv.org/abs/2512.16391"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.cost_model.environment import versions
from sparseattn.selectors.parameters.layer_similarity import Similarity
from sparseattn.traces.trace import Trace
from sparseattn.training.prompts import Prompts, open_all
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.devices import usable_device

SHARE, LEAST = 0.1, 128  # rows of a choice: the paper's share of the context, and its fewest
SINK, WINDOW = 4, 64  # rows that every query reads: nothing is chosen among them


def similarity(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    queries: int = 64,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Similarity:
    """Compare the choices of all layers on some queries of each prompt, and write the similarity `out`.

    At each of these queries a KV head chooses a tenth of the rows before it, 128 at least, by the probabilities of its
    query heads, summed. Of a prompt the query counts at which a choice serves worst, as in the paper; of several
    prompts the mean. Unlike the paper's, the rows are those between a sink of 4 rows and a window of 64, since every
    query reads these anyway, and a query is one token, not a tile of a prompt.

    One layer of one prompt is in memory at a time, with the rows that all layers chose and one layer's probabilities.

    Args:
        traces: trace files and folders of them, of one model; one is enough.
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        queries: how many of each prompt, spread evenly over those in its trace with enough rows before them.
        device: where to compute; a CUDA device if there is one.
        progress: called with the number of layers done, over all prompts, and their total.

    Returns:
        The similarity that was written.

    Raises:
        TrainingError: traces that do not belong together or are too short, layers of different numbers of KV heads, no
            queries, an `out` that is no .safetensors file.
        TraceError: a file that is no trace.
        SimilarityError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    place, out = usable_device(device), _output(Path(out))
    if queries < 1:
        raise TrainingError(f"queries are 1 or more of each prompt, got {queries}")
    prompts = open_all(traces, layers, True)
    query_places = [_asked(prompt.trace, prompts, queries) for prompt in prompts.train]
    heads = {shape.heads for shape in prompts.shapes.values()}
    if len(heads) > 1:
        raise TrainingError(f"layers have {sorted(heads)} KV heads, and heads of one number are compared")
    of_prompts, count = [], len(prompts.shapes)
    for number, (prompt, at) in enumerate(zip(prompts.train, query_places, strict=True)):
        done = functools.partial(_tell, progress, number * count, count * len(prompts.train))
        of_prompts.append(_of_prompt(prompt.trace, tuple(prompts.shapes), at, place, done))
    Similarity(
        tuple(prompts.shapes), torch.stack(of_prompts).mean(0), _origin(prompts, list(map(len, query_places)))
    ).save(out)
    return Similarity.load(out)


def _output(out: Path) -> Path:
    """`out`, if a similarity can be written there; else TrainingError."""
    if out.suffix != ".safetensors" or out.is_dir():
        raise TrainingError(f"a similarity is a .safetensors file, got {out}")
    if not out.parent.is_dir():
        raise TrainingError(f"{out} is in a folder that does not exist: {out.parent}")
    return out


def _origin(prompts: Prompts, queries: Sequence[int]) -> dict[str, Any]:
    """Return what a similarity of these prompts was made from, `queries` of each."""
    shape = next(iter(prompts.shapes.values()))
    return {
        "model": prompts.model,
        "config_hash": prompts.config_hash,
        "heads": shape.heads,
        "group": shape.group,
        "share": SHARE,
        "least": LEAST,
        "sink": SINK,
        "window": WINDOW,
        "queries": list(queries),
        "prompts": [{"name": p.trace.name, "sha256": p.sha256, "tokens": p.tokens} for p in prompts.train],
        "versions": versions(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _tell(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _asked(trace: Trace, prompts: Prompts, queries: int) -> list[int]:
    """Rows of a prompt whose queries are asked: more is before each of them than a choice has."""
    stored = min(trace.shapes[index].queries or trace.tokens for index in prompts.shapes)
    first = max(trace.tokens - stored, SINK + WINDOW + 2 * LEAST)
    if first >= trace.tokens:
        raise TrainingError(
            f"{trace.name} has {trace.tokens} tokens and the queries of its last {stored}: a choice of {LEAST} rows "
            f"wants queries behind row {SINK + WINDOW + 2 * LEAST}"
        )
    count = min(queries, trace.tokens - first)
    return torch.linspace(first, trace.tokens - 1, count).round().long().tolist()


def _of_prompt(
    trace: Trace,
    layers: Sequence[int],
    query_places: Sequence[int],
    place: torch.device,
    progress: Callable[[int], None],
) -> Tensor:
    """`[L,L,H,H]` float32 on the CPU, of one prompt."""
    chosen: list[Tensor] = []  # of each layer so far [H,T,K], its choices
    out = torch.zeros(len(layers), len(layers), trace.shapes[layers[0]].heads, trace.shapes[layers[0]].heads)
    for b, index in enumerate(layers):
        weights = _weights(trace, index, query_places, place)  # [H,T,N]
        rows = weights.topk(max(LEAST, int(SHARE * trace.tokens)), -1).indices.int()
        counted = torch.arange(rows.shape[2], device=place) < _rows(query_places, place)[:, None]
        own = (weights.gather(2, rows.long()) * counted).sum(-1)  # [H,T]
        chosen.append(rows)
        for a, others in enumerate(chosen):
            for j, list_of_head in enumerate(others):  # [T,K]
                each = list_of_head.long().expand(len(weights), -1, -1)
                got = (weights.gather(2, each) * counted).sum(-1)
                out[a, b, :, j] = (got / own.clamp(min=1e-30)).clamp(max=1).amin(1).cpu()
        progress(b + 1)
    return out


def _rows(query_places: Sequence[int], place: torch.device) -> Tensor:
    """`[T]`: how many rows a query that is row t chooses."""
    return (torch.tensor(query_places, device=place) * SHARE).long().clamp(min=LEAST)


def _weights(trace: Trace, index: int, query_places: Sequence[int], place: torch.device) -> Tensor:
    """`[H,T,N]` float32: the probabilities of the rows among which each of the queries chooses, summed over a group's
    query heads; 0 for the others."""
    trace.verify(index, ["query", "keys"])
    layer = trace.layer(index)
    at = torch.tensor(query_places)
    query = layer.query[:, :, at - (trace.tokens - layer.query.shape[2])].to(place).float()  # [H,G,T,D]
    logits = query @ layer.keys.to(place).float()[:, None].mT * layer.scale  # [H,G,T,N]
    row = torch.arange(trace.tokens, device=place)
    far = at.to(place)[:, None] - row  # [T,N]
    weights = logits.masked_fill(far < 0, -torch.inf).softmax(-1).sum(1)
    return weights.masked_fill((far < WINDOW) | (row < SINK), 0.0)
