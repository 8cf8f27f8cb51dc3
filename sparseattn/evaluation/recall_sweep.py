"""Builds an index once and turns its knob: every turn is a point of recall against keys scanned (`recall_curve.py`).

Keys lie in a `KVCache` without sink and window, and never change while queries ask; recall is counted against the exact
top k by inner product, in float32. "Queries to keys" asks with the queries that attention asks with; the control, "keys
to keys", with keys held out, which every index finds easily.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseattn.cache import input_checks, selection_checks
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import budget_rows
from sparseattn.core.context import LayerContext, StepContext
from sparseattn.core.rope import Rope
from sparseattn.evaluation.recall_curve import MEASURES, Curve, Point
from sparseattn.selectors.abilities import Evicts, LooksAhead, Observes, ReadsKeys
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import as_selector
from sparseattn.traces.trace import TraceLayer

ENOUGH = 0.995  # recall at which a sweep ends
FAR = 0.6  # share of the keys scanned at which it ends
SLOW = (0.2, 4, 0.05)  # from this share on, so many turns (about four times the work) that gain less recall than this
PROBE = 4  # queries that tell whether another value of the knob changes anything
BLOCK = 2**24  # scores held at once while the exact top k is found, 64 MiB

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Problem:
    """Keys of one layer and the queries that look for them.

    Args:
        keys: `[H,N,D]`, to index.
        queries: `[H,G,Q,D]`, to ask with.
        training: `[H,G,N,D]`, a query for each key, for selectors that learn from queries; None: there are none.
        positions: `[N+Q]` int64, of the keys, then of the queries; default counting from 0.
        layer, rope: for `Selector.for_layer`.

    Raises:
        ValueError: shapes that do not fit together, or numbers that are not finite.
    """

    keys: Tensor
    queries: Tensor
    training: Tensor | None = None
    positions: Tensor | None = None
    layer: int = 0
    rope: Rope | None = None

    def __post_init__(self) -> None:
        k, q, t, p = self.keys, self.queries, self.training, self.positions
        if k.ndim != 3 or q.ndim != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[2]) or not q.shape[2]:
            raise ValueError(f"a problem's keys are [H,N,D] and its queries [H,G,Q,D], got {[*k.shape]}, {[*q.shape]}")
        wanted = [*q.shape[:2], *k.shape[1:]]
        if t is not None and [*t.shape] != wanted:
            raise ValueError(f"training queries are one for each key, [H,G,N,D] = {wanted}, got {[*t.shape]}")
        if p is not None and [*p.shape] != [k.shape[1] + q.shape[2]]:
            raise ValueError(f"positions are [N+Q] = [{k.shape[1] + q.shape[2]}], got {[*p.shape]}")
        input_checks.check_finite(queries=q)

    @classmethod
    def of(cls, layer: TraceLayer, positions: Tensor, last: int, sink: int = 0, held_out: bool = False) -> Problem:
        """Let the last tokens of a trace look for the keys of those before them, in float32.

        Args:
            layer: of the trace.
            positions: `[T]` of the trace.
            last: Q, tokens whose queries ask.
            sink: first tokens to leave out.
            held_out: the control: the last tokens' keys ask, and the indexed keys train.
        """
        tokens = len(positions)
        known, new = slice(sink, tokens - last), slice(tokens - last, tokens)
        keys, training = layer.keys[:, known].float(), None
        if held_out:
            return cls(keys, layer.keys[:, None, new].float(), keys[:, None], positions[sink:], layer.index, layer.rope)
        first = sink - tokens + layer.query.shape[2]  # a trace may hold the queries of its last tokens only
        if first >= 0:
            training = layer.query[:, :, first:-last].float()
        return cls(keys, layer.query[:, :, -last:].float(), training, positions[sink:], layer.index, layer.rope)


def ladder(limit: int, ratio: float = 1.4) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 11, ...: whole numbers that grow by `ratio`, up to `limit`."""
    value = 1
    while value <= limit:
        yield value
        value = max(value + 1, round(value * ratio))


