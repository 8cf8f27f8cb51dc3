"""Prompts to train on: traces of one model, one layer of one prompt in memory at a time.

Saap, https://arxiv.org/abs/2502.08246, section 4.2. Letters: H KV heads, G query heads per KV head, T tokens, D head
size, C buckets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.hashes import stream
from sparseattn.rope import Rope
from sparseattn.traces import LayerShape, Trace, TraceLayer

BLOCK = 2**20  # scores held at once on a CPU, 4 MiB in float32
LEAST = 16  # tokens of a prompt that have a far key, and queries of a prompt that are trained on at least
CANDIDATES = 4  # queries looked at for one that passes, before those that come nearest are taken


class TrainingError(ValueError):
    """Traces or options that cannot be trained with, in one sentence."""


@dataclass(frozen=True)
class Filters:
    """Which pairs and queries training looks at: the long-range filters of the paper.

    Args:
        gap: a key counts for a query if its position is more than `gap` before the query's.
        near: queries whose best key, of all before them but the sink, is less than `near` away are left out; 0: none.
        sink: first rows of a prompt that count for no query.
        two_sided: keys more than `gap` behind the query count as well, as the paper's unmasked batches may have it.

    Raises:
        TrainingError: numbers that no filter has.
    """

    gap: int = 2047
    near: int = 1024
    sink: int = 1
    two_sided: bool = False

    def __post_init__(self) -> None:
        if self.gap < 0 or self.near < 0 or self.sink < 0:
            raise TrainingError(f"gap, near and sink are 0 or more, got {self.gap}, {self.near} and {self.sink}")

    def far(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[n,T]` bool, which keys count for which queries, by positions `[n]` and `[T]` (of the whole prompt)."""
        distance = queries[:, None] - keys
        far = distance.abs() > self.gap if self.two_sided else distance > self.gap
        far[:, : self.sink] = False
        return far

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[n,T]` bool, the keys that a query's best one is sought among: not after it, and no sink."""
        seen = keys <= queries[:, None]
        seen[:, : self.sink] = False
        return seen


@dataclass(frozen=True)
class Prompt:
    """One trace and the SHA-256 of what was read."""

    trace: Trace
    path: str
    sha256: str

    @property
    def tokens(self) -> int:
        return self.trace.tokens


@dataclass(frozen=True)
class Prompts:
    """Traces of one model: those to train on, those held out, and what they share.

    Attributes:
        model, config_hash: of the first trace; the config hash of all.
        shapes: layer -> its shape (without `queries`), ascending.
        ropes: layer -> its RoPE.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    model: str
    config_hash: str | None
    shapes: dict[int, LayerShape]
    ropes: dict[int, Rope]

    @property
    def shortest(self) -> int:
        return min(prompt.tokens for prompt in (*self.train, *self.held_out))


def trace_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The trace files that `paths` name; a folder stands for its `*.safetensors`, by name. Raises TrainingError."""
    found: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise TrainingError(f"the folder {path} holds no *.safetensors trace (`sparseattn capture` makes one)")
        found += files
    return found


def open_prompts(
    paths: Sequence[str | os.PathLike[str]],
    filters: Filters,
    *,
    held_out: Sequence[str | os.PathLike[str]] = (),
    layers: Sequence[int] | None = None,
    roped: bool = False,
    seed: int = 0,
) -> Prompts:
    """Opens traces, checks that they belong together, and holds out 1 prompt in 5 (at least one) unless told which.

    Headers are read, and no layer.

    Args:
        paths: trace files and folders of them, to train on (and to hold some out of).
        filters: every prompt must be long enough for them.
        held_out: trace files and folders to validate on instead.
        layers: all with full attention by default.
        roped: whether a layer may do without a known RoPE.
        seed: chooses the prompts that are held out, by their contents, whatever their order.

    Raises:
        TrainingError: a single prompt, one given twice, prompts of different models or shapes, too short ones, layers
            that are not there or whose RoPE is not known.
        TraceError: a file that is no trace.
    """
    given = [_prompt(path) for path in trace_files(paths)]
    apart = [_prompt(path) for path in trace_files(held_out)]
    if len(given) + len(apart) < 2 or not given:
        raise TrainingError(
            f"training takes at least 2 prompts, one of which is held out for validation, got {len(given) + len(apart)}"
        )
    every = sorted((*given, *apart), key=lambda prompt: (prompt.sha256, prompt.path))
    for one, other in itertools.pairwise(every):
        if one.sha256 == other.sha256:
            raise TrainingError(f"{one.path} and {other.path} are of the same prompt; give each prompt once")
    _warn_of_bare([*given, *apart])
    first = given[0].trace
    shapes = _chosen(given[0], layers)
    for prompt in (*given, *apart):
        _check_alike(given[0], prompt, shapes)
        _check_length(prompt, filters, shapes)
    ropes = _ropes(given[0], shapes, roped)
    for prompt in (*given, *apart):
        _check_ropes(given[0], prompt, shapes)
    if not apart:
        order = sorted(given, key=lambda prompt: hashlib.sha256(f"{seed} {prompt.sha256}".encode()).digest())
        apart = order[: max(1, len(given) // 5)]
        given = [prompt for prompt in given if prompt not in apart]
    model, config_hash = str(first.meta.get("model", "unknown")), first.meta.get("config_hash")
    return Prompts(tuple(given), tuple(apart), model, config_hash, shapes, ropes)


def _warn_of_bare(prompts: Sequence[Prompt]) -> None:
    bare = [prompt.path for prompt in prompts if prompt.trace.hashes is None]
    if bare:
        warnings.warn(
            f"{len(bare)} of {len(prompts)} traces carry no hash of their tensors, so that damage goes unnoticed "
            f"(an earlier release wrote {bare[0]})",
            stacklevel=3,
        )


def _prompt(path: Path) -> Prompt:
    trace = Trace.open(path)
    known = trace.meta.get("tokens_sha256")
    if known is None:  # no captured one: what it was made from, which a recipe or a text says
        meta = {name: value for name, value in trace.meta.items() if name != "created"}
        known = hashlib.sha256(json.dumps([meta, trace.positions.tolist()], sort_keys=True).encode()).hexdigest()
    if (trace.positions.diff() <= 0).any():
        raise TrainingError(f"the positions of {path} do not ascend, so that distances say nothing about order")
    return Prompt(trace, str(path), str(known))


def _chosen(prompt: Prompt, layers: Sequence[int] | None) -> dict[int, LayerShape]:
    trace = prompt.trace
    if layers is not None and (not layers or len(set(layers)) < len(layers)):
        raise TrainingError(f"layers are one or more different indices, got {list(layers)}")
    for index in layers or ():
        if index not in trace.layers:
            raise TrainingError(f"{prompt.path} holds layers {', '.join(map(str, trace.layers))}, not {index}")
        if trace.shapes[index].window is not None:
            raise TrainingError(
                f"layer {index} of {prompt.path} attends to a sliding window of {trace.shapes[index].window} rows, "
                "nothing far is to be found there: leave it out"
            )
    chosen = {i: shape for i, shape in trace.shapes.items() if shape.window is None and (layers is None or i in layers)}
    if not chosen:
        raise TrainingError(f"{prompt.path} has no layer that attends to the whole context")
    return chosen


def _check_alike(first: Prompt, prompt: Prompt, shapes: dict[int, LayerShape]) -> None:
    ours, theirs = first.trace.meta, prompt.trace.meta
    for name in ("config_hash", "model"):
        if name == "model" and None not in (ours.get("config_hash"), theirs.get("config_hash")):
            continue  # one model may go by several names
        if ours.get(name) != theirs.get(name):
            raise TrainingError(
                f"{first.path} and {prompt.path} are of different models: {name} {ours.get(name)} and "
                f"{theirs.get(name)}"
            )
    for index, shape in shapes.items():
        other = prompt.trace.shapes.get(index)
        if other is None:
            held = ", ".join(map(str, prompt.trace.layers))
            raise TrainingError(f"{first.path} has layer {index}, {prompt.path} holds layers {held}")
        a, b = ((s.heads, s.group, s.size, s.scale, s.window) for s in (shape, other))
        if a != b:
            raise TrainingError(
                f"layer {index} has heads, group, size, scale and window {a} in {first.path}, {b} in {prompt.path}"
            )
    groups = {shape.group for shape in shapes.values()}
    if len(groups) > 1:
        raise TrainingError(f"{first.path} has layers of {' and '.join(map(str, sorted(groups)))} query heads per head")


def _check_length(prompt: Prompt, filters: Filters, shapes: dict[int, LayerShape]) -> None:
    for shape in shapes.values():
        positions = prompt.trace.positions
        queries = positions[-(prompt.trace.shapes[shape.index].queries or len(positions)) :]
        first = positions[filters.sink] if filters.sink < len(positions) else positions[-1]
        reach = max(filters.gap + 1, filters.near)
        usable = int((queries - first >= reach).sum())
        if usable < LEAST:
            raise TrainingError(
                f"{prompt.path} is too short: of its {prompt.tokens} tokens {usable} have a key {reach} or more before "
                f"them, the first {filters.sink} aside, and at least {LEAST} are needed; give longer prompts or a "
                f"smaller gap, near or sink"
            )


def _ropes(first: Prompt, shapes: dict[int, LayerShape], roped: bool) -> dict[int, Rope]:
    ropes = {}
    for index in shapes:
        rope = first.trace.ropes[index]
        if rope is not None:
            ropes[index] = rope
        elif not roped:
            why = first.trace.meta.get("rope_absent", {}).get(str(index), "the trace has none for it")
            raise TrainingError(
                f"the RoPE of layer {index} of {first.path} cannot be taken back ({why}): leave the layer out, or "
                "train on roped vectors"
            )
    return ropes


@dataclass(frozen=True, eq=False)
class HeadView:
    """One KV head of one layer of one prompt.

    Attributes:
        keys: `[T,D]` float32 after RoPE.
        inputs: `[T,D]` the keys that buckets are of: de-roped, or `keys`.
        query: `[G,Q,D]` of the last Q tokens after RoPE, in the trace's dtype, on the CPU.
        positions: `[T]`.
        scale: logits are `scale * q.k`.
        rope: that takes inputs back, or None where they stay roped.
    """

    keys: Tensor
    inputs: Tensor
    query: Tensor
    positions: Tensor
    scale: float
    rope: Rope | None

    @property
    def query_positions(self) -> Tensor:
        """`[Q]`."""
        return self.positions[-self.query.shape[1] :]

    def queries(self, member: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """`[n,D]` twice, the queries of members and rows `[n]` (on the CPU) after RoPE, and as classifier inputs."""
        device = self.keys.device
        roped = self.query[member, row].to(device).float()
        if self.rope is None:
            return roped, roped
        return roped, self.rope.unrotate(roped, self.query_positions[row.to(device)])


def load(
    prompts: Prompts, prompt: Prompt, index: int, heads: Sequence[int], roped: bool, device: torch.device
) -> Iterator[tuple[int, HeadView]]:
    """Loads one layer of one prompt, gives its heads one by one and lets go of it.

    Raises:
        TrainingError: numbers that are not finite.
        TraceError: numbers that are not those that were written.
    """
    prompt.trace.verify(index, ("query", "keys"))
    layer = prompt.trace.layer(index)
    _check_layer(prompt, layer)
    rope = None if roped else prompts.ropes[index]
    positions = prompt.trace.positions.to(device)
    for head in heads:
        keys = layer.keys[head].to(device).float()
        inputs = keys if rope is None else rope.unrotate(keys, positions)
        yield head, HeadView(keys, inputs, layer.query[head], positions, layer.scale, rope)


def _check_ropes(first: Prompt, prompt: Prompt, shapes: dict[int, LayerShape]) -> None:
    for index in shapes:
        ours, theirs = first.trace.ropes[index], prompt.trace.ropes[index]
        if ours is None or theirs is None:
            same = ours is theirs
        else:
            same = ours.equals(theirs)
        if not same:
            raise TrainingError(f"layer {index} of {prompt.path} has another RoPE than {first.path}")


def _check_layer(prompt: Prompt, layer: TraceLayer) -> None:
    for name, tensor in (("query", layer.query), ("keys", layer.keys)):
        if not all(head.isfinite().all() for head in tensor):  # one at a time: it takes 3 times a head's memory
            raise TrainingError(f"layer {layer.index} of {prompt.path} has {name} that are not finite")


def sample_keys(view: HeadView, sink: int, limit: int, generator: torch.Generator) -> Tensor:
    """`[n,D]` up to `limit` of the head's keys (as inputs) beyond the sink, uniformly without replacement."""
    rows = torch.randperm(len(view.inputs) - sink, generator=generator)[:limit] + sink
    return view.inputs[rows.sort().values.to(view.inputs.device)]


@dataclass(frozen=True, eq=False)
class Examples:
    """Queries of one prompt for one classifier, and where their attention lies.

    Attributes:
        queries: `[n,D]` float32 inputs.
        target: `[n,C]` float32, A H_k: the share of each query's attention to the sampled far keys in each bucket.
        passed: how many of those looked at passed both filters.
        seen: how many were looked at.
    """

    queries: Tensor
    target: Tensor
    passed: int
    seen: int


def examples(
    view: HeadView,
    members: Sequence[int],
    assigned: Tensor,
    buckets: int,
    filters: Filters,
    limit: int,
    generator: torch.Generator,
    keys: int | None = None,
) -> Examples:
    """Up to `limit` queries of the head's `members`, uniform over those that the filters let through, with targets.

    The paper draws new keys for each batch. Here a query's target is computed once, over all of its prompt's far keys
    or `keys` sampled ones: finding the best key takes these scores anyway, and there is no sampling noise. Where fewer
    than `LEAST` of the candidates pass (heads that look nearby), those whose best far key comes closest to their
    best near one are taken.

    Args:
        assigned: `[T]` the bucket of each key.
        buckets: C.
        generator: decides all draws.
    """
    positions, at, device = view.positions, view.query_positions, view.keys.device
    reach = at - positions[filters.sink] > filters.gap
    if filters.two_sided:
        reach |= positions[-1] - at > filters.gap
    usable = reach.nonzero().flatten().cpu()
    order = torch.randperm(len(usable) * len(members), generator=generator)[: CANDIDATES * limit]
    sampled = None
    if keys is not None and keys < len(positions) - filters.sink:
        chosen = torch.randperm(len(positions) - filters.sink, generator=generator)[:keys] + filters.sink
        sampled = torch.zeros(len(positions), dtype=torch.bool, device=device)
        sampled[chosen.to(device)] = True
    member_of = torch.tensor(members)

    def look(some: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = usable[some % len(usable)]
        roped, inputs = view.queries(member_of[some // len(usable)], rows)
        scores = (roped * view.scale) @ view.keys.T  # [n,T]
        row_at = at[rows.to(device)]
        far = filters.far(row_at, positions)
        return inputs, scores, row_at, far if sampled is None else far & sampled

    def targets(scores: Tensor, far: Tensor) -> Tensor:
        weights = scores.masked_fill(~far, -torch.inf).softmax(-1)
        return by_bucket(weights, assigned, buckets)

    parts = []
    passed = seen = 0
    for some in order.split(_at_once(device, len(positions))):
        inputs, scores, row_at, far = look(some)
        best = scores.masked_fill(~filters.seen(row_at, positions), -torch.inf).argmax(-1)
        keep = (row_at - positions[best] >= filters.near) & far.any(-1)
        parts.append((inputs[keep], targets(scores[keep], far[keep])))
        passed += int(keep.sum())
        seen += len(some)
        if passed >= limit:
            break
    if passed < min(LEAST, limit):
        some = order[:1024]
        margins = []
        for block in some.split(_at_once(device, len(positions))):
            _, scores, row_at, far = look(block)
            margin = _margin(scores, row_at, positions, filters)
            margins.append(margin.masked_fill(~far.any(-1), -torch.inf))
        margin = torch.cat(margins)
        nearest = margin.sort(descending=True, stable=True).indices[: min(LEAST, limit)]
        some = some[nearest[margin[nearest] > -torch.inf].cpu()]
        parts = []
        for block in some.split(_at_once(device, len(positions))):
            inputs, scores, _, far = look(block)
            parts.append((inputs, targets(scores, far)))
    if not parts:
        empty = view.keys.new_zeros
        return Examples(empty(0, view.keys.shape[1]), empty(0, buckets), passed, seen)
    queries, target = (torch.cat(column)[:limit] for column in zip(*parts, strict=True))
    return Examples(queries, target, passed, seen)


def _at_once(device: torch.device, tokens: int) -> int:
    """Queries whose scores are computed at once: on a CPU as many as the caches hold, three times the speed at 8k.

    But at least 32, for the sake of the product: 1.2 ms a query at 100k tokens and D = 128, against 2.3 ms with 10.
    """
    return max(32, (BLOCK if device.type == "cpu" else 64 * BLOCK) // tokens)


def _margin(scores: Tensor, at: Tensor, positions: Tensor, filters: Filters) -> Tensor:
    """`[n]` by how much the best key at `near` or further beats the best nearer one; -inf without a further one."""
    seen = filters.seen(at, positions)
    nearer = at[:, None] - positions < filters.near
    best_far = scores.masked_fill(~seen | nearer, -torch.inf).amax(-1)
    best_near = scores.masked_fill(~seen | ~nearer, -torch.inf).amax(-1)
    return torch.where(best_far == -torch.inf, -torch.inf, best_far - best_near)


@dataclass(frozen=True, eq=False)
class Held:
    """What decoding some held-out tokens of one prompt would look for, for one KV head.

    Attributes:
        queries: `[G,V,D]` float32 inputs.
        mass: `[G,V,C]` shares of the attention to far rows, by bucket.
        sizes: `[V,C]` far rows by bucket.
        rows: `[V,S]` rows that a budget of each share of the context is.
        far: `[G,V]` share of all attention that far rows have.
        exact: `[G,V,S]` share of the attention to far rows that the heaviest of them have, as many as the budget.
    """

    queries: Tensor
    mass: Tensor
    sizes: Tensor
    rows: Tensor
    far: Tensor
    exact: Tensor


def held_tokens(prompt: Prompt, queries: int, filters: Filters, limit: int, generator: torch.Generator) -> Tensor:
    """Up to `limit` rows of the prompt's `queries` last tokens, of the later half of those that have far keys."""
    at = prompt.trace.positions[-queries:]
    usable = (at - prompt.trace.positions[filters.sink] > filters.gap).nonzero().flatten()
    usable = usable[len(usable) // 2 :]
    return usable[torch.randperm(len(usable), generator=generator)[:limit]].sort().values


def held(
    view: HeadView, rows: Tensor, assigned: Tensor, buckets: int, filters: Filters, shares: Sequence[float]
) -> Held:
    """Measures held-out tokens; pairs are those of decoding, far keys before the query alone.

    Args:
        rows: `[V]` of the view's query.
        shares: budgets as shares of the context.
    """
    device = view.keys.device
    group = view.query.shape[0]
    signed = Filters(filters.gap, filters.near, filters.sink)
    positions, all_at = view.positions, view.query_positions
    parts = []
    for some in rows.split(max(1, _at_once(device, len(positions)) // group)):
        at = all_at[some.to(device)]
        member = torch.arange(group).repeat_interleave(len(some))
        roped, inputs = view.queries(member, some.repeat(group))
        far = signed.far(at, positions)  # [v,T]
        scores = ((roped * view.scale) @ view.keys.T).unflatten(0, (group, -1))  # [G,v,T]
        weights = scores.masked_fill(positions > at[:, None], -torch.inf).softmax(-1)
        share = (weights * far).sum(-1)  # [G,v]
        # Of far rows alone, so that shares are exact where far rows have next to nothing.
        weights = scores.masked_fill(~far, -torch.inf).softmax(-1)
        mass = by_bucket(weights, assigned, buckets)
        sizes = by_bucket(far.float(), assigned, buckets)
        context = (positions <= at[:, None]).sum(-1)
        budget = torch.stack([(context * s).floor().clamp(min=1) for s in shares], -1)  # [v,S]
        top = weights.topk(min(int(budget.max()), len(positions)), dim=-1).values.cumsum(-1)
        exact = top.gather(-1, (budget.long() - 1).clamp(max=top.shape[-1] - 1).expand(group, -1, -1))
        parts.append((inputs.unflatten(0, (group, -1)), mass, sizes, budget, share, exact))
    columns = list(zip(*parts, strict=True))
    dims = (1, 1, 0, 0, 1, 1)
    return Held(*(torch.cat(column, dim) for column, dim in zip(columns, dims, strict=True)))


def quota(total: int, prompts: int) -> int:
    """What each of `prompts` may contribute to a bounded sample of `total`."""
    return math.ceil(total / prompts)


def assign(inputs: Tensor, centroids: Tensor) -> Tensor:
    """`[T]` int64, the bucket of each key of `[T,D]`, in blocks."""
    blocks = inputs.split(_at_once(inputs.device, len(centroids)))
    return torch.cat([(block @ centroids.T).argmax(-1) for block in blocks])


def by_bucket(weights: Tensor, assigned: Tensor, buckets: int) -> Tensor:
    """`[..,C]` sums of `[..,T]` over the keys of each bucket."""
    if weights.device.type == "cpu":  # eight times as fast as the product
        return weights.new_zeros(*weights.shape[:-1], buckets).index_add_(-1, assigned, weights)
    return weights @ F.one_hot(assigned, buckets).float()  # GPUs add in any order, so that a resumed run would differ


def bucket_stream(*place: int | str) -> torch.Generator:
    """A random stream of training, keyed by where it is used (see `sparseattn.hashes.stream`)."""
    return stream("saap", *place)


def unit(vectors: Tensor) -> Tensor:
    """`[..,D]` of length one."""
    return F.normalize(vectors, dim=-1)
