"""Measures on traces how much each KV head's output changes if it streams, for DuoAttention's roles.

https://arxiv.org/abs/2410.10819
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.cost_model.environment import versions
from sparseattn.selectors.parameters.head_profile import HeadProfile
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.training.prompts import open_all
from sparseattn.training.recipe import TrainingError


def head_errors(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    queries: int = 64,
    sink: int = 4,
    window: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HeadProfile:
    """Compare each head's output with all rows and with sink and newest rows alone, and write the profile `out`.

    The paper's retrieval heads are those whose output such a limit changes. It finds them by gates that it trains with
    the model on passkeys hidden in a long text; here the change is measured on your traces, which best have
    something to be found, and each head is looked at alone.

    Args:
        traces: trace files and folders of them, of one model.
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        queries: how many of each prompt, spread evenly over those in its trace that see more than sink and window.
        sink, window: rows that a streaming head reads, the query's own among the window; 64 and 256 in the paper.
        progress: called with the number of layers done, over all prompts, and their total.

    Returns:
        The profile that was written, mean over prompts.

    Raises:
        TrainingError: traces that do not belong together or are too short, no queries, an `out` that is no .safetensors
            file.
        TraceError: a file that is no trace.
        ProfileError: a file that cannot be written.
    """
    out = Path(out)
    if out.suffix != ".safetensors" or out.is_dir() or not out.parent.is_dir():
        raise TrainingError(f"a profile of heads is a .safetensors file in an existing folder, got {out}")
    if queries < 1 or sink < 0 or window < 1:
        raise TrainingError(f"queries and window are 1 or more, sink 0 or more, got {queries}, {window} and {sink}")
    prompts = open_all(traces, layers, True)
    total = len(prompts.shapes) * len(prompts.train)
    sums: dict[int, list[Tensor]] = {index: [] for index in prompts.shapes}
    for number, prompt in enumerate(prompts.train):
        for place, index in enumerate(prompts.shapes):
            sums[index].append(_of_layer(prompt.trace, index, queries, sink, window))
            progress(number * len(prompts.shapes) + place + 1, total)
    meta = {
        "model": prompts.model,
        "config_hash": prompts.config_hash,
        "sink": sink,
        "window": window,
        "queries": queries,
        "prompts": [{"name": p.trace.name, "sha256": p.sha256, "tokens": p.tokens} for p in prompts.train],
        "versions": versions(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    profile = HeadProfile({index: torch.stack(each).mean(0) for index, each in sums.items()}, meta)
    profile.save(out)
    return profile


def _of_layer(trace: Trace, index: int, queries: int, sink: int, window: int) -> Tensor:
    """`[H]` float32, the errors of a layer's KV heads on one prompt."""
    trace.verify(index, ["query", "keys", "values"])
    layer = trace.layer(index)
    many = layer.query.shape[2]
    first = max(trace.tokens - many, sink + window)
    if first >= trace.tokens:
        raise TrainingError(
            f"{trace.name} has {trace.tokens} tokens and the queries of its last {many}: none of them sees more than a "
            f"sink of {sink} rows and a window of {window}"
        )
    at = torch.linspace(first, trace.tokens - 1, min(queries, trace.tokens - first)).round().long()
    changed, whole = [], 0.0
    for head in range(layer.keys.shape[0]):
        full, streaming = _outputs(layer, head, at, trace.tokens, sink, window)
        changed.append((full - streaming).square().mean())
        whole += float(full.square().mean()) / layer.keys.shape[0]
    return (torch.stack(changed) / max(whole, 1e-30)).float()


def _outputs(layer: TraceLayer, head: int, at: Tensor, tokens: int, sink: int, window: int) -> tuple[Tensor, Tensor]:
    """`[G,T,D]` each: what the query heads of a KV head make of all rows, and of sink and window."""
    queries = layer.query.shape[2]
    keys, values = layer.keys[head].float(), layer.values[head].float()
    logits = layer.query[head][:, at - (tokens - queries)].float() @ keys.T * layer.scale  # [G,T,N]
    row = torch.arange(tokens)
    behind = at[:, None] - row  # [T,N]
    logits = logits.masked_fill(behind < 0, -torch.inf)
    window_logits = logits.masked_fill((behind >= window) & (row >= sink), -torch.inf)
    return logits.softmax(-1) @ values, window_logits.softmax(-1) @ values