def curve(
    selector: Selector | str,
    keys: Tensor,
    queries: Tensor,
    training: Tensor | None = None,
    *,
    k: int = 100,
    values: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Curve:
    """Recall@k against keys scanned for one index over one layer's keys; see `recall_curve`.

    Args:
        selector: an instance, or a text for `make_selector`.
        keys: `[H,N,D]`, to index; on the CPU.
        queries: `[H,G,Q,D]`, to ask with.
        training: `[H,G,N,D]`, one for each key, for selectors that learn from queries.
    """
    problem = Problem(keys, queries, training)
    return curves(selector, {"": [problem]}, k=k, values=values, progress=progress)[""]


def curves(
    selector: Selector | str,
    tasks: Mapping[str, Sequence[Problem]],
    *,
    k: int = 100,
    values: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> dict[str, Curve]:
    """Return a curve for each task, over several layers at once.

    Every task has the same layers over the same keys: a selector that learns from no queries is built once for all of
    them, others once a task. Indexes of all layers are in memory together, as each point is a mean over them.

    Args:
        selector: an instance, or a text for `make_selector`; configured, without rows.
        tasks: name -> a problem a layer.
        k: keys to find and to select.
        values: of the knob; default `ladder`, until recall is 0.995, or 60 % of the keys are scanned, or 20 % are and
            the last four turns gained less than 0.05 (it does not arrive), or the knob exceeds N. A value that changes
            neither what is found nor what is scanned makes no point.
        progress: called with (what is being done, steps done, steps).

    Raises:
        ValueError: no selector, tasks over different keys, a `k` or values that do not fit, or missing training
            queries.
        ContractError: the selector named more than k rows, the same one twice, or one that is not there.
    """
    method = as_selector(selector)
    if values is not None and (not values or min(values) < 1):
        raise ValueError(f"values of a knob are 1 or more, got {list(values)}")
    problems = list(tasks.values())
    if not problems or not problems[0]:
        raise ValueError("curves needs a task, and a task at least one problem")
    for others in problems[1:]:
        if len(others) != len(problems[0]) or not all(map(_same_keys, problems[0], others)):
            raise ValueError(f"the tasks {', '.join(tasks)} are not over the same keys")
    for problem in problems[0]:
        check(method, problem.keys.shape[1], k)
    report = progress or (lambda what, done, total: None)
    made, indexes = {}, None
    for name, task in tasks.items():
        if indexes is None or method.learns:
            indexes = None  # the last task's are freed before the next ones are made
            indexes = _build(method, task, k, report)
        made[name] = _sweep(method, indexes, task, k, values, report)
    return made


def _same_keys(a: Problem, b: Problem) -> bool:
    return a.keys is b.keys or torch.equal(a.keys, b.keys)


def check(selector: Selector, keys: int, k: int) -> None:
    """`k` of `keys` keys can be looked for with this selector; else ValueError."""
    if selector.find(Observes):
        raise ValueError(
            f"{selector} learns from what its selections got, and a sweep asks for rows without attending to them: "
            f"measure it by bench"
        )
    if selector.find(LooksAhead):
        raise ValueError(
            f"{selector} goes by queries foreseen from the layer before, and a sweep has none: measure it by bench, "
            f"on traces made with `sparseattn capture --ahead`"
        )
    if selector.find(Evicts):
        raise ValueError(
            f"{selector} drops rows for good at the first query, and a sweep asks one index with many: measure it by "
            f"bench"
        )
    if k < 1:
        raise ValueError(f"k is 1 or more keys, got {k}")
    if k > keys // selector.unit * selector.unit:
        raise ValueError(f"recall@{k} needs at least {k} keys that {selector} can index, there are {keys}")
    budget_rows(k, keys, selector.span, selector)


class _Index:
    """A selector that has been shown a problem's keys."""

    def __init__(self, selector: Selector, problem: Problem) -> None:
        self.selector = selector.for_layer(LayerContext(problem.layer, rope=problem.rope))
        cache = KVCache(self.selector, sink=0, window=0, seal=selector.unit)
        keys, training, at = problem.keys[None], problem.training, problem.positions
        learns = training is not None and selector.learns
        queries = training[None] if training is not None and learns else None
        cache.append(keys, keys, queries, None if at is None else at[None, : keys.shape[2]])
        start = time.perf_counter()
        cache.seal()
        self.seconds = time.perf_counter() - start
        rows = int(cache.sealed[0])
        self.keys = cache.keys[0, :, :rows]  # [H,N,D] in stored order
        self.step = cache.search.step(counted=True)
        self.bytes = sum(state.nbytes for _, state in self.selector.buffers()) / (rows * len(keys[0]))

    def searcher(self) -> Selector:
        """Return the index to ask and to turn the knob of; its state is its own."""
        twin = self.selector.clone()
        for own, other in zip(twin.find(ReadsKeys), self.selector.find(ReadsKeys), strict=True):
            own.stored = other.stored
        return twin

    def at(self, positions: Tensor) -> StepContext:
        """Return a step at `positions` `[1]`."""
        return replace(self.step, positions=positions)


def _build(selector: Selector, problems: Sequence[Problem], k: int, report: Progress) -> list[_Index]:
    # What a first use compiles or loads is not the index's time: a small one is built and asked before.
    few = min(max(256, k + selector.unit), problems[0].keys.shape[1])
    small = problems[0]
    training = None if small.training is None else small.training[:, :, :few]
    small = Problem(small.keys[:, :few], small.queries[:, :, :1], training, layer=small.layer, rope=small.rope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say, the index itself says
        index = _Index(selector, small)
        index.selector.select(small.queries[None, :, :, 0], index.at(torch.tensor([few])), k)
    indexes = []
    for i, problem in enumerate(problems):
        report("build", i, len(problems))
        indexes.append(_Index(selector, problem))
    return indexes


def _sweep(
    method: Selector,
    indexes: Sequence[_Index],
    problems: Sequence[Problem],
    k: int,
    values: Sequence[int] | None,
    report: Progress,
) -> Curve:
    fewest = min(problem.queries.shape[2] for problem in problems)
    rows = max(index.keys.shape[1] for index in indexes)
    layers = [
        _Layer(index, problem, top_keys(problem.queries, index.keys, k))
        for index, problem in zip(indexes, problems, strict=True)
    ]
    settings: list[int | None] = [None]
    if method.knob is not None:
        settings = list(values if values is not None else ladder(rows))
    points: list[Point] = []
    probe: list[Tensor] = []
    for value in settings:
        what = "ask" if method.knob is None else f"{method.knob}={value}"
        for layer in layers:
            layer.turn(method.knob, value)
        answers: list[list[_Answer]] = []
        for t in range(fewest):
            report(what, t, fewest)
            answers.append([layer.ask(t, k) for layer in layers])
            if t + 1 == min(PROBE, fewest):
                before, probe = probe, [answer.facts for token in answers for answer in token]
                if before and all(torch.equal(a, b) for a, b in zip(before, probe, strict=True)):
                    break  # no query is served otherwise
        else:
            points.append(_point(value, layers[0].searcher, answers))
            if values is None and _ends(points):
                break
    heads, group, _, size = problems[0].queries.shape
    return Curve(
        repr(method),
        method.knob,
        {"k": k, "keys": rows, "queries": fewest, "layers": [problem.layer for problem in problems]}
        | {"heads": heads, "group": group, "size": size, "dtype": "float32"},
        tuple(points),
        sum(index.seconds for index in indexes) / len(indexes),
        sum(index.bytes for index in indexes) / len(indexes),
    )


def _ends(points: Sequence[Point]) -> bool:
    """Nothing is to be learned from turning the knob further."""
    recall, scanned = points[-1].mean("recall"), points[-1].mean("scanned_share")
    if recall >= ENOUGH or scanned >= FAR:
        return True
    share, turns, gain = SLOW
    return scanned >= share and len(points) > turns and recall - points[-1 - turns].mean("recall") < gain


@dataclass(frozen=True, eq=False)
class _Answer:
    facts: Tensor  # [3,H*G] float64, in the order of `MEASURES`; -inf for unknown, as NaN equals nothing
    seconds: float


class _Layer:
    """One layer's index, its queries and what they should find."""

    def __init__(self, index: _Index, problem: Problem, best: Tensor) -> None:
        self.index, self.searcher, self.keys, self.best = index, index.searcher(), index.keys, best
        count = problem.queries.shape[2]
        self.queries = problem.queries
        self.positions = torch.arange(count) + problem.keys.shape[1]
        if problem.positions is not None:
            self.positions = problem.positions[-count:]

    def turn(self, knob: str | None, value: int | None) -> None:
        if knob is not None:
            setattr(self.searcher, knob, value)

    def ask(self, t: int, k: int) -> _Answer:
        """Return the t-th token's query, of all heads."""
        heads, group, _, size = self.queries.shape
        rows = self.keys.shape[1]
        query = self.queries[None, :, :, t]
        step = self.index.at(self.positions[t : t + 1])
        start = time.perf_counter()
        selection = self.searcher.select(query, step, k)
        seconds = time.perf_counter() - start
        selection_checks.check(selection, query, step.positions, k, rows, None, self.searcher)
        selection = self.searcher.counted(selection, query, step, k)
        reads = selection.mask(rows)[0].view(heads, -1, rows)  # [H,1 or G,N]
        distinct = reads.any(1).sum(-1, keepdim=True)  # [H,1]
        recall = reads.expand(-1, group, -1).gather(-1, self.best[:, :, t]).double().mean(-1)  # [H,G]
        unknown = torch.tensor(-torch.inf, dtype=torch.float64)
        scanned = unknown if selection.scanned is None else selection.scanned[0].view(heads, -1).double()
        read = unknown if selection.scan_bytes is None else selection.scan_bytes[0, :, None].double()
        row_bytes = 2 * size * self.keys.element_size()  # a key and a value
        read = read + selection.bias_bytes(heads)[0, :, None]
        shares = (recall, scanned / rows, (read + distinct * row_bytes) / (rows * row_bytes))
        return _Answer(torch.stack([share.expand(heads, group).flatten() for share in shares]), seconds)


def _point(value: int | None, searcher: Selector, answers: Sequence[Sequence[_Answer]]) -> Point:
    """Return the mean over tokens; `answers` by token, then layer."""
    layers = list(zip(*answers, strict=True))
    facts = torch.cat([torch.stack([head.facts for head in layer]).mean(0) for layer in layers], -1)  # [3,heads]
    facts = torch.where(facts.isinf(), torch.nan, facts)
    seconds = [float(torch.tensor([head.seconds for head in layer]).median()) for layer in layers]
    return Point(value, repr(searcher), dict(zip(MEASURES, facts, strict=True)), sum(seconds) / len(seconds))


def top_keys(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Ids `[H,G,Q,count]` int64 of the exact top `count` of `keys` `[H,N,D]` by inner product with `queries`
    `[H,G,Q,D]`, best first. In torch and float32, blocks at a time: recall is measured where faiss is not installed."""
    step = max(1, BLOCK // (keys.shape[1] * queries.shape[1]))
    out = []
    for query, head in zip(queries.float(), keys.float(), strict=True):
        parts = [(part @ head.T).topk(count, dim=-1).indices for part in query.split(step, dim=1)]
        out.append(torch.cat(parts, 1))
    return torch.stack(out)
