"""What a method keeps of the rows, and the methods that it is made of: cloned, reordered, moved and reset together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseattn.core.row_buffer import State

Self = TypeVar("Self", bound="Stateful")


class Stateful:
    """An object whose attributes that are `State` hold what depends on the rows seen; all others are parameters.

    Attributes:
        part_names: names of the attributes that are selectors which this one is made of. Their state is the method's,
            under names such as `pages.low`.
    """

    part_names: tuple[str, ...] = ()

    def parts(self) -> Sequence[tuple[str, Stateful]]:
        """Return the methods that this one is made of, by the attribute's name."""
        return [(name, getattr(self, name)) for name in self.part_names]

    def states(self) -> list[tuple[str, State]]:
        """Return its own state, by the attribute's name."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, State)]

    def buffers(self) -> list[tuple[str, State]]:
        """Return its state by name, and that of its parts as `part.name`."""
        inner = [(f"{name}.{inside}", state) for name, part in self.parts() for inside, state in part.buffers()]
        return self.states() + inner

    def clone(self: Self) -> Self:
        """Return an independent copy of the state; parameters are shared."""
        return self._copied(lambda state: state.clone(), lambda part: part.clone())

    def _copied(self: Self, of_state: Callable[[State], State], of_part: Callable[[Any], Any]) -> Self:
        twin = copy.copy(self)
        for name, state in self.states():
            setattr(twin, name, of_state(state))
        for name, part in self.parts():
            setattr(twin, name, of_part(part))
        return twin

    def reorder(self, index: Tensor) -> None:
        """Make sequence b what sequence `index[b]` was (beam search)."""
        for _, state in self.states():
            state.take(index)
        for _, part in self.parts():
            part.reorder(index)

    def reset(self) -> None:
        """Forget every row."""
        for _, state in self.states():
            state.reset()
        for _, part in self.parts():
            part.reset()

    def to(self, device: torch.device | str) -> None:
        """Move state and tensor parameters."""
        for name, value in vars(self).items():
            if isinstance(value, State):
                value.to(device)
            elif isinstance(value, (Tensor, torch.nn.Module)) and name != "stored":
                setattr(self, name, value.to(device))
        for _, part in self.parts():
            part.to(device)
