"""What `bench` measures, item by item: a trace, a method and a codec, at all budgets; by one process or by several."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseattn.cache.selection_checks import ContractError
from sparseattn.cli.bench_methods import ChosenMethods, MethodsOfTrace
from sparseattn.cli.bench_options import BenchOptions
from sparseattn.cli.done_items import DoneItems, key_of_method, key_of_trace
from sparseattn.cli.progress import progress_bar
from sparseattn.codecs.base import RowCodec
from sparseattn.core.budget import Budget, budget_order
from sparseattn.evaluation.evaluation_files import read, written
from sparseattn.evaluation.full_attention import FullAttentions
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import usable_layers
from sparseattn.evaluation.result import Evaluation
from sparseattn.roles.role import kept_label
from sparseattn.roles.roles import Method
from sparseattn.traces.trace import Trace
from sparseattn.utils.ranks import JobRanks


@dataclass
class Replayed:
    """A trace, the methods to measure on it, and what was measured, method by method and by rising budget."""

    trace: Trace
    methods: MethodsOfTrace
    results: list[Evaluation] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Item:
    """A method on a trace at rising budgets, its sealed rows kept by a codec; None: as they come."""

    replay: Replayed
    method: Method
    budgets: Sequence[Budget]
    codec: RowCodec | None

    @property
    def label(self) -> str:
        return kept_label(self.method.label(), self.codec)


class BenchRun:
    """Measures items, or finds them measured.

    Args:
        options: of the command.
        chosen: the methods; one of `all` that refuses the rows themselves is left out with its reason.
        done: what processes of this run have measured.
    """

    def __init__(self, options: BenchOptions, chosen: ChosenMethods, done: DoneItems) -> None:
        self.options, self.chosen, self.done = options, chosen, done
        self.full_attentions = FullAttentions()

    def items(self, replays: Sequence[Replayed]) -> list[Item]:
        """Return all there is to measure, in the order of tables."""
        items = []
        for replay in replays:
            for (method, budgets), codec in itertools.product(replay.methods.methods, self.options.codecs):
                rising = sorted(budgets, key=lambda budget: budget_order(budget, replay.trace.tokens))
                items.append(Item(replay, method, rising if method.uses_budget else rising[:1], codec))
        return items

    def steps(self, item: Item) -> int:
        """Return how many tokens of layers are decoded."""
        return self.options.last * len(self._layers(item)) * len(item.budgets)

    def _layers(self, item: Item) -> list[int]:
        return usable_layers(item.replay.trace, self.options.layer_numbers)

    def share(self, ranks: JobRanks, items: Sequence[Item]) -> None:
        """Measure the items that this process takes, and return once all processes have measured theirs."""
        costs = [self.steps(item) * item.replay.trace.tokens for item in items]
        self.done.share(ranks, [self._path(item) for item in items], costs, lambda place: self._said(items[place]))
        self.full_attentions.clear()

    def _said(self, item: Item) -> tuple[Any, dict[str, Tensor]]:
        results = self._evaluated(item)
        return ({"left out": results}, {}) if isinstance(results, str) else written(results)

    def measured(self, items: Sequence[Item]) -> Iterator[tuple[Replayed, list[Evaluation]]]:
        """Yield the results of each item, with a progress bar; what is left out goes there with its reason."""
        with progress_bar() as bar:
            for item in items:
                task = bar.add_task(f"{item.replay.trace.name} {item.label}", total=self.steps(item))
                results = self._found(item)
                if results is None:
                    results = self._evaluated(item, functools.partial(bar.advance, task))
                if isinstance(results, str):
                    item.replay.methods.left_out[item.label] = results
                else:
                    far = self.options.far
                    yield item.replay, [result.far(far) for result in results] if far else results
                bar.remove_task(task)
        self.full_attentions.clear()

    def _path(self, item: Item) -> Path:
        how = self.options.replay(item.codec)
        key = {name: getattr(how, name) for name in ("sink", "window", "last", "seal", "every")}
        key |= {"layers": self._layers(item), "device": str(how.device), "codec": repr(item.codec)}
        key |= {"budgets": repr(item.budgets), "steps": list(self.options.steps)}
        return self.done.path(key, key_of_method(item.method), key_of_trace(item.replay.trace))

    def _found(self, item: Item) -> list[Evaluation] | str | None:
        """Return what another process has measured; None where none has."""
        if (written := self.done.read(self._path(item)) if self.done.folder.is_dir() else None) is None:
            return None
        said, tensors = written
        return str(said["left out"]) if isinstance(said, dict) else read(said, tensors)

    def _evaluated(self, item: Item, advance: Callable[[int], None] | None = None) -> list[Evaluation] | str:
        """Return the results, or why the method is left out; ValueError where it was asked for by its name."""
        how = self.options.replay(item.codec)
        try:
            return evaluate_budgets(
                item.replay.trace,
                item.method,
                item.budgets,
                how,
                steps=self.options.steps,
                progress=advance,
                full_attentions=self.full_attentions,
            )
        except ValueError as error:
            kept = item.codec is not None and len(self.options.codecs) > 1 and not isinstance(error, ContractError)
            if not (kept or self.chosen.forgives(item.method, error)):
                raise
            return str(error)
