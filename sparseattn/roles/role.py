"""What a head does, `Role`, and the KV heads of a layer that do the same, `Share`."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.budget import Budget, Rows, budget_of, budget_record, parse_budget
from sparseattn.core.context import Heads, LayerContext
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.recent import Recent
from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.registry import make_selector

DENSE, WINDOW = "dense", "window"


@dataclass(frozen=True, eq=False)
class Role:
    """What a head does.

    Args:
        method: "dense" reads every row, "window" sink and window alone; anything else is for `make_selector`.
        budget: rows beyond sink and window, as in `decode`, with the text "all" for no limit; None: the one that is
            asked for where the roles are used. With a budget, "window" reads so many rows more (`Recent`).

    Raises:
        ValueError: no such method, a budget that does not fit it, or one for a method that has no use for it.
    """

    method: str
    budget: Budget = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise ValueError(
                f'a role is "{DENSE}", "{WINDOW}" or a selector as text, such as "quest:page=16", got '
                f"{reprlib.repr(self.method)}"
            )
        selector = self.selector
        if self.budget is None:
            return
        if self.method == DENSE or not selector.uses_budget:
            raise ValueError(f"{self.method} has no use for a budget, got {reprlib.repr(self.budget)}")
        budget_of(selector, self.budget, 1)

    @functools.cached_property
    def selector(self) -> Selector:
        """Its configuration, which serves no cache: see `Share.fresh`."""
        if self.method == DENSE or (self.method == WINDOW and self.budget is not None):
            return Recent()
        return Window() if self.method == WINDOW else make_selector(self.method)

    @property
    def label(self) -> str:
        """For tables."""
        what = self.method if self.method in (DENSE, WINDOW) else self.selector.label()
        return what + self._at

    @property
    def _at(self) -> str:
        if self.budget is None:
            return ""
        return f" at {100 * self.budget:.6g}%" if isinstance(self.budget, float) else f" at {self.budget}"

    def record(self) -> str | dict[str, Any]:
        """As in a file."""
        return self.method if self.budget is None else {"method": self.method, "budget": budget_record(self.budget)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Role) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, str]:
        """With the budget's type in it: 1 is a row and 1.0 the whole context."""
        return self.method, repr(self.budget)

    def __str__(self) -> str:
        return self.method + self._at


@dataclass(frozen=True, eq=False)
class Share:
    """The KV heads of a layer that have one method, and the method.

    Args:
        selector: its configuration.
        heads: which they are; None: all of the layer's.
        role: None where one selector serves a whole model.
    """

    selector: Selector
    heads: Heads | None = None
    role: Role | None = None

    @property
    def label(self) -> str:
        """Of the method, for tables."""
        return self.selector.label() if self.role is None else self.role.label

    @property
    def own(self) -> bool:
        """Whether it has a budget that holds whatever is asked for."""
        return self.role is not None and (self.role.method == DENSE or self.role.budget is not None)

    def budget(self, given: Budget) -> Rows:
        """Return what it may read where the budget `given` is for those that have none of their own."""
        if self.role is not None and self.role.method == DENSE:
            return None
        return parse_budget(given if self.role is None or self.role.budget is None else self.role.budget)

    def fresh(self, layer: LayerContext) -> Selector:
        """Return a selector for its heads in a layer of a model, bound to what is known of it.

        `layer.heads` are those that this process has, where others have the rest; its own are numbered among them.
        """
        key_bytes = self.selector.layer_context.key_bytes if layer.key_bytes is None else layer.key_bytes
        heads = layer.heads if self.heads is None else self.heads.among(layer.heads)
        return self.selector.for_layer(replace(layer, heads=heads, key_bytes=key_bytes))

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """Its heads of all a layer's in a dimension; a view where they are neighbours."""
        if self.heads is None:
            return x
        first, last = self.heads.which[0], self.heads.which[-1]
        if last - first + 1 == len(self.heads.which):
            return x.narrow(dim, first, last - first + 1)
        return x.index_select(dim, self._index(x.device))

    @functools.cached_property
    def _indices(self) -> dict[torch.device, Tensor]:
        return {}

    def _index(self, device: torch.device) -> Tensor:
        """Return the heads on a device, copied there once, so that no step waits for it."""
        if device not in self._indices:
            assert self.heads is not None
            self._indices[device] = torch.tensor(self.heads.which).to(device)
        return self._indices[device]


def together(shares: Sequence[Share], parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Return what each share's heads gave, in the order of the layer's heads; the opposite of `Share.of`."""
    if len(shares) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    out = parts[0].new_empty(shape)
    for share, part in zip(shares, parts, strict=True):
        out.index_copy_(dim, share._index(out.device), part)
    return out


def kept_label(label: str, codec: object | None) -> str:
    """Return a method's label where a row codec keeps sealed rows: `quest, kivi:bits=4 rows`."""
    return label if codec is None else f"{label}, {codec} rows"
