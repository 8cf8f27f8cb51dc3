"""What a plan is to make small: the bytes that are read, as they were measured, or a step's time on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sparseattn.core.context import Heads
from sparseattn.core.step_cost import Cost, Shape, dense_cost, step_cost, total
from sparseattn.cost_model.machine import Machine
from sparseattn.roles.role import DENSE, Role, Share
from sparseattn.selectors.base import Selector


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of the model.

    Args:
        index: its number.
        heads, group, size: KV heads, query heads of each, and head size.
        dtype: of keys.
        fresh: a share of its heads -> the selector, told of the layer.
    """

    index: int
    heads: int
    group: int
    size: int
    dtype: torch.dtype
    fresh: Callable[[Share], Selector] = field(default=lambda share: share.selector, compare=False)


class Objective(Protocol):
    """What is to be small."""

    @property
    def unit(self) -> str:
        """ "bytes" or "seconds", of a step in all layers that can be sparse."""

    def heads(self, layer: PlannedLayer, role: Role, bytes_heads: Sequence[float]) -> list[float]:
        """Return what a step costs in a layer whose heads all have one role, by KV head."""

    def layer(self, layer: PlannedLayer, given: Role | Sequence[Role], costs: Mapping[Role, Sequence[float]]) -> float:
        """Return what a step costs in a layer; `costs` are what `heads` said of each role."""


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes read to choose and to attend, as measured on the windows.

    Args:
        context: rows of a window.
        width: bytes of an element.
    """

    context: int
    width: int
    unit = "bytes"

    def heads(self, layer: PlannedLayer, role: Role, bytes_heads: Sequence[float]) -> list[float]:
        """By what was measured of each head."""
        return [share * self.context * 2 * layer.size * self.width for share in bytes_heads]

    def layer(self, layer: PlannedLayer, given: Role | Sequence[Role], costs: Mapping[Role, Sequence[float]]) -> float:
        """Heads add up."""
        each = [given] * layer.heads if isinstance(given, Role) else given
        return sum(costs[role][head] for head, role in enumerate(each))


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds by formula (`costs`), at any context and batch.

    Args:
        context, batch: of the step.
        sink, window: as in `KVCache`.
        machine: that predicts seconds; None: bytes are counted.
    """

    context: int
    batch: int
    sink: int
    window: int
    machine: Machine | None

    @property
    def unit(self) -> str:
        """See `Objective`."""
        return "bytes" if self.machine is None else "seconds"

    def heads(self, layer: PlannedLayer, role: Role, bytes_heads: Sequence[float]) -> list[float]:
        """Return a layer's cost in equal parts: its launches serve all heads."""
        return [self._of(self._cost(layer, role, layer.heads)) / layer.heads] * layer.heads

    def layer(self, layer: PlannedLayer, given: Role | Sequence[Role], costs: Mapping[Role, Sequence[float]]) -> float:
        """Heads of one role share their launches, heads of others have launches of their own."""
        if isinstance(given, Role):
            return sum(costs[given])
        counts = {role: list(given).count(role) for role in given}
        return self._of(total(self._cost(layer, role, count) for role, count in counts.items()))

    def _cost(self, layer: PlannedLayer, role: Role, heads: int) -> Cost:
        shape = Shape(self.batch, heads, layer.group, layer.size, layer.dtype)
        if role.method == DENSE:
            return dense_cost(shape, self.context)
        served = None if heads == layer.heads else Heads(tuple(range(heads)), layer.heads)
        return step_cost(
            layer.fresh(Share(role.selector, served)),
            shape,
            self.context,
            role.budget,
            sink=self.sink,
            window=self.window,
        )

    def _of(self, cost: Cost) -> float:
        return cost.bytes if self.machine is None else self.machine.seconds(cost)
