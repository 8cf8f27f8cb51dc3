"""Measures windows: what every role does in every layer of one, and what a configuration does to predictions of one.

What was measured once is read from the records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseattn.core.budget import budget_record, parse_budget
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.run import Method, measure
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.error_sensitivity import LayerSeen, observe
from sparseattn.recommend.frontier import measured
from sparseattn.recommend.records import TrialRecords
from sparseattn.recommend.windows import TextWindow
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.utils.ranks import JobRanks

FRONTIER, TRIAL = "frontier", "trial"
KEPT = ("kl", "same_top", "nll", "nll_difference", "scored_tokens", "rows", "context", "bytes_share")


@dataclass(frozen=True)
class TrialSettings:
    """How windows are decoded.

    Args:
        sink, window: as in `KVCache`.
        draws: backward passes for what an error is worth.
        width: bytes of an element that rows are counted in; None: those of the model.
    """

    sink: int
    window: int
    draws: int
    width: int | None


class Trials:
    """Measures with one model.

    Args:
        decoder: the model, with the `sink` and `window` of `settings`.
        tokens: its tokenizer.
        records: what was measured.
        settings: as said.
        memory: bytes of keys and values of prompts that may be kept for the next configuration.
        begin: called with the records before the first that is added.
    """

    def __init__(
        self,
        decoder: ModelDecoder,
        tokens: Tokens,
        records: TrialRecords,
        settings: TrialSettings,
        memory: int = 0,
        begin: Callable[[TrialRecords], None] = lambda records: None,
    ) -> None:
        self.decoder, self.tokens, self.records, self.settings = decoder, tokens, records, settings
        self._memory, self._held = memory, dict[tuple[int, ...], Any]()
        self._begin, self._begun = begin, False
        self._seen: tuple[int, dict[int, LayerSeen]] | None = None

    # -- layers ------------------------------------------------------------------------------------------------------

    def frontier(self, window: TextWindow, groups: Sequence[Sequence[Role]], done: Callable[[int], None]) -> None:
        """Record every role in every layer, for a window; `groups` are of one method each.

        Args:
            done: called with the layers done, one method each.
        """
        known = {
            (frontier["layer"], frontier["method"], frontier["source"], _budgets(frontier["points"]))
            for frontier in self.records.of(FRONTIER)
            if frontier["number"] == window.number
        }
        names = {id(group): (*_measured_as(group), _budgets(map(_budget, group))) for group in groups}
        missing = [group for group in groups if any((i, *names[id(group)]) not in known for i in self.decoder.sparse)]
        done(len(self.decoder.sparse) * (len(groups) - len(missing)))
        if not missing:
            return
        prefill = self.read(window.prompt.context)
        seen = self._observed(prefill, window)
        for group in missing:
            for layer in self.decoder.sparse:
                if (layer, *names[id(group)]) not in known:
                    self._layer(prefill, window, layer, seen[layer], group)
                done(1)

    def _observed(self, prefill: Any, window: TextWindow) -> dict[int, LayerSeen]:
        """Return what a window's last tokens saw of each layer, made once for the methods that are measured one by
        one."""
        if self._seen is None or self._seen[0] != window.number:
            self._seen = None  # the last window's are freed before the next ones are made
            self._seen = window.number, observe(prefill, window.prompt.question, self.settings.draws, window.number)
        return self._seen[1]

    def frontiers(self, groups: Sequence[Sequence[Role]]) -> list[dict[str, Any]]:
        """Return what was recorded of these methods, as they are now; of no other, whatever a record calls itself."""
        places = {_measured_as(group): place for place, group in enumerate(groups)}
        frontiers = [record for record in self.records.of(FRONTIER) if (record["method"], record["source"]) in places]
        # As one process measures them: several append in any order, and sums depend on theirs.
        return sorted(
            frontiers,
            key=lambda record: (record["number"], places[record["method"], record["source"]], record["layer"]),
        )

    def _layer(self, prefill: Any, window: TextWindow, layer: int, seen: LayerSeen, group: Sequence[Role]) -> None:
        for role in group:
            role.selector.count_in(self.settings.width)
        points = measured(
            prefill,
            seen,
            layer,
            group,
            sink=self.settings.sink,
            window=self.settings.window,
            depth=self.decoder.config.num_hidden_layers,
        )
        kept = []
        for point in points:
            if not all(map(math.isfinite, point.bytes_heads)):
                raise ValueError(
                    f"{point.role.method} does not say what choosing reads, and a plan weighs methods by it: return a "
                    f"Scan from its `scan`, or leave it out"
                )
            facts = asdict(point)
            del facts["role"]
            kept.append({**_budget(point.role), **facts})
        method, source = _measured_as(group)
        place = {"number": window.number, "layer": layer, "method": method, "source": source}
        self._add(FRONTIER, {**place, "points": kept})

    # -- configurations ----------------------------------------------------------------------------------------------

    def agreement(self, window: TextWindow, roles: Roles) -> dict[str, Any]:
        """How far the predictions of a window by a configuration are from full attention's (`tasks.agreement`)."""
        source = roles.source()
        for record in self.records.of(TRIAL):
            if (record["number"], record["source"]) == (window.number, source):
                return record
        if self.settings.width is not None:
            roles.count_in(self.settings.width)
        (evaluation,) = measure(window.prompt, [Method(roles)], (), _Reading(self), self.tokens)
        place = {"number": window.number, "source": source}
        return self._add(TRIAL, {**place, **{name: evaluation[name] for name in KEPT}})

    # -- several processes -------------------------------------------------------------------------------------------

    def divide(
        self, ranks: JobRanks, count: int, measure: Callable[[int], object], shown: Callable[[int], None]
    ) -> None:
        """Let each process `measure` those of `count` items, by number, that it takes; what all of them found is in the
        records then. `shown` is called with the items done."""
        for place in ranks.take([1.0] * count):
            measure(place)
            shown(ranks.advance())
        ranks.meet(shown)
        self.records.read()
        ranks.meet()  # nobody joins parts that others are reading

    def _add(self, kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
        if not self._begun:
            self._begin(self.records)
            self._begun = True
        return self.records.add(kind, record)

    def read(self, tokens: Sequence[int]) -> Any:
        """Return a dense prefill, kept while there is memory for it."""
        name = tuple(tokens)
        if name not in self._held:
            made = self.decoder.read(tokens)
            size = made.nbytes
            if size > self._memory:
                return made
            self._memory -= size
            self._held[name] = made
        return self._held[name]


class _Reading:
    """A decoder whose prefills are those of the trials."""

    def __init__(self, trials: Trials) -> None:
        self.read, self.index, self.start = trials.read, trials.decoder.index, trials.decoder.start


def _measured_as(group: Sequence[Role]) -> tuple[str, str]:
    """Return the method and source in the records of roles of one method."""
    return group[0].method, _source(group[0])


def _source(role: Role) -> str:
    """Return what the method's numbers depend on: its configuration, and the files that it takes."""
    return hashlib.sha256(f"{role.method} {role.selector.source()}".encode()).hexdigest()[:16]


def _budget(role: Role) -> dict[str, Any]:
    return {"budget": budget_record(parse_budget(role.budget))}


def _budgets(points: Iterable[Mapping[str, Any]]) -> str:
    return json.dumps([point["budget"] for point in points])


def averaged(lines: Iterable[Mapping[str, Any]]) -> dict[int, dict[Role, dict[str, Any]]]:
    """Layer -> role -> the means over windows of what `Trials.frontier` recorded."""
    every: dict[int, dict[Role, list[Mapping[str, Any]]]] = {}
    for line in lines:
        for point in line["points"]:
            role = Role(line["method"], parse_budget(point["budget"]))
            every.setdefault(line["layer"], {}).setdefault(role, []).append(point)
    return {layer: {role: _mean(points) for role, points in roles.items()} for layer, roles in sorted(every.items())}


def _mean(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    n = len(points)
    heads = ("kl_heads", "error_heads", "bytes_heads")
    means = {name: [sum(each) / n for each in zip(*(point[name] for point in points), strict=True)] for name in heads}
    return {"kl": sum(point["kl"] for point in points) / n, **means}
