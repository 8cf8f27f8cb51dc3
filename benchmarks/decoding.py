"""Ways to decode behind one prefill, dense and sparse, and what their steps take.

Every way gets a copy of the same prefill and is fed the same tokens, whatever it predicts, in blocks that take turns,
so that a busy machine slows all of them. A ratio is taken within a round of blocks, and its median over the rounds
counts.

Steps that seal are rare (one in `KVCache`'s `seal`), so a median would never see one: a seal of that many rows is timed
by itself, and tokens a second and ratios count its share of every token. Where a model's positions leave no room for so
many behind the prompt, it is a seal of fewer, each of which then costs more. Building the index of the prompt is apart.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Clock, median
from sparseattn.cache import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.search import Search
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.transformers_classes import DynamicCache

DENSE = ("sdpa", "eager", "static")
WARM = 4  # steps of every way that do not count: caches fill, compilers run
LOOKED_INTO = 16  # steps of every sparse way whose parts are timed
WITHOUT = "without attention"  # the way whose layers attend to nothing
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("store", KVCache, "append"),
    ("select", Search, "choose"),
    ("attend", decode, "attend"),
    ("attend", decode, "attend_stored"),
    ("attend", Search, "decoded"),  # of methods that choose and attend at once
    ("layer", SparseLayer, "attend"),  # those above, checks, counters
)


@dataclass
class Way:
    """One way to decode: a model, a cache that holds the prompt, and what its steps took.

    Attributes:
        build: seconds to build the index of the prompt; None: there is none.
        rounds: the steps of every round.
        tokens: likeliest next token after every step of the rounds.
    """

    name: str
    model: Any
    cache: Any
    build: Clock | None = None
    rounds: list[list[Clock]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def feed(self, ids: Tensor) -> Tensor:
        """Feeds tokens `[1,n]`; the logits `[V]` behind the last."""
        with torch.no_grad():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(self.cache))
        logits: Tensor = out.logits[0, -1]
        return logits

    def step(self, ids: Tensor) -> tuple[Clock, int]:
        """What feeding one token `[1,1]` takes, and the likeliest one behind it."""
        started = Clock.now(ids.device)
        logits = self.feed(ids)
        return Clock.now(ids.device) - started, int(logits.argmax())


def dense_ways(prefill: Prefill, models: Mapping[str, Any], room: int) -> list[Way]:
    """transformers' own caches, filled with the prefill.

    Args:
        models: by attention implementation.
        room: tokens that the static cache is made for.
    """
    from transformers import StaticCache

    config = models["sdpa"].config
    count = config.get_text_config(decoder=True).num_hidden_layers
    ways = []
    for name in DENSE:
        layers = prefill.cache("window", None, dense_layers=count).layers
        cache = DynamicCache(config=config)
        if name == "static":
            cache = StaticCache(config=config, max_cache_len=room)
            for mine, held in zip(cache.layers, layers, strict=True):
                gone = held.get_seq_length() - held.keys.shape[2]  # rows that a layer with a sliding window let go
                mine.update(*(F.pad(rows, (0, 0, gone, 0)) for rows in (held.keys, held.values)))
        else:
            cache.layers = layers
        ways.append(Way(name, models["eager" if name == "eager" else "sdpa"], cache))
    return ways


def way_without_attention(model: Any) -> Way:
    """The model with an attention that puts out the queries, whose cache holds no prompt: what no method can go below.

    Args:
        model: another of the same weights, with `no_attention` as its implementation.
    """
    return Way(WITHOUT, model, DynamicCache(config=model.config))


def no_attention(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """An attention function of transformers: `[B,HG,n,D]` as it comes, `[B,n,HG,D]`."""
    return query.transpose(1, 2).contiguous(), None


def sparse_way(prefill: Prefill, model: Any, spec: str, options: argparse.Namespace, room: int) -> Way:
    """A selector's cache behind the prefill, with the index of the prompt built."""
    cache = prefill.cache(spec, options.budget, capacity=room, **cache_settings(options))
    started = Clock.now(model.device)
    cache.seal()
    return Way(spec, model, cache, Clock.now(model.device) - started)


