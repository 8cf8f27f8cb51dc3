"""How keys and queries fall into buckets: what the paper's Figures 1 and 2 and Table 2 say of its models.

Saap, https://arxiv.org/abs/2502.08246. Letters: H KV heads, G query heads per KV head, n keys, D head size, C buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.traces.trace import Trace
from sparseattn.utils.hashing import stream

REPEATS = 10
SAMPLE = 4096  # keys of a sample, whichever way it is drawn: half of a prompt of 8,192
SAMPLINGS = ("training prompts", "held-out prompts", "one prompt", "narrow positions")


def inputs(artefact: Artefact, trace: Trace, layer: int) -> tuple[Tensor, Tensor]:
    """Keys `[H,T,D]` and queries `[H,G,Q,D]` of a layer as the artefact takes them, float32."""
    one = trace.layer(layer)
    keys, query = one.keys.float(), one.query.float()
    if artefact.roped:
        return keys, query
    assert one.rope is not None
    return one.rope.unrotate(keys, trace.positions), one.rope.unrotate(query, trace.positions[-query.shape[2] :])


def imbalance(member: Tensor, buckets: int) -> float:
    """`C * sum p^2` of buckets `[n]`: by how much a key's own bucket is larger than the mean one."""
    share = torch.bincount(member, minlength=buckets).double() / len(member)
    return float(buckets * share.square().sum())


def deviation(member: Tensor, buckets: int) -> float:
    """Standard deviation of the sizes of buckets over their mean, of buckets `[n]`."""
    sizes = torch.bincount(member, minlength=buckets).double()
    return float(sizes.std(correction=0) / sizes.mean())


def size_deviations(artefact: Artefact, layer: int, train: Sequence[Trace], held: Sequence[Trace]) -> dict[str, float]:
    """Figure 2: deviation of bucket sizes for samples of one size, drawn in four ways; mean over heads and repeats."""
    buckets = artefact.layers[layer].centroids.shape[1]
    assigned = {
        name: torch.stack([artefact.layers[layer].assign(inputs(artefact, one, layer)[0]) for one in traces], 1)
        for name, traces in (("train", train), ("held", held))
    }  # [H,prompts,T]
    found: dict[str, list[float]] = {name: [] for name in SAMPLINGS}
    prompts, tokens = assigned["held"].shape[1:]
    width = SAMPLE // prompts
    for repeat in range(REPEATS):
        draw = stream("saap-study", layer, repeat)
        prompt = int(torch.randint(prompts, (), generator=draw))
        first = int(torch.randint(tokens - width, (), generator=draw))
        pools = (
            assigned["train"].flatten(1),
            assigned["held"].flatten(1),
            assigned["held"][:, prompt],
            assigned["held"][:, :, first : first + width].flatten(1),
        )
        for name, pool in zip(SAMPLINGS, pools, strict=True):
            chosen = pool[:, torch.randperm(pool.shape[1], generator=draw)[:SAMPLE]]
            found[name] += [deviation(head, buckets) for head in chosen]
    return {name: sum(values) / len(values) for name, values in found.items()}


def largest_share(artefact: Artefact, layer: int, traces: Sequence[Trace]) -> dict[str, list[float]]:
    """Figure 1: the share of queries whose first bucket is the one that most of them have, by head `[H]`.

    "nearest": by the nearest centroid; "classifier": by the probabilities summed over the group.
    """
    partition = artefact.layers[layer]
    heads, buckets = partition.centroids.shape[:2]
    first: dict[str, list[Tensor]] = {"nearest": [], "classifier": []}
    for trace in traces:
        query = inputs(artefact, trace, layer)[1]
        first["nearest"].append((query @ partition.centroids[:, None].mT).argmax(-1).flatten(1))
        if partition.classifier is not None:
            many = len(partition.classifier.w1)
            logits = partition.classifier.logits(query.reshape(many, -1, query.shape[-1]))
            first["classifier"].append(logits.view(*query.shape[:3], buckets).softmax(-1).sum(1).argmax(-1))
    found = {}
    for name, parts in first.items():
        if parts:
            every = torch.cat(parts, 1)  # [H,n]
            found[name] = [float(torch.bincount(every[h]).max() / every.shape[1]) for h in range(heads)]
    return found