def cache_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all sparse caches have in common."""
    names = ("sink", "window", "seal", "dense_layers", "sealed_device")
    kept = {} if options.kv_rows is None else {"rows": options.kv_rows}
    return {name: getattr(options, name) for name in names} | kept


def take_turns(ways: Sequence[Way], ids: Tensor, block: int, done: Callable[[], None]) -> None:
    """Feeds all ways the tokens `[1,n]`, a block each by turns; the one that begins changes from round to round."""
    for number, start in enumerate(range(0, ids.shape[1], block)):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            steps = [way.step(ids[:, t : t + 1]) for t in range(start, start + block)]
            way.rounds.append([clock for clock, _ in steps])
            way.tokens += [token for _, token in steps]
            done()


def sealing(way: Way, ids: Tensor) -> Clock:
    """Seconds per row of one seal: of the tokens `[1,n]` read before it and of those that wait already, but for the
    window. Afterwards the cache seals whenever it can."""
    layers = list(way.cache.sparse_layers.values())
    before = int(layers[0].rows.sealed)
    way.feed(ids)
    for layer in layers:  # there may be fewer rows than the cache waits for
        layer.rows.seal_rows = layer.rows.selector.unit
    started = Clock.now(ids.device)
    way.cache.seal()
    taken = Clock.now(ids.device) - started
    return taken.times(1 / (int(layers[0].rows.sealed) - before))


def parts(way: Way, ids: Tensor) -> dict[str, float]:
    """Seconds of a step in its parts, medians: `store`, `select`, `attend`, `other` of the sparse layers, and `model`,
    all that is not sparse attention. The clocks wait for a GPU at every part, so that there a step takes longer."""
    device, steps = ids.device, []
    for t in range(ids.shape[1]):
        with stopwatch(device) as spent:
            whole = way.step(ids[:, t : t + 1])[0].wall
        inner = sum(spent[name] for name in ("store", "select", "attend"))
        layer = spent.pop("layer")
        steps.append(spent | {"other": layer - inner, "model": whole - layer})
    return {name: round(statistics.median(step[name] for step in steps), 7) for name in steps[0]}


@contextlib.contextmanager
def stopwatch(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds spent in each of `PARTS` while it is open."""
    spent = {name: 0.0 for name, _, _ in PARTS}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = Clock.now(device)
            out = function(*args, **kwargs)
            spent[name] += (Clock.now(device) - started).wall
            return out

        return run

    with contextlib.ExitStack() as patches:
        for name, owner, attribute in PARTS:
            patches.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield spent


def figures(
    way: Way, dense: Way, bare: Way, seal: Clock | None, inside: dict[str, float] | None, rows: float | None
) -> dict[str, Any]:
    """What is recorded of one way. `speed_up`: dense over this one, both with their share of sealing; median, smallest
    and largest of the rounds; of the wall and of processor time, which other work on the machine hardly changes.
    `attention_removed`: the share of dense's time above that of the model without attention, `bare`, which this one
    does not take; median of the rounds."""
    extra = seal or Clock(0.0, 0.0)
    pairs = [(median(a), median(b)) for a, b in zip(dense.rounds, way.rounds, strict=True)]
    ratios = [a.wall / (b.wall + extra.wall) for a, b in pairs]
    processor = [a.processor / (b.processor + extra.processor) for a, b in pairs]
    step = time_of(way)
    triples = [tuple(median(part) for part in one) for one in zip(dense.rounds, way.rounds, bare.rounds, strict=True)]
    removed = [(a.wall - b.wall - extra.wall) / (a.wall - c.wall) for a, b, c in triples if a.wall > c.wall]
    return {
        "name": way.name,
        "seconds_per_step": step.as_dict(),
        "sealing_seconds_per_token": None if seal is None else seal.as_dict(),
        "tokens_per_second": round(1 / (step.wall + extra.wall), 2),
        "speed_up": round(statistics.median(ratios), 3),
        "speed_up_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "speed_up_processor": round(statistics.median(processor), 3),
        "attention_removed": round(statistics.median(removed), 3) if removed else None,
        "index_seconds": None if way.build is None else way.build.as_dict(),
        "rows": rows,
        "same_token_as_dense": round(
            sum(a == b for a, b in zip(way.tokens, dense.tokens, strict=True)) / len(way.tokens), 4
        ),
        "parts_seconds": inside,
    }


def time_of(way: Way) -> Clock:
    """Median of all its steps."""
    return median([clock for steps in way.rounds for clock in steps])
